import io
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from packing import rewritten
from rich.console import Console

from leakfrontier.evaluate.run.cells import TrainTrial
from leakfrontier.evaluate.run.config import ConfigError, load_config
from leakfrontier.evaluate.run.run import _replaced, plan, run
from leakfrontier.evaluate.run.tuning import FIRST_SEED, combinations, tuning_plan, with_chosen
from leakfrontier.evaluate.share.pack import pack_run, read_pack
from leakfrontier.evaluate.share.verification import verify
from leakfrontier.evaluate.users.methods import Method, build_defense
from leakfrontier.evaluate.users.names import label
from leakfrontier.evaluate.world.enrolment import enrol
from leakfrontier.evaluate.world.scenario import load_world
from leakfrontier.reports.page import write_report

DPSGD = {"name": "DPSGD", "noise_multiplier": 0.5, "poisson_sampling": False}
NAME = "DPSGD(noise_multiplier=0.5, poisson_sampling=False)"


def content(**tune: Any) -> dict[str, Any]:  # noqa: ANN401 - any option
    return {
        "scenarios": [
            {
                "dataset": "digits",
                "model": {"name": "mlp", "width": 16},
                "candidates": 20,
                "training": {"rounds": 4, "clients": 4, "batch_size": 1},
                "tune": tune or {"lr": [1e-6, 0.02], "DPSGD.max_grad_norm": [0.1, 1], "budget": 4},
            }
        ],
        "defenses": ["none", DPSGD],
        "adversaries": ["PriorGuess", "LinearLeakage"],
        "observations": 2,
    }


def test_every_arm_has_the_same_number_of_trainings() -> None:
    config = load_config(content())
    (scenario,) = config.scenarios
    assert scenario.validation == 0.1
    arms = pd.Series([label(trial.defense) for trial in tuning_plan(config)])
    assert arms.value_counts().to_dict() == {"none": 4, NAME: 4}
    control = [one for one in tuning_plan(config) if label(one.defense) == "none"]
    assert [(one.number, one.seed) for one in control] == [
        (0, FIRST_SEED),
        (1, FIRST_SEED),
        (0, FIRST_SEED + 1),
        (1, FIRST_SEED + 1),
    ]
    assert min(one.seed for one in control) > 10_000  # no evaluation has as many seeds


def test_the_grid_is_cut_at_the_budget_in_a_fixed_order() -> None:
    lrs = [0.001 * i for i in range(1, 9)]
    (scenario,) = load_config(content(lr=lrs, budget=4)).scenarios
    tried = combinations(scenario, Method(name="none"))
    assert len(tried) == 4
    assert tried != [{"lr": lr} for lr in lrs[:4]]
    assert tried == combinations(scenario, Method(name="none"))
    (halved,) = load_config(content(lr=lrs, budget=4, seeds=2)).scenarios
    assert combinations(halved, Method(name="none")) == tried[:2]


def test_a_tuned_arm_keeps_its_name_and_its_draws() -> None:
    (scenario,) = load_config(content()).scenarios
    plain = Method.model_validate(DPSGD)
    arm, defense = scenario.arm(plain, {"lr": 0.02, "DPSGD.max_grad_norm": 0.1})
    assert (arm.training.lr, build_defense(defense).max_grad_norm) == (0.02, 0.1)  # type: ignore[attr-defined]
    assert label(defense) == label(plain) == NAME
    one, other = TrainTrial(arm, defense, 0), TrainTrial(scenario, plain, 0)
    assert one.cell.labels == other.cell.labels
    assert one.cell.key != other.cell.key
    assert one.draws == other.draws
    rows = [enrol(load_world(each), 0, 2).rows for each in (arm, scenario)]
    assert all(torch.equal(a, b) for a, b in zip(*rows, strict=True))


def test_an_option_of_a_link_is_tuned() -> None:
    (scenario,) = load_config(content()).scenarios
    chain = Method.model_validate(
        {"name": "Chain", "links": [DPSGD, {"name": "TopK", "ratio": 0.5}]}
    )
    _, defense = scenario.arm(chain, {"DPSGD.max_grad_norm": 0.1})
    assert [link.options.get("max_grad_norm") for link in defense.links] == [0.1, None]
    assert label(defense) == label(chain)


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        ({"rounds": [1, 2]}, "'rounds' cannot be tuned: give .*lr"),
        ({"lr": []}, "lr must list at least one value"),
        ({"lr": [-1.0]}, "lr"),
        ({"TopK.ratio": [0.1]}, "tune.TopK.ratio of digits/.*: the run has no such defense"),
        ({"DPSGD.max_grad_norm": [-1]}, "max_grad_norm"),
        ({"DPSGD.norm": [1]}, "norm"),
        ({"lr": [1.0], "budget": 0}, "budget: must be at least 1"),
    ],
)
def test_wrong_options_are_immediate_errors(tune: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(content(**tune))


def test_tuning_needs_validation_and_excludes_other_rates() -> None:
    wrong = content()
    wrong["scenarios"][0]["validation"] = 0
    with pytest.raises(ConfigError, match="tune needs validation examples"):
        load_config(wrong)
    wrong = content()
    wrong["scenarios"][0]["training"]["defense_lr"] = {"DPSGD": 1.0}
    with pytest.raises(ConfigError, match="exclude each other"):
        load_config(wrong)


def test_without_tuning_a_configuration_is_as_before() -> None:
    plain = content()
    del plain["scenarios"][0]["tune"]
    config = load_config(plain)
    assert tuning_plan(config) == []
    assert not {"tune", "validation"} & {*config.model_dump(mode="json")["scenarios"][0]}
    assert not {"tune", "validation"} & {*config.scenarios[0].config()}
    assert config.scenarios[0].paired_config() == config.scenarios[0].config()
    assert with_chosen(config, pd.DataFrame({"scenario": []})) == config


def test_a_run_tunes_first_and_its_pack_is_verified(tmp_path: Path) -> None:
    quiet, config, out = Console(quiet=True), load_config(content()), tmp_path / "out"
    results = run(config, out, workers=1, console=quiet)
    assert set(results.cells["status"]) <= {"ok", "not needed"}
    assert len(results.tunings) == 8
    assert set(results.tunings["total"]) == {144}  # the validation examples, not the test ones
    (stored,) = results.config["scenarios"]
    chosen = stored["tune"]["chosen"]
    assert chosen["none"] == {"lr": 0.02}
    assert {*chosen[NAME]} == {"lr", "DPSGD.max_grad_norm"}
    trainings = [one for one in plan(load_config(results.config)) if isinstance(one, TrainTrial)]
    assert [one.scenario.training.lr for one in trainings] == [0.02, chosen[NAME]["lr"]]

    assert [*_replaced(out, config)] == []
    again = run(config, out, workers=1, console=quiet)  # runs nothing again
    pd.testing.assert_frame_equal(again.cells, results.cells)

    page = write_report(out, results).read_text()
    assert "Learning rate, DPSGD.max_grad_norm chosen on validation, 4 trainings each" in page
    assert "Epsilon does not count the trainings of tuning" in page
    assert "lr=0.02" in page
    table = pd.read_csv(out / "tables" / "tunings.csv")
    assert table.groupby("defense")["chosen"].sum().to_dict() == {"none": 1, NAME: 1}

    path = tmp_path / "pack.zip"
    path.write_bytes(pack_run(out))
    console = Console(record=True, width=200, file=io.StringIO())
    given: dict[str, Any] = {"defenses": [NAME], "seeds": 1, "more": 0, "seed": 0, "workers": 1}
    found = verify(read_pack(path), **given, console=console)
    assert (found.problems, found.decision) == ((), "confirmed")
    assert f"equal tuning under {NAME}" in console.export_text()

    def other_choice(entries: dict[str, bytes]) -> None:
        meta = json.loads(entries["pack.json"])
        meta["config"]["scenarios"][0]["tune"]["chosen"]["none"]["lr"] = 1e-6
        entries["pack.json"] = json.dumps(meta).encode()

    rewritten(path, other_choice, sums=True)
    found = verify(read_pack(path), **given)
    assert "its chosen settings do not follow from the rows of its tuning" in found.problems
