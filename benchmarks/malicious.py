"""Malicious servers: their success under defenses, and pictures of their guesses.

python benchmarks/malicious.py contrast  [--dataset NAME]   success of each attack under defenses
python benchmarks/malicious.py dpsgd     [--dataset NAME]   success by noise, and relative noise
python benchmarks/malicious.py pictures                     writes docs/lab/malicious_server.png

`leakfrontier reproduce` measures the tables of the papers. `benchmarks/inspection.py` measures
clients that inspect the received model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from leakfrontier.adversaries import (
    ARES,
    LOKI,
    PANEL,
    Adversary,
    RobbingTheFed,
    RobbingTheFedDirectPass,
    ScaleMIA,
    TrapWeights,
)
from leakfrontier.defenses import DPSGD, Defense, SecureAggregation
from leakfrontier.evaluate.client.client import Upload
from leakfrontier.evaluate.data.data import Dataset, load_dataset
from leakfrontier.evaluate.foundations.seeds import generator
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.models.models import build_model
from leakfrontier.evaluate.papers.servers import Setup, crafted_upload, psnrs
from leakfrontier.evaluate.run.cells import AttackTrial
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario

EXAMPLES = 32
NOISES = (0.0, 0.001, 0.01, 0.1, 1.0)
SHOWN = 12  # pictures in a row
UPLOADS = 3  # of `contrast`
SERVERS = ("RobbingTheFed", "RobbingTheFedDirectPass", "TrapWeights", "LOKI", "ARES")
DEFENSES = {
    "none": Method(name="none"),
    "summed": Method(name="SecureAggregation", options={"clients": 10}),
    "compared": Method(name="SecureAggregation", options={"clients": 10, "compare_models": True}),
    "inspected": Method(name="WeightInspection"),
    "DP-SGD": Method(name="DPSGD", options={"noise_multiplier": 1.0}),
}


class Case(NamedTuple):
    """An attack, the model that it attacks, and the tensor that it reads."""

    attack: Adversary
    model: str
    tensor: str


CASES = {
    "RtF": Case(RobbingTheFed(query="random", rows="sparse"), "lenet", "0.measure.weight"),
    "RtF direct pass": Case(RobbingTheFedDirectPass(), "cnn", "5.weight"),
    "Trap Weights": Case(TrapWeights(), "cnn", "5.weight"),
    "LOKI": Case(LOKI(), "lenet", "0.measure.weight"),
    "ARES, CNN": Case(ARES(), "cnn", "5.weight"),
    "ARES, MLP": Case(ARES(), "mlp", "1.weight"),
    "Scale-MIA": Case(ScaleMIA(epochs=5, examples=500), "cnn", "5.weight"),
}


def upload(
    case: Case, data: Dataset, defense: Defense, *, clients: int = 1, examples: int = EXAMPLES
) -> Upload:
    """Return the upload that the server sees. All cases use the same private examples."""
    model = build_model(case.model, data.space, generator("model"))
    setup = Setup(model, examples, clients, defense)
    return crafted_upload(case.attack, setup, data, generator("round"))


def levels(case: Case, seen: Upload, data: Dataset) -> Tensor:
    """Return the PSNR of each example."""
    guess = case.attack.reconstruct(seen.observation, generator("attack"))
    return psnrs(guess.inputs, seen.truth.inputs, data.space)


def contrast(data: Dataset) -> None:
    """Attack an MLP of width 512 under each defense, with malicious servers of the panel."""
    scenario = Scenario(
        dataset=data.name,
        model=Method(name="mlp", options={"width": 512}),
        batch_size=8,
    )
    print(f"{data.name}: of {8 * UPLOADS}, identified among 100; the same with others' guesses")
    for name in SERVERS:
        cells = []
        for title, defense in DEFENSES.items():
            trial = AttackTrial(
                scenario,
                defense,
                Method(name=name, options=dict(vars(PANEL.members[name]))),
                knows_defense=True,
                seed=0,
                checkpoint=0,
                observations=tuple(range(UPLOADS)),
                pictures=0,
            )
            rows = trial.run(Path()).attacks
            outcomes = sorted({row.outcome for row in rows} - {"scored"})
            found, blind = (
                sum(bool(getattr(row, which)) for row in rows)
                for which in ("identified", "counterfactual")
            )
            cells.append(f"{title}: {' '.join(outcomes) or f'{found} ({blind})'}")
        print(f"{name}: {'; '.join(cells)}", flush=True)


def dpsgd(data: Dataset) -> None:
    """Attack batches under DP-SGD with a clipping norm of 1."""
    print(f"{data.name}, batches of {EXAMPLES}: examples above 20 dB, and noise / median entry")
    for name, case in CASES.items():
        cells = []
        for noise in NOISES:
            defense = DPSGD(noise, max_grad_norm=1.0) if noise else Defense()
            seen = upload(case, data, defense)
            entries = seen.observation.simulate(*seen.truth)[case.tensor].abs()
            relative = noise / EXAMPLES / float(entries[entries > 0].median())
            found = int((levels(case, seen, data) > 20).sum())
            cells.append(f"{noise:g}: {found}" + (f" ({relative:.1g})" if noise else ""))
        print(f"{name}: {'; '.join(cells)}", flush=True)
    blind = psnrs(torch.zeros(0, *data.space.shape), seen.truth.inputs, data.space)
    print(f"the mean colour: {int((blind > 20).sum())}")


def pictures(data: Dataset) -> None:
    """Write a picture with the guesses of each server, a row for each."""
    rows = list(_rows(data))
    sheet = torch.cat([torch.cat([*row], dim=2) for row in rows], dim=1)
    pixels = (sheet.clamp(0, 1) * 255).round().byte().repeat_interleave(2, 1)
    pixels = pixels.repeat_interleave(2, 2)
    Image.fromarray(pixels[0].numpy()).save("docs/lab/malicious_server.png", optimize=True)


def _rows(data: Dataset) -> Iterator[Tensor]:
    summed = SecureAggregation(4)
    cases = [
        ("RtF direct pass", Defense(), 1),
        ("Trap Weights", Defense(), 1),
        ("Scale-MIA", Defense(), 1),
        ("ARES, CNN", Defense(), 1),
        ("ARES, MLP", summed, 4),
        ("LOKI", summed, 4),
        ("LOKI", DPSGD(1.0, max_grad_norm=1.0), 1),
    ]
    shown = False
    for name, defense, clients in cases:
        case = CASES[name]
        seen = upload(case, data, defense, clients=clients, examples=EXAMPLES // clients)
        truth = data.space.to_unit(seen.truth.inputs)
        if not shown:
            yield truth[:SHOWN]
            shown = True
        guess = case.attack.reconstruct(seen.observation, generator("attack")).inputs
        nothing = torch.zeros_like(seen.truth.inputs)
        guesses = data.space.to_unit(torch.cat([guess, nothing]))
        yield guesses[metrics.match(guesses, truth)][:SHOWN]


def main() -> None:
    """Run one of the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("contrast", "dpsgd", "pictures"))
    parser.add_argument("--dataset", default="fashion-mini", help="a name or a path")
    options = parser.parse_args()
    torch.set_num_threads(1)
    Path("docs").mkdir(exist_ok=True)
    what = {"contrast": contrast, "dpsgd": dpsgd, "pictures": pictures}[options.what]
    what(load_dataset(options.dataset))


if __name__ == "__main__":
    main()
