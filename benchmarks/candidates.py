"""Attackers who are given candidates: for batches, and with a malicious server.

python benchmarks/candidates.py batches [UPLOADS]    # an mlp, eight examples in an upload
python benchmarks/candidates.py imprint [UPLOADS]    # Robbing the Fed's module before a LeNet

Every victim is hidden among 100 images of its class. No two victims share candidates.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from scipy import integrate
from scipy.stats import norm
from torch import Tensor

from leakfrontier.adversaries import (
    Candidates,
    Crafted,
    InformedPriorAware,
    MatchedFilter,
    PriorAware,
    RobbingTheFed,
    Round,
)
from leakfrontier.defenses import DPSGD, Batch
from leakfrontier.evaluate.client.client import Upload, observe
from leakfrontier.evaluate.foundations.seeds import generator
from leakfrontier.evaluate.foundations.statistics import clopper_pearson
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.privacy.bounds import reconstruction
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, World, load_world
from leakfrontier.evaluate.world.victims import all_but_one_known

CANDIDATES = 100


def batches(uploads: int = 4) -> None:
    """Compare one example, and eight with the others known or unknown, with bound and optimum."""
    here = load_world(Scenario(model=Method(name="mlp", options={"width": 64})))
    columns = ("noise multiplier", "bound", "orthogonal optimum", "one example")
    print(" | ".join((*columns, "eight, others known", "eight, others unknown")))
    for sigma in (0.1, 0.2, 0.447, 0.851):
        alone, informed, joint = [], [], []
        for upload in _uploads(here, DPSGD(sigma), range(8), uploads):
            joint += _right(PriorAware(), upload)
            informed += _right_informed(upload)
        for upload in _uploads(here, DPSGD(sigma), range(1), 8 * uploads):
            alone += _right(PriorAware(), upload)
        known = reconstruction(1 / CANDIDATES, 1.0, sigma, 1), _optimum(sigma)
        shown = [f"{100 * value:.1f} %" for value in known]
        print(" | ".join([f"{sigma:g}", *shown, *map(_rate, (alone, informed, joint))]), flush=True)


def imprint(uploads: int = 3) -> None:
    """Count the candidates that a matched filter finds, and the images that are reconstructed."""
    here = load_world(Scenario(model=Method(name="lenet")))
    attack = MatchedFilter()
    module = RobbingTheFed(bins=attack.bins, query="random", rows="sparse")
    print("noise multiplier | bound | matched filter | reconstructed above 20 dB")
    for sigma in (0.0, 0.1, 0.3, 1.0):
        chosen, close = [], []
        for upload in _uploads(here, DPSGD(sigma), [*range(10)] * 2, uploads, attack):
            chosen += _right(attack, upload)
            close += _near(module, upload, here)
        bound = reconstruction(1 / CANDIDATES, 1.0, sigma, 1) if sigma else 1.0
        shown = f"{sigma:g} | {100 * bound:.1f} %"
        print(f"{shown} | {_rate(chosen)} | {sum(close)} of {len(close)}", flush=True)


def _uploads(
    here: World,
    defense: DPSGD,
    labels: range | list[int],
    count: int,
    attack: MatchedFilter | None = None,
) -> Iterator[Upload]:
    """Yield uploads of one victim per label, each with its own candidates."""
    model, threat = here.model(defense, 0), here.threat(knows_defense=True)
    client = here.client(defense, model)
    for number in range(count):
        rng = generator("benchmark", number)
        rows = _disjoint(here, labels, rng)
        pool = Candidates(*here.train.at(rows))
        victims = torch.randint(CANDIDATES, (len(labels),), generator=rng)
        private = here.train.at(rows[victims, torch.arange(len(labels))])
        sent = Crafted([model])
        if attack is not None:
            known = Round(here.space, here.protocol, 1, len(labels), threat.public)
            sent = attack.craft(model, known, rng)
        granted = replace(threat, candidates=pool)
        yield from observe(client, [private], granted, rng, models=sent.models, kept=sent.kept)


def _disjoint(here: World, labels: range | list[int], rng: torch.Generator) -> Tensor:
    """Return the indices of the candidates of each label, one column each."""
    columns, used = [], dict.fromkeys(labels, 0)
    orders = {
        label: (here.train.targets == label).nonzero().flatten() for label in dict.fromkeys(labels)
    }
    orders = {
        label: rows[torch.randperm(len(rows), generator=rng)] for label, rows in orders.items()
    }
    for label in labels:
        columns.append(orders[label][used[label] : used[label] + CANDIDATES])
        used[label] += CANDIDATES
    return torch.stack(columns, dim=1)


def _right(attack: PriorAware | MatchedFilter, upload: Upload) -> list[bool]:
    """Return which examples of an upload an attack finds."""
    guess = attack.reconstruct(upload.observation, generator("attack")).inputs
    same: list[bool] = (guess == upload.truth.inputs).flatten(1).all(dim=1).tolist()
    return same


def _right_informed(upload: Upload) -> list[bool]:
    """Return which examples are found if all others are known."""
    seen = upload.observation
    assert seen.candidates is not None
    views = all_but_one_known(seen.candidates, Batch(*upload.truth))
    return [
        _right(
            InformedPriorAware(),
            replace(upload, observation=replace(seen, candidates=view)),
        )[victim]
        for victim, view in enumerate(views)
    ]


def _near(module: RobbingTheFed, upload: Upload, here: World) -> list[bool]:
    """Return which examples are reconstructed above 20 dB."""
    values, truth = here.modality.values, here.modality.values(upload.truth.inputs)
    guess = values(module.reconstruct(upload.observation, generator("attack")).inputs)
    if not len(guess):
        return [False] * len(truth)
    rows = metrics.match(guess, truth)
    good = (metrics.psnr(guess[rows], truth) > 20) & (rows >= 0)
    found: list[bool] = good.tolist()
    return found


def _optimum(sigma: float) -> float:
    """Return the success of the best attack if all gradients are orthogonal and clipped."""
    value, _ = integrate.quad(
        lambda x: norm.pdf(x - 1 / sigma) * norm.cdf(x) ** (CANDIDATES - 1), -10, 40
    )
    return float(value)


def _rate(right: list[bool]) -> str:
    found = clopper_pearson(sum(right), len(right), 0.95)
    return f"{sum(right)} of {len(right)} [{100 * found.low:.0f}, {100 * found.high:.0f}] %"


if __name__ == "__main__":
    {"batches": batches, "imprint": imprint}[sys.argv[1]](*map(int, sys.argv[2:]))
