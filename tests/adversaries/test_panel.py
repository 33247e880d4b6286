"""The panel is the full suite, written out, and its members reconstruct what they always did."""

import ast
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
import small_language
import torch
from federated import SPACE, batch, convolutional, make_client, mlp, observed, rng, seeded
from torch import nn

from leakfrontier.adversaries import (
    ADVERSARIES,
    PANEL,
    Candidates,
    FedAvg,
    FedSGD,
    Observation,
    PublicData,
    Round,
    Threat,
    panel,
)
from leakfrontier.evaluate.client.client import ThreatModel, observe

LOCAL = FedAvg(epochs=2, batch_size=1, lr=0.1)
POOL = torch.stack([batch(1, seed).inputs for seed in range(5)])
THREAT = ThreatModel(public=PublicData(*batch(200, 9)))

OUTSIDE = {"InformedPriorAware", "MatchedFilter"}  # younger than this version of the panel
TEXT = ("DAGER", "SOMP", "LAMP", "GRAB", "LanguageGuess")

PINNED = {
    "PriorGuess": (-0.0007, 0.0812, 1.2071),
    "LinearLeakage": (-0.1012, 1.1982, 0.0000),
    "PriorAware": (-0.1012, 1.1982, 0.0000),
    "SPEAR": (-0.1012, 1.1982, 0.0000),
    "SPEARPlusPlus": (-0.1012, 1.1982, 0.0000),
    "InvertingGradients": (-0.0918, 1.0259, 0.1729),
    "SME": (-0.0512, 0.4677, 0.7437),
    "LearningToInvert": (0.0217, 0.3471, 1.2320),
    "DLG": (-0.1788, 2.0721, 0.8856),
    "IDLG": (-0.1407, 1.6252, 0.4365),
    "GradInversion": (-0.0475, 0.6671, 0.5811),
    "FedLeak": (-0.0716, 0.6844, 0.9531),
    "DLFA": (0.0437, 0.7407, 1.0583),
    "RobbingTheFed": (0.0012, 1.1120, 0.0683),
    "RobbingTheFedDirectPass": (0.4956, 0.6383, 0.8137),
    "LOKI": (0.0200, 1.1913, 0.0867),
    "TrapWeights": (0.4956, 0.6383, 0.8137),
    "ARES": (0.0076, 1.0987, 0.1182),
    "ScaleMIA": (-0.0031, 0.9500, 0.4625),
    "Fishing": (0.0312, 1.1826, 0.0376),
    "RGAP": (-0.1012, 1.1982, 0.0000),
    "RCONV": (-0.1012, 1.1982, 0.0000),
    "DAGER": (12.5556, 16.6817, 0.0000),
    "SOMP": (12.5556, 16.6817, 0.0000),
    "LanguageGuess": (33.0000, 19.5000, 31.2872),
    "LAMP": (12.6667, 16.6132, 0.3333),
    "GRAB": (12.6667, 16.6132, 0.3333),
}
"""Mean and standard deviation of what members reconstruct, and its distance from the truth.

Trap weights and direct-pass imprints lose what is below zero, that is half of normalised inputs;
two of eight examples share a bin of ARES.
"""


def observation(name: str) -> Observation:
    """Return a case that a member is made for."""
    if PANEL.members[name].threat is not Threat.PASSIVE:
        return crafted(name)
    if name in TEXT:
        space = small_language.space_of("next-token")
        model = small_language.trained("next-token")
        return small_language.observed(model, space, small_language.sentences(1, 3))
    truth = batch(1, 3)
    if name in ("RGAP", "RCONV"):
        return observed(recursive(), truth)
    if name in ("SME", "DLFA"):
        return observed(convolutional(), truth, protocol=LOCAL, threat=THREAT)
    if name == "PriorAware":
        pool = Candidates(POOL, torch.zeros(5, 1, dtype=torch.long))
        return observed(mlp(), truth, threat=ThreatModel(candidates=pool))
    of_layers = ("LinearLeakage", "SPEAR", "SPEARPlusPlus")
    return observed(mlp() if name in of_layers else convolutional(), truth, threat=THREAT)


def crafted(name: str) -> Observation:
    """Return what a malicious server sees of a batch, whose first example is the same."""
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(768, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )
    )
    known = Round(SPACE, FedSGD(), 1, 8, THREAT.public)
    crafted = PANEL.members[name].craft(model, known, rng(6))
    sent = {"models": crafted.models, "kept": crafted.kept}
    (seen,) = observe(make_client(model), [batch(8, 3)], THREAT, rng(1), **sent)
    return seen.observation


def recursive() -> nn.Module:
    """Return a network whose layers can be inverted one after the other."""
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(384, 10),
        )
    )


def reconstructed(name: str) -> tuple[float, float, float]:
    seen = observation(name)
    inputs = PANEL.members[name].reconstruct(seen, rng(5)).inputs.float()
    if name in TEXT:
        truth = small_language.sentences(1, 3).inputs.float()
    else:
        truth = batch(seen.batch_size, 3).inputs
    distances = torch.cdist(inputs.flatten(1), truth.flatten(1)).amin(dim=1)
    distance = distances.mean() / truth[0].numel() ** 0.5
    return float(inputs.mean()), float(inputs.std()), float(distance)


def test_it_is_the_full_suite() -> None:
    assert PANEL.version == "2026.9"
    assert PANEL.alike == ("2026.8",)
    assert set(PANEL.members) == set(PANEL.published) == set(ADVERSARIES) - OUTSIDE
    for name, member in PANEL.members.items():
        assert type(member) is ADVERSARIES[name] is type(PANEL.published[name])


def test_every_hyper_parameter_is_written_out() -> None:
    calls = [
        node
        for node in ast.walk(ast.parse(Path(panel.__file__).read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {cls.__name__ for cls in ADVERSARIES.values()}
    ]
    assert Counter(call.func.id for call in calls) == Counter([*PANEL.members])  # type: ignore[attr-defined]
    for call in calls:
        cls = ADVERSARIES[call.func.id]  # type: ignore[attr-defined]
        assert {keyword.arg for keyword in call.keywords} == {field.name for field in fields(cls)}


def test_budgets_differ_from_published_ones_in_what_they_spend_alone() -> None:
    spent = {"iterations", "restarts", "patience", "samples", "uploads", "width"}
    spent |= {"bins", "epochs", "examples", "starts", "reorder_every", "orders", "rounds"}
    of_few_epochs = {"ScaleMIA": {"batch_size", "lr"}}
    for name, member in PANEL.members.items():
        ours, published = vars(member), vars(PANEL.published[name])
        differing = {key for key in ours if ours[key] != published[key]}
        assert differing <= spent | of_few_epochs.get(name, set())
        assert all(ours[key] < published[key] for key in spent & differing)


@pytest.mark.parametrize("name", PANEL.members)
def test_members_reconstruct_what_they_always_did(name: str) -> None:
    assert reconstructed(name) == pytest.approx(PINNED[name], rel=0.02, abs=0.02)
