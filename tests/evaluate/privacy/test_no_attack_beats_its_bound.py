"""Measured success below proven bounds, over a grid of differentially private settings.

An attack whose lower confidence limit is above the bound means that noise, clipping, accounting
or scoring is wrong. The bounds hold for any model: besides an ordinary one for the other attacks,
the candidate attack is given one that makes it nearly as strong as can be, so that the comparison
is a sharp one.

What is exact or given candidates meets every setting where its uploads would tell: if all of
them were broken, the lower limit would be above the bound. A search, which is weaker and takes
longer, meets three of these, and searches for texts, which take seconds, two. With so many
comparisons, some 95 % limit would be above a bound by luck: limits are corrected for their number.
An attack that gives up under noise has not found its victim.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue
from small_panel import OF_BATCHES, OF_ONE_STEP, OF_OTHER_MODELS, OF_WEIGHTS, SMALL, attacked

from leakfrontier.adversaries import PANEL
from leakfrontier.evaluate.foundations.rows import AttackRow
from leakfrontier.evaluate.foundations.statistics import (
    Interval,
    clopper_pearson,
    monotone_violation,
    paired_difference,
)
from leakfrontier.evaluate.privacy.bounds import reconstruction
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario

pytestmark = pytest.mark.usefixtures("uploads_are_kept")

SUPPORT = Path(__file__).parents[2] / "support"
MODELS = {
    "mlp": Method(name="mlp", options={"width": 16}),
    "spreading": Method(name=f"{SUPPORT / 'spreading_model.py'}:build"),
    "invertible": Method(name=f"{SUPPORT / 'convolutional_models.py'}:invertible"),
    "encoding": Method(name=f"{SUPPORT / 'convolutional_models.py'}:encoding"),
    "gpt2": Method(name="gpt2", options={"layers": 2, "width": 48, "heads": 2}),
}
IMAGES: dict[str, Any] = {"dataset": "digits"}
TEXTS: dict[str, Any] = {"dataset": "messages", "task": "next-token", "length": 12}


@dataclass(frozen=True)
class Attack:
    """An adversary of the panel at small size, on a model.

    Attributes:
        adversary: Its name.
        model: The model.
        uploads: How many it is tried on.
    """

    adversary: str
    model: str = "mlp"
    uploads: int = 16

    def __str__(self) -> str:
        return f"{self.adversary}-{self.model}"

    @property
    def steps(self) -> int:
        """Return the local steps that it needs, at least."""
        return 2 if self.adversary in OF_WEIGHTS else 1

    @property
    def method(self) -> Method:
        """Return the adversary with its options."""
        small = {**SMALL, **OF_OTHER_MODELS.get(self.model, {})}
        return small.get(self.adversary, Method(name=self.adversary))


LINEAR_LEAKAGE = Attack("LinearLeakage")
STRONGEST = Attack("PriorAware", "spreading", uploads=30)
EVERYWHERE = [
    *(LINEAR_LEAKAGE, STRONGEST, Attack("SPEAR"), Attack("SPEARPlusPlus")),
    *(Attack(name, "invertible") for name in OF_OTHER_MODELS["invertible"]),
    *(Attack(name, "gpt2") for name in ("DAGER", "SOMP")),
]
OF_TEXTS = [Attack(name, "gpt2", uploads=5) for name in ("LAMP", "GRAB")]
SEARCHES = [
    *(Attack(name) for name in SMALL if name not in {attack.adversary for attack in EVERYWHERE}),
    Attack("ScaleMIA", "encoding"),
]
ATTACKS = [*EVERYWHERE, *SEARCHES, *OF_TEXTS]


@dataclass(frozen=True)
class Setting:
    """A private defense, the look-alikes of a victim, and a client's local steps.

    A client has a single example, which is in every step: record and client are one.
    """

    defense: str
    sigma: float
    candidates: int
    steps: int = 1
    options: dict[str, JsonValue] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        options = "".join(f", {value}" for value in self.options.values())
        return f"{self.defense}({self.sigma}{options}) {self.candidates} x {self.steps}"

    @property
    def parameters(self) -> dict[str, JsonValue]:
        return {} if self.defense == "none" else {"noise_multiplier": self.sigma, **self.options}

    @property
    def bound(self) -> float:
        noised = self.steps if self.defense == "DPSGD" else 1  # every step, or the upload
        return reconstruction(1 / self.candidates, 1.0, self.sigma, noised)

    def against(self, attack: Attack) -> Setting:
        """Return the setting with as many local steps as an attack needs."""
        return replace(self, steps=max(self.steps, attack.steps))

    def rows(self, attack: Attack) -> tuple[AttackRow, ...]:
        protocol = Method(name="FedSGD")
        if self.steps > 1:
            protocol = Method(name="FedAvg", options={"epochs": self.steps, "lr": 0.05})
        scenario = Scenario(
            **(TEXTS if attack.model == "gpt2" else IMAGES),
            model=MODELS[attack.model],
            protocol=protocol,
            candidates=self.candidates,
        )
        defense = Method(name=self.defense, options=self.parameters)
        rows = attacked(scenario, defense, attack.method, attack.uploads)
        reasons = {row.reason for row in rows if row.reason is not None}
        assert not reasons or (self.sigma and attack.model in OF_OTHER_MODELS), (attack, reasons)
        scored = [row.candidates for row in rows if row.reason is None]
        assert scored == [self.candidates] * len(scored)
        return rows

    def success(self, attack: Attack, confidence: float = 0.95) -> Interval:
        identified = [bool(row.identified) for row in found(self, attack)]
        return clopper_pearson(sum(identified), len(identified), confidence)


found = cache(Setting.rows)

GRID = [
    Setting("DPSGD", 0.5, 100, options={"max_grad_norm": 0.1}),
    Setting("DPSGD", 0.5, 10),
    Setting("DPSGD", 1.0, 10, options={"clipping": "per_layer", "per_example": "hooks"}),
    Setting("DPSGD", 1.0, 20, steps=3),
    Setting("DPSGD", 2.0, 2),
    Setting("DPSGD", 2.0, 5),
    Setting("ClientDP", 0.5, 100, options={"max_update_norm": 10.0}),
    Setting("ClientDP", 0.5, 100, steps=2),
    Setting("ClientDP", 0.7, 50, options={"max_update_norm": 0.1}),
    Setting("ClientDP", 1.0, 10),
    Setting("ClientDP", 2.0, 2),
    Setting("ClientDP", 4.0, 20),
]


LITTLE_NOISE = [GRID[0], GRID[6], GRID[7]]
MUCH_NOISE = [Setting("DPSGD", 4.0, 20), GRID[11]]
CONSIDERED = [
    *product(GRID, EVERYWHERE),
    *product(LITTLE_NOISE, SEARCHES),
    *((GRID[3], attack) for attack in SEARCHES if attack.adversary in OF_WEIGHTS),
    *product(MUCH_NOISE, OF_TEXTS),
]
CORRECTED = 1 - 2 * 0.05 / len(CONSIDERED)
"""Bonferroni: 5 % for any lower limit, an exact one-sided binomial test, to be wrong by luck."""

PAIRS = [
    (setting, attack)
    for setting, attack in CONSIDERED
    if (setting.steps == 1 or attack.adversary not in OF_ONE_STEP)
    and clopper_pearson(attack.uploads, attack.uploads, CORRECTED).low
    > setting.against(attack).bound
]


def test_every_attack_of_the_panel_is_tested() -> None:
    tested = {attack.adversary for attack in ATTACKS} | OF_BATCHES
    blind = {name for name, member in PANEL.members.items() if member.baseline}
    assert tested | blind == set(PANEL.members)


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_every_attack_meets_defenses_of_examples_and_of_clients(attack: Attack) -> None:
    met = {setting.defense for setting, other in PAIRS if other == attack}
    assert met == {"DPSGD", "ClientDP"}


@pytest.mark.parametrize("name", [*OF_BATCHES, *OF_OTHER_MODELS["gpt2"]])
def test_what_is_not_tested_on_images_of_one_example_cannot_be(name: str) -> None:
    for model in ("mlp", "invertible", "encoding"):
        scenario = Scenario(**IMAGES, model=MODELS[model], candidates=10)
        rows = attacked(scenario, Method(name="none"), Method(name=name), 2)
        assert all(row.reason for row in rows), model


@pytest.mark.parametrize(("setting", "attack"), PAIRS, ids=str)
def test_no_attack_beats_its_bound(setting: Setting, attack: Attack) -> None:
    attacked_setting = setting.against(attack)
    assert attacked_setting.success(attack, CORRECTED).low <= attacked_setting.bound


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_every_attack_works_undefended_at_this_size(attack: Attack) -> None:
    assert Setting("none", 0.0, 10).against(attack).success(attack).low > 1 / 10


@pytest.mark.parametrize(
    "setting",
    [
        Setting("DPSGD", 0.3, 20, options={"max_grad_norm": 0.1}),
        Setting("ClientDP", 0.3, 50, options={"max_update_norm": 0.1}),
    ],
    ids=str,
)
def test_half_of_the_noise_would_be_noticed(setting: Setting) -> None:
    claimed = replace(setting, sigma=2 * setting.sigma)
    assert setting.success(STRONGEST, CORRECTED).low > claimed.bound


def test_success_falls_from_undefended_to_blind_as_noise_grows() -> None:
    sigmas = (0.0, 0.2, 0.5, 1.0, 3.0, 1e3)
    rates = [Setting("DPSGD", sigma, 10).success(STRONGEST) for sigma in sigmas]
    undefended = Setting("none", 0.0, 10).success(STRONGEST)
    assert rates[0] == undefended
    assert undefended.value == 1
    assert rates[-1].low <= 1 / 10 <= rates[-1].high
    limits = zip(*((one.value, one.low, one.high) for one in rates), strict=True)
    assert monotone_violation(sigmas, *limits) == []
    assert rates[1].low > rates[4].high  # and it does fall


@pytest.mark.parametrize(
    ("attack", "looks"), [(Attack("PriorGuess"), False), (LINEAR_LEAKAGE, True)], ids=str
)
def test_what_ignores_the_upload_has_no_advantage_over_itself(attack: Attack, looks: bool) -> None:
    rows = found(Setting("none", 0.0, 10), attack)
    gain = paired_difference(
        [bool(row.identified) for row in rows],
        [bool(row.counterfactual) for row in rows],
        range(len(rows)),
    )
    assert (gain.low > 0) == looks
    assert looks or gain.low <= 0 <= gain.high
