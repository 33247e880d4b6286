"""Gradient matching: its speed, the assumptions of SME, and the value of knowing a defense.

python benchmarks/matching.py speed DATA         a plain loop, the engine, and 20 victims at once
python benchmarks/matching.py dlfa DATA EPOCHS EXAMPLES [ITERATIONS]    SME against DLFA
python benchmarks/matching.py margins CSV        SME against IG, from `leakfrontier reproduce --out`
python benchmarks/matching.py adaptive DATA      a known defense's replay and likelihood
python benchmarks/matching.py paths DATA         figures 3 and 4 of the SME paper, to docs/lab/
python benchmarks/matching.py decline CSV        table 6 of the SME paper as a plot, to docs/lab/

DATA is a folder with cifar100 and emnist_letters as images in train/ and test/. Seconds are those
of one core. CSV is the file of sme-table2 or sme-table6.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import altair as alt
import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import (
    SME,
    Adversary,
    FedAvg,
    FedSGD,
    ImageSpace,
    InputSpace,
    InvertingGradients,
    NotApplicable,
    Observation,
    Protocol,
)
from leakfrontier.defenses import DPSGD, Batch, Defense, Noise, Quantization, SignSGD, TopK
from leakfrontier.evaluate.client.client import Client, ThreatModel, Upload, make_replay, observe
from leakfrontier.evaluate.data.data import load_dataset
from leakfrontier.evaluate.foundations.seeds import generator
from leakfrontier.evaluate.models.models import build_model
from leakfrontier.evaluate.papers.sme import build_attack, path, sme_upload
from leakfrontier.evaluate.papers.table import matched_psnr
from leakfrontier.evaluate.papers.tables import TABLES

VICTIMS = 20
PAPERS = "leakfrontier.evaluate.models.networks"


def speed(data: str) -> None:
    """Time an iteration: a plain loop as in the papers, our engine, and 20 victims at once."""
    images, labels = _images(data)
    space = _space(images, 100)
    ig, sme = InvertingGradients(iterations=8), SME(iterations=8)
    lenet, narrow, convnet, cnn = (
        build_model(name, space, generator("model"), **options)
        for name, options in (
            ("lenet", {}),
            (f"{PAPERS}:ig_convnet", {"width": 16}),
            (f"{PAPERS}:ig_convnet", {}),
            (f"{PAPERS}:sme_cnn", {}),
        )
    )
    cases: list[tuple[str, nn.Module, Adversary, Protocol, int]] = [
        ("IG, LeNet", lenet, ig, FedSGD(), 1),
        ("IG, LeNet", lenet, ig, FedSGD(), 8),
        ("IG, ConvNet of width 16", narrow, ig, FedSGD(), 1),
        ("IG, ConvNet of width 16", narrow, ig, FedSGD(), 8),
        ("SME, its CIFAR-100 CNN", cnn, sme, FedAvg(10, 10, 0.004), 10),
        ("IG, ConvNet of width 64", convnet, ig, FedSGD(), 1),
    ]
    for name, model, attack, protocol, size in cases:
        uploads = _uploads(model, images, labels, space, protocol, size, VICTIMS)
        observations = [upload.observation for upload in uploads]
        plain = _time_plain(observations[0], surrogate=isinstance(attack, SME))
        alone = _time_attack(attack, observations[:1])
        together = _time_attack(attack, observations)
        print(
            f"{name}, batch {size}: plain loop {plain:.2f} ms per iteration and victim, engine "
            f"{alone:.2f} ms ({plain / alone:.2f} times faster), 20 at once {together:.2f} ms "
            f"({plain / together:.2f} times the plain loop, {alone / together:.2f} one at a time)",
            flush=True,
        )


def dlfa(data: str, epochs: int, examples: int, iterations: int = 400) -> None:
    """Compare SME with DLFA on one upload. The time of DLFA is scaled to 400 iterations."""
    problem = {"E": epochs, "N": examples}
    upload = sme_upload(problem, load_dataset(f"{data}/emnist_letters"), generator("DLFA"))
    space = upload.observation.space
    (ours,), seconds = _attack(build_attack(problem, "SME"), [upload], space)
    (theirs,), longer = _attack(build_attack(problem, "DLFA", iterations), [upload], space)
    longer *= 400 / iterations
    print(
        f"E={epochs} N={examples}: SME {ours:.1f} dB in {seconds:.0f} s, DLFA {theirs:.1f} dB "
        f"after {iterations} iterations, {longer:.0f} s for 400: {longer / seconds:.1f} times"
    )


def margins(csv: str) -> None:
    """Print the gain of SME over IG on the same uploads."""
    for setting, trials in _by_setting(csv):
        paired = trials.pivot(index="trial", columns="attack", values="psnr")
        gains = (paired["SME"] - paired["IG"]).tolist()
        print(f"{setting}: SME {_spread(paired['SME'].tolist())} dB, better by {_spread(gains)}")


def paths(data: str) -> None:
    """Draw the path of local training, for one client of each setting of table 1."""
    rows = []
    for row in TABLES["sme-table1"].rows[:4]:
        letters, rng = load_dataset(f"{data}/emnist_letters"), generator("paths")
        steps = path(row.problem, letters, rng)
        setting = f"E={row.problem['E']}, B={row.problem['B']}, R={row.problem['R']}"
        time_axis = torch.linspace(0, 1, len(steps.plane_shares))
        for kind, xs, ys in (
            ("share in a plane, over local steps", time_axis, steps.plane_shares),
            ("cosine with the update, over alpha", steps.alphas, steps.cosines),
        ):
            points = zip(xs.tolist(), ys.tolist(), strict=True)
            rows += [{"setting": setting, "curve": kind, "x": x, "y": y} for x, y in points]
    frame = pd.DataFrame(rows)
    frame.to_csv("docs/lab/sme_paths.csv", index=False, float_format="%.5g")
    lines = (
        alt.Chart(frame)
        .mark_line()
        .encode(
            x=alt.X("x", title="from w_0 to w_T"),
            y=alt.Y("y", title=None, scale=alt.Scale(zero=False)),
            color=alt.Color("curve", title=None, legend=alt.Legend(orient="top", labelLimit=0)),
        )
        .properties(width=220, height=160)
        .facet(alt.Facet("setting", title=None), columns=2)
    )
    lines.save("docs/lab/sme_paths.svg")


def decline(csv: str) -> None:
    """Draw PSNR over the attacked round, ours and the paper's."""
    published = {
        json.dumps([row.method["attack"], *row.problem.values()]): row.paper["psnr"]
        for row in TABLES["sme-table6"].rows
    }
    rows = []
    for (rounds, epochs, examples, attack), trials in pd.read_csv(csv).groupby(
        ["R", "E", "N", "attack"]
    ):
        point = {"R": rounds, "setting": f"E={epochs}, N={examples}", "attack": attack}
        paper = published[json.dumps([attack, rounds, epochs, examples])]
        rows += [{**point, "source": "ours", "psnr": trials["psnr"].mean()}]
        rows += [{**point, "source": "paper (FEMNIST)", "psnr": paper}]
    frame = pd.DataFrame(rows)
    frame.to_csv("docs/lab/sme_decline.csv", index=False, float_format="%.4g")
    lines = (
        alt.Chart(frame)
        .mark_line(point=True)
        .encode(
            x=alt.X("R:O", title="communication round"),
            y=alt.Y("psnr", title="PSNR in dB", scale=alt.Scale(zero=False)),
            color=alt.Color("attack", title=None),
            strokeDash=alt.StrokeDash("source", title=None),
        )
        .properties(width=220, height=160)
        .facet(alt.Facet("setting", title=None), columns=2)
    )
    lines.save("docs/lab/sme_decline.svg")


def adaptive(data: str) -> None:
    """Compare informed and ignorant attacks on the same uploads."""
    images, labels = _images(data)
    space = _space(images, 100)
    model = build_model("lenet", space, generator("model"))
    defenses = [Noise(0.003), Noise(0.03), Noise(0.03, distribution="laplace"), DPSGD(0.01)]
    for defense in (*defenses, Quantization(4), Quantization(2), SignSGD(), TopK(0.1)):
        reached = {}
        for knows, comparison in ((False, "cosine"), (True, "cosine"), (True, "likelihood")):
            threat = ThreatModel(knows_targets=True, knows_defense=knows)
            uploads = _uploads(
                model, images, labels, space, FedSGD(), 1, VICTIMS, defense=defense, threat=threat
            )
            attack = InvertingGradients(iterations=1000, comparison=comparison)
            reached[knows, comparison], _ = _attack(attack, uploads, space)
        ignorant, informed, likely = (_spread(psnr) for psnr in reached.values())
        print(
            f"{defense}: ignorant {ignorant} dB, replay {informed} dB, likelihood {likely} dB",
            flush=True,
        )


def _by_setting(csv: str) -> Iterator[tuple[str, pd.DataFrame]]:
    trials = pd.read_csv(csv)
    names = [name for name in ("dataset", "network", "R", "E", "N") if name in trials]
    for values, part in trials.groupby(names):
        pairs = zip(names, values, strict=True)
        yield ", ".join(f"{name} {value}" for name, value in pairs), part


def _images(folder: str) -> tuple[Tensor, Tensor]:
    data = load_dataset(f"{folder}/cifar100")
    return data.train.inputs, data.train.targets


def _space(images: Tensor, classes: int) -> InputSpace:
    mean, std = images.mean(dim=(0, 2, 3)), images.std(dim=(0, 2, 3))
    shape = tuple(images.shape[1:])
    return ImageSpace(shape, classes, tuple(mean.tolist()), tuple(std.tolist()))


def _uploads(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    space: InputSpace,
    protocol: Protocol,
    size: int,
    clients: int,
    defense: Defense | None = None,
    threat: ThreatModel | None = None,
) -> list[Upload]:
    defense, threat = defense or Defense(), threat or ThreatModel(knows_targets=True)
    client = Client(model, cross_entropy, defense, protocol, space)
    replay = make_replay(client, threat, generator("replay"))
    order = torch.randperm(len(images), generator=generator("victims"))
    uploads = []
    for index, rows in enumerate(order[: clients * size].split(size)):
        share = Batch(space.to_inputs(images[rows]), labels[rows])
        uploads += observe(client, [share], threat, generator("client", index), replay=replay)
    return uploads


def _attack(
    attack: Adversary, uploads: list[Upload], space: InputSpace
) -> tuple[list[float], float]:
    """Return the mean PSNR of each upload, and the total seconds."""
    start = time.process_time()
    rngs = [generator("adversary", i) for i in range(len(uploads))]
    results = attack.reconstruct_all([upload.observation for upload in uploads], rngs)
    seconds = time.process_time() - start
    reached = []
    for result, upload in zip(results, uploads, strict=True):
        if isinstance(result, NotApplicable):
            raise result
        reached.append(float(matched_psnr(result.inputs, upload.truth.inputs, space).mean()))
    return reached, seconds


def _time_attack(attack: Adversary, observations: list[Observation]) -> float:
    """Return milliseconds per iteration and victim, from runs of two lengths."""
    least = []
    for iterations in (2, 10):
        timed = type(attack)(iterations=iterations)  # type: ignore[call-arg]
        rngs = [generator(i) for i in range(len(observations))]
        least.append(_least(lambda a=timed, r=rngs: a.reconstruct_all(observations, r)))  # type: ignore[misc]
    return 1000 * (least[1] - least[0]) / 8 / len(observations)


def _time_plain(observation: Observation, surrogate: bool) -> float:
    """Return the milliseconds of one iteration, written as in the papers' code."""
    model, observed = observation.model, list(observation.update.values())
    inputs = torch.randn(observation.batch_size, *observation.space.shape, requires_grad=True)
    alpha = torch.tensor(0.5, requires_grad=True)
    optimizer = torch.optim.Adam([inputs, alpha])
    start = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}

    def iteration() -> None:
        weights = start
        if surrogate:
            weights = {n: w + alpha * observation.update[n] for n, w in start.items()}
        outputs = functional_call(model, weights, (inputs,))
        value = cross_entropy(outputs, observation.targets)
        slopes = torch.autograd.grad(value, list(weights.values()), create_graph=True)
        product = sum((a * b).sum() for a, b in zip(slopes, observed, strict=True))
        norms = [sum(v.square().sum() for v in values).sqrt() for values in (slopes, observed)]  # type: ignore[union-attr]
        variation = inputs.diff(dim=2).abs().mean() + inputs.diff(dim=3).abs().mean()
        objective = 1 - product / norms[0] / norms[1] + 1e-4 * variation
        optimizer.zero_grad()
        objective.backward(inputs=[inputs, alpha] if surrogate else [inputs])
        optimizer.step()
        inputs.data = observation.space.clamp(inputs.data)

    iteration()
    return 1000 * _least(iteration)


def _least(run: Callable[[], object]) -> float:
    """Return the smallest processor time of a few runs, in seconds."""
    seconds = []
    for _ in range(5):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return min(seconds)


def _spread(values: list[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.2f} +- {error:.2f} (least {min(values):.1f})"


if __name__ == "__main__":
    torch.set_num_threads(1)
    commands = {f.__name__: f for f in (speed, dlfa, margins, adaptive, paths, decline)}
    if len(sys.argv) < 3 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](*(int(a) if a.isdecimal() else a for a in sys.argv[2:]))  # type: ignore[operator]
