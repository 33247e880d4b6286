"""All malicious servers of the panel: where they do not apply, and what does not stop them."""

from __future__ import annotations

import copy
import importlib
import pkgutil
from dataclasses import replace
from pathlib import Path

import keeping
import pytest
import torch
from federated import SPACE, TOKENS, batch, make_client, observed, rng, seeded
from torch import nn

from leakfrontier.adversaries import (
    PANEL,
    FedSGD,
    Fishing,
    InputSpace,
    NotApplicable,
    Observation,
    PublicData,
    Reconstruction,
    Round,
    ScaleMIA,
    Threat,
    malicious,
)
from leakfrontier.evaluate.client.client import ThreatModel, observe
from leakfrontier.evaluate.foundations.rows import AttackRow
from leakfrontier.evaluate.run.cells import AttackTrial
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario

ACTIVE = {name: one for name, one in PANEL.members.items() if one.threat is not Threat.PASSIVE}
INSERTING = {"RobbingTheFed", "LOKI"}
"""Those that bring their own layers with them."""

OF_LAST_LAYER = {"Fishing"}
LEARNING = {"ScaleMIA"}
"""It encodes what it finds: strides, pooling and normalisation do not matter."""


def known(space: InputSpace = SPACE) -> Round:
    return Round(space, FedSGD(), 1, 4, PublicData(*batch(100, 9)))


def network(*before: nn.Module, head: nn.Module | None = None, bias: bool = True) -> nn.Module:
    def build() -> nn.Module:
        layers = [nn.Conv2d(3, 6, 3, padding=1), *before, nn.ReLU(), nn.Flatten()]
        tail = [nn.LazyLinear(32, bias=bias), nn.ReLU(), nn.LazyLinear(10, bias=bias)]
        model = nn.Sequential(*layers, *([head] if head is not None else tail))
        model(torch.zeros(1, *SPACE.shape))
        return model

    return seeded(build)


MODELS = {
    "no linear layer": (
        seeded(
            lambda: nn.Sequential(
                nn.Conv2d(3, 10, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
            )
        ),
        "linear layer",
        INSERTING,
    ),
    "one linear layer": (
        network(head=nn.LazyLinear(10)),
        "linear layers",
        INSERTING | OF_LAST_LAYER,
    ),
    "no bias": (network(bias=False), "no bias", INSERTING),
    "pooling": (
        network(nn.MaxPool2d(2)),
        "pooling, normalisation",
        INSERTING | OF_LAST_LAYER | LEARNING,
    ),
    "normalisation": (
        network(nn.GroupNorm(2, 6)),
        "pooling, normalisation",
        INSERTING | OF_LAST_LAYER | LEARNING,
    ),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ACTIVE)
def test_what_a_model_lacks_is_named(name: str, model: str) -> None:
    built, reason, unimpressed = MODELS[model]
    if name in unimpressed:
        assert len(ACTIVE[name].craft(built, known(), rng()).models) == 1
        return
    with pytest.raises(NotApplicable, match=reason):
        ACTIVE[name].craft(built, known(), rng())


@pytest.mark.parametrize("name", ACTIVE)
def test_tokens_are_no_inputs(name: str) -> None:
    with pytest.raises(NotApplicable, match="token"):
        ACTIVE[name].craft(network(), known(TOKENS), rng())


@pytest.mark.parametrize("name", ACTIVE)
def test_an_honest_model_gives_nothing_to_read_off(name: str) -> None:
    with pytest.raises(NotApplicable, match=r"not sent|not crafted|no public"):
        ACTIVE[name].reconstruct(observed(network(), batch(4)), rng())


@pytest.mark.parametrize("name", sorted(ACTIVE.keys() - INSERTING))
def test_a_frozen_layer_is_not_uploaded(name: str) -> None:
    model = network()
    model.requires_grad_(False)
    with pytest.raises(NotApplicable, match="frozen"):
        ACTIVE[name].craft(model, known(), rng())


def attacked(
    adversary: str, defense: Method, threat: str = "architecture"
) -> tuple[AttackRow, ...]:
    scenario = Scenario(
        dataset="digits",
        model=Method(name=f"{__file__}:digits_cnn"),
        candidates=20,
        batch_size=3,
        threat=threat,  # type: ignore[arg-type]
    )
    options = dict(vars(PANEL.members[adversary]))
    trial = AttackTrial(
        scenario,
        defense,
        Method(name=adversary, options=options),
        knows_defense=True,
        seed=0,
        checkpoint=0,
        observations=tuple(range(12)),
    )
    return trial.run(Path()).attacks


def digits_cnn(space: InputSpace) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.ReLU(),
        nn.Linear(128, space.classes),
    )


def share(rows: tuple[AttackRow, ...]) -> float:
    return sum(bool(row.identified) for row in rows) / len(rows)


SUMMED = Method(name="SecureAggregation", options={"clients": 4})


@pytest.mark.parametrize("name", ["LOKI", "ARES"])
def test_who_sends_each_client_another_model_sees_through_secure_aggregation(name: str) -> None:
    assert share(attacked(name, Method(name="none"))) > 0.7
    assert share(attacked(name, SUMMED)) > 0.7


@pytest.mark.parametrize("name", ACTIVE)
def test_dpsgd_leaves_what_a_blind_guess_has(name: str) -> None:
    if name != "Fishing":  # which is after one of three
        assert share(attacked(name, Method(name="none"))) > 0.7
    noisy = attacked(name, Method(name="DPSGD", options={"noise_multiplier": 1.0}))
    assert {row.outcome for row in noisy} == {"scored"}
    assert share(noisy) <= 2 / 12  # by chance, 1 in 20 each, that is exceeded in 2 % of cases


@pytest.mark.parametrize("name", ["LOKI", "ARES"])
def test_clients_that_compare_their_models_refuse(name: str) -> None:
    comparing = Method(name="SecureAggregation", options={"clients": 4, "compare_models": True})
    assert {row.outcome for row in attacked(name, comparing)} == {"refused"}


@pytest.mark.parametrize(
    ("name", "threat", "forbidden"),
    [
        ("ARES", "passive", "parameters"),
        ("LOKI", "parameters", "the architecture"),
        ("ARES", "parameters", None),
        ("PriorGuess", "passive", None),
    ],
)
def test_a_threat_model_may_forbid_changes(name: str, threat: str, forbidden: str | None) -> None:
    rows = attacked(name, Method(name="none"), threat)
    if forbidden is None:
        assert {row.outcome for row in rows} == {"scored"}
        return
    assert {row.outcome for row in rows} == {"not applicable"}
    assert {row.reason for row in rows} == {
        f"the threat model ({threat}) forbids to change {forbidden}"
    }


SEPARATE = {"RobbingTheFed", "LOKI"}
KEEPING, ALTERING = (Method(name=f"keeping:{name}") for name in ("Keeping", "Blurring"))
REVERTING = Method(name="keeping:Reverting")
DEFENSES = {
    "none": Method(name="none"),
    "of gradients": Method(name="DPSGD", options={"noise_multiplier": 1.0}),
    "of updates": Method(name="TopK", options={"ratio": 0.1}),
    "of batches": Method(name="ATS"),
    "of sums": SUMMED,
    "of models": ALTERING,
    "in spite of models": REVERTING,
    "of several": Method(name="Chain", links=(ALTERING, SUMMED)),
}


def kept_in(defense: Method) -> tuple[AttackRow, ...]:
    keeping.CRAFTED.clear()
    keeping.READ.clear()
    scenario = Scenario(dataset="digits", model=Method(name="mlp"), candidates=20, batch_size=2)
    trial = AttackTrial(scenario, defense, KEEPING, True, 0, 0, observations=(0, 1, 2))
    return trial.run(Path()).attacks


@pytest.mark.parametrize("defense", DEFENSES)
def test_what_was_kept_is_there_to_read_with(defense: str) -> None:
    assert {row.outcome for row in kept_in(DEFENSES[defense])} == {"scored"}
    secrets = [kept for _, kept in keeping.CRAFTED]
    assert [kept for kept, _ in keeping.READ] == secrets
    assert len({kept.row for kept in secrets}) > 1  # each round has its own
    assert [before for before, _ in keeping.CRAFTED] == [None, *secrets[:-1]]
    altered = "models" in defense or defense == "of several"
    assert [as_sent for _, as_sent in keeping.READ] == [not altered] * 3


def test_what_was_kept_is_of_no_use_to_who_is_refused() -> None:
    rows = kept_in(Method(name="WeightInspection", options={"scale": 1.0}))
    assert {row.outcome for row in rows} == {"refused"}
    assert len(keeping.CRAFTED) == 3
    assert keeping.READ == []


@pytest.mark.parametrize("name", sorted(ACTIVE.keys() - {"Fishing"}))  # it finds one of three
def test_a_client_that_blurs_its_model_is_read_all_the_same(name: str) -> None:
    rows = attacked(name, ALTERING)
    assert {row.outcome for row in rows} == {"scored"}
    assert share(rows) > 0.5


@pytest.mark.parametrize("name", ACTIVE)
def test_a_client_that_trains_on_another_model_is_a_result(name: str) -> None:
    rows = attacked(name, REVERTING)
    if name in SEPARATE:
        assert {row.outcome for row in rows} == {"not applicable"}
        assert {row.reason for row in rows} == {
            "the client does not train layer '0.measure' as the server sent it"
        }
    else:
        assert {row.outcome for row in rows} == {"scored"}


def crafted(name: str) -> Observation:
    """Return what a server sees that has sent a model of its own."""
    attack = CHEAP.get(name, ACTIVE[name])
    public = None if name == "Fishing" else known().public  # it then fishes for a class
    sent = attack.craft(network(), replace(known(), batch_size=16, public=public), rng())
    client, threat = make_client(network()), ThreatModel(public=known().public)
    options = {"models": sent.models, "kept": sent.kept}
    return observe(client, [batch(16)], threat, rng(1), **options)[0].observation


CHEAP = {"ScaleMIA": ScaleMIA(epochs=1, examples=40), "Fishing": Fishing(iterations=2)}


@pytest.mark.parametrize("name", ACTIVE)
def test_crafted_parameters_of_another_server_are_recognised(name: str) -> None:
    attack, seen = CHEAP.get(name, ACTIVE[name]), crafted(name)
    captured = replace(seen, kept=None)
    if name in SEPARATE:
        with pytest.raises(NotApplicable, match="by this server"):
            attack.reconstruct(captured, rng())
        return
    first, second = (attack.reconstruct(one, rng()) for one in (seen, captured))
    assert len(first.inputs)
    assert torch.equal(first.inputs, second.inputs)


def globals_of() -> dict[str, object]:
    """Return a copy of all that modules of malicious servers hold in containers."""
    modules = [
        importlib.import_module(f"{malicious.__name__}.{one.name}")
        for one in pkgutil.iter_modules(malicious.__path__)
    ]
    return {
        f"{module.__name__}.{name}": copy.copy(value)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, dict | list | set) and not name.startswith("__")
    }


def test_worlds_in_one_process_share_nothing() -> None:
    before = globals_of()
    for name, attack in ACTIVE.items():
        cheap = CHEAP.get(name, attack)
        results: list[Reconstruction] = []
        for scale in (1.0, 2.0, 1.0):  # another world in between
            model = network()
            with torch.no_grad():
                next(model.parameters()).mul_(scale)
            public = PublicData(scale * batch(100, 9).inputs, batch(100, 9).targets)
            sent = cheap.craft(model, replace(known(), public=public), rng())
            options = {"models": sent.models, "kept": sent.kept}
            threat = ThreatModel(public=public)
            (upload,) = observe(make_client(model), [batch(4)], threat, rng(1), **options)
            results.append(cheap.reconstruct(upload.observation, rng()))
        assert torch.equal(results[0].inputs, results[2].inputs)
    assert globals_of() == before
