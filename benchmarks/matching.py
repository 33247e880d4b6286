"""Gradient matching: what it recovers, and how fast, on folders of real images.

python benchmarks/matching.py dlg CIFAR100 [sigmoid|relu] [VICTIMS]
python benchmarks/matching.py speed CIFAR100          # against a plain loop, and 20 victims at once
python benchmarks/matching.py sme emnist|cifar100 FOLDER EPOCHS EXAMPLES [CLIENTS]
python benchmarks/matching.py dlfa emnist|cifar100 FOLDER EPOCHS EXAMPLES [ITERATIONS]
python benchmarks/matching.py memory emnist|cifar100 FOLDER SME|DLFA EPOCHS EXAMPLES
python benchmarks/matching.py adaptive CIFAR100       # a known defense's likelihood against cosine

Seconds are of one core. EMNIST letters stand in for FEMNIST, as dark ink on white paper.
"""

import resource
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import (
    DLFA,
    DLG,
    SME,
    Adversary,
    FedAvg,
    FedSGD,
    InputSpace,
    InvertingGradients,
    NotApplicable,
    Observation,
    Protocol,
)
from leakfrontier.defenses import DPSGD, Batch, Defense, Noise, Quantization, SignSGD, TopK
from leakfrontier.evaluate import metrics
from leakfrontier.evaluate.client import ThreatModel, Upload, make_replay, observe
from leakfrontier.evaluate.data import load_dataset
from leakfrontier.evaluate.models import build_model
from leakfrontier.evaluate.scenario import generator

VICTIMS = 20


def dlg(folder: str, activation: str = "sigmoid", victims: int = VICTIMS) -> None:
    """Attack LeNet at batch size 1, all victims at once."""
    space = InputSpace((3, 32, 32), 100)  # the authors' inputs are not centred
    model = build_model("lenet", space, generator("model"), activation=activation)
    uploads = _uploads(model, *_images(folder), space, FedSGD(), 1, victims, known=False)
    psnr, seconds, labels = _attack(DLG(), uploads, space)
    print(
        f"DLG on LeNet with {activation}, {victims} victims: {_spread(psnr)} dB, above 40 dB in "
        f"{sum(p > 40 for p in psnr)}, {labels} labels, {seconds / victims:.1f} s each"
    )


def speed(folder: str) -> None:
    """Time iterations: a plain loop as the papers write it, one victim, and 20 at once."""
    images, labels = _images(folder)
    space = _space(images, 100)
    ig, sme = InvertingGradients(iterations=8), SME(iterations=8)
    lenet = build_model("lenet", space, generator("model"))
    cases: list[tuple[str, nn.Module, Adversary, Protocol, int]] = [
        ("IG, LeNet", lenet, ig, FedSGD(), 1),
        ("IG, LeNet", lenet, ig, FedSGD(), 8),
        ("IG, ConvNet of width 16", _convnet(16, 100), ig, FedSGD(), 1),
        ("IG, ConvNet of width 16", _convnet(16, 100), ig, FedSGD(), 8),
        ("IG, ConvNet of width 64", _convnet(64, 100), ig, FedSGD(), 1),
        ("SME, its CIFAR-100 CNN", _sme_cnn(space), sme, FedAvg(10, 10, 0.004), 10),
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


def sme(data: str, folder: str, epochs: int, examples: int, clients: int = 10) -> None:
    """Compare SME with Inverting Gradients at the initial weights, on the same uploads."""
    space, uploads = _local_training(data, folder, epochs, examples, clients)
    attacks = {"SME": SME(), "IG": SME(alpha=0.0, alpha_lr=0.0)}
    reached = {}
    for name, attack in attacks.items():
        reached[name], seconds, _ = _attack(attack, uploads, space)
        print(
            f"{data} E={epochs} N={examples} {name}: {_spread(reached[name])} dB, "
            f"{seconds / clients:.0f} s each",
            flush=True,
        )
    gains = [a - b for a, b in zip(*reached.values(), strict=True)]
    print(f"{data} E={epochs} N={examples} SME better by {_spread(gains)} dB")


def dlfa(data: str, folder: str, epochs: int, examples: int, iterations: int = 400) -> None:
    """Compare SME with DLFA on one upload; fewer iterations of DLFA are scaled up to 400."""
    space, uploads = _local_training(data, folder, epochs, examples, 1)
    options = {"lr": 0.1, "decay": 0.9985, "total_variation": 2e-4, "range_penalty": 10.0}
    options |= {"order_prior": 62.675}
    simulation = DLFA(iterations=iterations, **(options if data == "cifar100" else {}))  # type: ignore[arg-type]
    (ours,), seconds, _ = _attack(SME(), uploads, space)
    (theirs,), longer, _ = _attack(simulation, uploads, space)
    longer *= 400 / iterations
    print(
        f"{data} E={epochs} N={examples}: SME {ours:.1f} dB in {seconds:.0f} s, DLFA {theirs:.1f} "
        f"dB after {iterations} iterations, {longer:.0f} s for 400: {longer / seconds:.1f} times"
    )


def memory(data: str, folder: str, attack: str, epochs: int, examples: int) -> None:
    """Print the peak of memory of a few iterations."""
    space, uploads = _local_training(data, folder, epochs, examples, 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _attack({"SME": SME, "DLFA": DLFA}[attack](iterations=3), uploads, space)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{data} E={epochs} N={examples} {attack}: {(after - before) / 1024:.0f} MiB more")


def adaptive(folder: str) -> None:
    """Compare informed attacks with the ignorant one, on the same uploads."""
    images, labels = _images(folder)
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
            reached[knows, comparison], _, _ = _attack(attack, uploads, space)
        ignorant, informed, likely = (_spread(psnr) for psnr in reached.values())
        print(
            f"{defense}: ignorant {ignorant} dB, replay {informed} dB, likelihood {likely} dB",
            flush=True,
        )


def _local_training(
    data: str, folder: str, epochs: int, examples: int, clients: int
) -> tuple[InputSpace, list[Upload]]:
    """Return FedAvg uploads of clients of one untrained CNN of the SME paper."""
    images, labels = _images(folder)
    if data == "emnist":
        images = 1 - images
    space = _space(images, 26 if data == "emnist" else 100)
    protocol = FedAvg(epochs, 10, 0.004)
    return space, _uploads(_sme_cnn(space), images, labels, space, protocol, examples, clients)


def _images(folder: str) -> tuple[Tensor, Tensor]:
    data = load_dataset(folder)
    return data.train.inputs, data.train.targets


def _space(images: Tensor, classes: int) -> InputSpace:
    mean, std = images.mean(dim=(0, 2, 3)), images.std(dim=(0, 2, 3))
    shape = tuple(images.shape[1:])
    return InputSpace(shape, classes, tuple(mean.tolist()), tuple(std.tolist()))


def _uploads(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    space: InputSpace,
    protocol: Protocol,
    size: int,
    clients: int,
    known: bool = True,
    defense: Defense | None = None,
    threat: ThreatModel | None = None,
) -> list[Upload]:
    defense, threat = defense or Defense(), threat or ThreatModel(knows_targets=known)
    replay = make_replay(model, cross_entropy, defense, protocol, threat, 1, generator("replay"))
    order = torch.randperm(len(images), generator=generator("victims"))
    uploads = []
    for client, rows in enumerate(order[: clients * size].split(size)):
        share = Batch(space.to_inputs(images[rows]), labels[rows])
        rng = generator("client", client)
        uploads += observe(
            model, cross_entropy, [share], defense, protocol, space, threat, rng, replay
        )
    return uploads


def _attack(
    attack: Adversary, uploads: list[Upload], space: InputSpace
) -> tuple[list[float], float, int]:
    """Return each upload's mean PSNR, the seconds of all, and the labels that are right."""
    start = time.process_time()
    rngs = [generator("adversary", i) for i in range(len(uploads))]
    results = attack.reconstruct_all([upload.observation for upload in uploads], rngs)
    seconds = time.process_time() - start
    reached, right = [], 0
    for result, upload in zip(results, uploads, strict=True):
        if isinstance(result, NotApplicable) or result.targets is None:
            raise result if isinstance(result, NotApplicable) else ValueError("no labels")
        guess, truth = space.to_pixels(result.inputs), space.to_pixels(upload.truth.inputs)
        rows = metrics.match(guess, truth)
        reached.append(float(metrics.psnr(guess[rows], truth).mean()))
        right += int((result.targets[rows] == upload.truth.targets).sum())
    return reached, seconds, right


def _time_attack(attack: Adversary, observations: list[Observation]) -> float:
    """Return milliseconds per iteration and victim: the difference of two lengths."""
    least = []
    for iterations in (2, 10):
        timed = type(attack)(iterations=iterations)  # type: ignore[call-arg]
        rngs = [generator(i) for i in range(len(observations))]
        least.append(_least(lambda a=timed, r=rngs: a.reconstruct_all(observations, r)))  # type: ignore[misc]
    return 1000 * (least[1] - least[0]) / 8 / len(observations)


def _time_plain(observation: Observation, surrogate: bool) -> float:
    """Return milliseconds of one iteration written as in the papers' code."""
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
    """Return the least seconds of a few runs, of this process alone."""
    seconds = []
    for _ in range(5):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return min(seconds)


def _spread(values: list[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.2f} +- {error:.2f} (least {min(values):.1f})"


def _sme_cnn(space: InputSpace) -> nn.Module:
    """Return the paper's CNN for FEMNIST (one channel) or CIFAR-100 (three)."""
    channels, height, _ = space.shape
    width, hidden = (32, 100) if channels == 1 else (64, 200)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * (height // 4) ** 2, hidden),
            nn.ReLU(),
            nn.Linear(hidden, space.classes),
        )


def _convnet(width: int, classes: int) -> nn.Module:
    """Return the ConvNet of Inverting Gradients, with GroupNorm in place of BatchNorm."""
    layers: list[nn.Module] = []
    channels = 3
    for factor in (1, 2, 2, 4, 4, 4, 0, 4, 4, 0):
        if not factor:
            layers.append(nn.MaxPool2d(3))
            continue
        layers += [nn.Conv2d(channels, factor * width, 3, padding=1)]
        layers += [nn.GroupNorm(8, factor * width), nn.ReLU()]
        channels = factor * width
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(9 * channels, classes))


if __name__ == "__main__":
    torch.set_num_threads(1)
    commands = {f.__name__: f for f in (dlg, speed, sme, dlfa, memory, adaptive)}
    if len(sys.argv) < 3 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](*(int(a) if a.isdecimal() else a for a in sys.argv[2:]))  # type: ignore[operator]
