"""Measured success below proven bounds, over a grid of differentially private settings.

An attack whose lower confidence limit is above the bound means that noise, clipping, accounting
or scoring is wrong. The bounds hold for any model: besides an ordinary one, the candidate attack
is given one that makes it nearly as strong as can be, so that the comparison is a sharp one.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest

from leakfrontier.evaluate.bounds import reconstruction
from leakfrontier.evaluate.methods import Method
from leakfrontier.evaluate.rows import AttackRow
from leakfrontier.evaluate.scenario import Scenario
from leakfrontier.evaluate.statistics import (
    Interval,
    clopper_pearson,
    monotone_violation,
    paired_difference,
)
from leakfrontier.evaluate.trial import AttackTrial

UPLOADS = 40
MODELS = {
    "mlp": Method(name="mlp", options={"width": 16}),
    "spreading": Method(name=f"{Path(__file__).with_name('spreading_model.py')}:build"),
}
ATTACKS = [("LinearLeakage", "mlp"), ("PriorAware", "mlp"), ("PriorAware", "spreading")]


@dataclass(frozen=True)
class Setting:
    """A private defense, the look-alikes of a victim, and a client's local steps.

    A client has a single example, which is in every step: record and client are one.
    """

    defense: str
    sigma: float
    candidates: int
    steps: int = 1
    options: dict[str, object] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        options = "".join(f", {value}" for value in self.options.values())
        return f"{self.defense}({self.sigma}{options}) {self.candidates} x {self.steps}"

    @property
    def parameters(self) -> dict[str, object]:
        return {} if self.defense == "none" else {"noise_multiplier": self.sigma, **self.options}

    @property
    def bound(self) -> float:
        noised = self.steps if self.defense == "DPSGD" else 1  # every step, or the upload
        return reconstruction(1 / self.candidates, 1.0, self.sigma, noised)

    def rows(self, adversary: str, model: str) -> tuple[AttackRow, ...]:
        protocol = Method(name="FedSGD")
        if self.steps > 1:
            protocol = Method(name="FedAvg", options={"epochs": self.steps, "lr": 0.05})
        trial = AttackTrial(
            Scenario(
                dataset="digits",
                model=MODELS[model],
                protocol=protocol,
                candidates=self.candidates,
            ),
            Method(name=self.defense, options=self.parameters),
            Method(name=adversary),
            knows_defense=True,
            seed=0,
            checkpoint=0,
            observations=UPLOADS,
        )
        rows = trial.run(Path()).attacks
        assert [row.candidates for row in rows] == [self.candidates] * UPLOADS  # all applicable
        return rows

    def success(self, adversary: str, model: str) -> Interval:
        rows = self.rows(adversary, model)
        return clopper_pearson(sum(bool(row.identified) for row in rows), UPLOADS)


measured = cache(Setting.success)

GRID = [
    Setting("DPSGD", 0.3, 20, options={"max_grad_norm": 0.1}),
    Setting("DPSGD", 0.5, 2),
    Setting("DPSGD", 0.5, 10),
    Setting("DPSGD", 0.5, 100),
    Setting("DPSGD", 1.0, 10, options={"clipping": "per_layer", "per_example": "hooks"}),
    Setting("DPSGD", 2.0, 5),
    Setting("DPSGD", 1.0, 20, steps=3),
    Setting("ClientDP", 0.3, 50, options={"max_update_norm": 0.1}),
    Setting("ClientDP", 0.5, 10, options={"max_update_norm": 10.0}),
    Setting("ClientDP", 1.0, 2),
    Setting("ClientDP", 0.5, 10, steps=2),
    Setting("ClientDP", 4.0, 20),
]


@pytest.mark.parametrize(("adversary", "model"), ATTACKS)
@pytest.mark.parametrize("setting", GRID, ids=str)
def test_no_attack_beats_its_bound(setting: Setting, adversary: str, model: str) -> None:
    assert measured(setting, adversary, model).low <= setting.bound


@pytest.mark.parametrize("setting", [GRID[0], GRID[7]], ids=str)  # the least noise: most power
def test_half_of_the_noise_would_be_noticed(setting: Setting) -> None:
    claimed = replace(setting, sigma=2 * setting.sigma)
    assert measured(setting, "PriorAware", "spreading").low > claimed.bound


def test_success_falls_from_undefended_to_blind_as_noise_grows() -> None:
    sigmas = (0.0, 0.2, 0.5, 1.0, 3.0, 1e3)
    found = [measured(Setting("DPSGD", sigma, 10), "PriorAware", "spreading") for sigma in sigmas]
    undefended = measured(Setting("none", 0.0, 10), "PriorAware", "spreading")
    assert found[0] == undefended
    assert undefended.value == 1
    assert found[-1].low <= 1 / 10 <= found[-1].high
    limits = zip(*((one.value, one.low, one.high) for one in found), strict=True)
    assert monotone_violation(sigmas, *limits) == []
    assert found[1].low > found[4].high  # and it does fall


@pytest.mark.parametrize(("adversary", "looks"), [("PriorGuess", False), ("LinearLeakage", True)])
def test_what_ignores_the_upload_has_no_advantage_over_itself(adversary: str, looks: bool) -> None:
    rows = Setting("none", 0.0, 10).rows(adversary, "mlp")
    gain = paired_difference(
        [bool(row.identified) for row in rows],
        [bool(row.counterfactual) for row in rows],
        range(UPLOADS),
    )
    assert (gain.low > 0) == looks
    assert looks or gain.low <= 0 <= gain.high
