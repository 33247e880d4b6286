from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Generator

from leakfrontier.defenses import DPSGD, Defense, Guarantee, Plan, TopK, Update
from leakfrontier.evaluate.door.auditing import audit, loaded, measured_scenario, one_configuration
from leakfrontier.evaluate.foundations.errors import UserError
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario

UserFile = Callable[..., Path]
SMALL = Scenario(dataset="digits", model=Method(name="mlp", options={"width": 4}))


@dataclass
class Loud(Defense):
    """Claims what DP-SGD with noise claims, and adds none."""

    @property
    def stochastic(self) -> bool:
        return True

    def on_update(self, update: Update, rng: Generator) -> Update:
        return {
            name: value + 1e-9 * torch.randn(value.shape, generator=rng)
            for name, value in update.items()
        }

    def guarantee(self, plan: Plan) -> Guarantee | None:
        return DPSGD(noise_multiplier=1.0).guarantee(plan)


def test_an_honest_defense_is_not_refuted_and_the_report_shows_itself() -> None:
    threads = torch.get_num_threads()
    report = audit(DPSGD(noise_multiplier=1.0), methods=["residual noise", "neighbours"])
    assert not report.refuted
    assert [one.method for one in report.audits] == ["residual noise", "neighbours"]
    assert report.table()["verdict"].str.startswith("not refuted").all()
    assert "residual noise: not refuted" in str(report)
    assert "not thereby proven" in report._repr_html_()
    assert torch.get_num_threads() == threads


def test_an_object_of_a_session_that_adds_no_noise_is_refuted() -> None:
    report = audit(Loud(), methods="residual-noise", model={"name": "mlp", "width": 8})
    assert report.refuted
    assert report.audits[0].refuted_runs == 1


def test_what_cannot_be_audited_is_refused() -> None:
    with pytest.raises(UserError, match="there is nothing to audit"):
        audit(TopK(ratio=0.5), methods=["residual noise"])
    for nothing in ({"methods": []}, {"runs": 0}):
        with pytest.raises(UserError, match="give at least one audit and one run"):
            audit(DPSGD(noise_multiplier=1.0), **nothing)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="there is no audit 'noise': choose from residual noise"):
        audit(DPSGD(noise_multiplier=1.0), methods=["noise"])


def test_a_question_is_about_one_configuration() -> None:
    assert one_configuration({"name": "TopK", "ratio": [0.1]}).options == {"ratio": 0.1}
    with pytest.raises(
        UserError, match=r"give 2 configurations, but one is needed: give single values"
    ):
        one_configuration({"name": "TopK", "ratio": [0.1, 0.2]})


def test_what_is_not_given_is_as_configured_and_batch_norm_is_replaced(tmp_path: Path) -> None:
    assert measured_scenario(None, None, None) == Scenario(replace_batch_norm=True)
    found = measured_scenario("digits", {"name": "mlp", "width": 4}, tmp_path)
    assert (found.dataset, found.model, found.data_folder) == ("digits", SMALL.model, tmp_path)


def test_mistakes_of_a_users_class_are_told_as_such(user_file: UserFile) -> None:
    name = user_file(
        "class Mine(Defense):\n    def on_model(self, model):\n        return model.missing\n"
    )
    with pytest.raises(
        UserError, match=r"Mine on digits/mlp\(width=4\): AttributeError: .*missing"
    ):
        loaded(SMALL, Method(name=f"{name}:Mine"), seed=0)
