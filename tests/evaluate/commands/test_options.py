from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.console import Console

from leakfrontier.evaluate.commands.options import (
    DeviceName,
    EngineName,
    conclude,
    defense_from,
    device_from,
    engine_from,
    method_from,
    print_path,
    scenario_from,
)
from leakfrontier.evaluate.conclude import checks
from leakfrontier.evaluate.engines.engine import LOCAL
from leakfrontier.evaluate.engines.ray_engine import RayEngine
from leakfrontier.evaluate.foundations import devices
from leakfrontier.evaluate.foundations.errors import UserError
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario

SMALL = Scenario(dataset="digits", model=Method(name="mlp", options={"width": 4}))


def test_an_address_is_that_of_a_cluster() -> None:
    assert engine_from(EngineName.local, None) is LOCAL
    assert engine_from(EngineName.ray, "auto") == RayEngine("auto")
    with pytest.raises(UserError, match="give --engine ray as well"):
        engine_from(EngineName.local, "auto")


def test_a_device_must_be_here_unless_others_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: str) -> None:
        raise ValueError(f"there is no {device} here")

    assert device_from(None, EngineName.local) == "cpu"
    monkeypatch.setattr(devices, "resolved", missing)
    with pytest.raises(UserError, match="there is no cuda here"):
        device_from(DeviceName.cuda, EngineName.local)
    assert device_from(DeviceName.cuda, EngineName.ray) == "cuda"


def test_a_method_is_a_name_or_a_mapping() -> None:
    assert method_from("TopK", "--defense") == "TopK"
    assert method_from(" {name: TopK, ratio: 0.1}", "--defense") == {"name": "TopK", "ratio": 0.1}
    with pytest.raises(UserError, match=r"--defense '\{name: \[\}' is not a valid YAML mapping"):
        method_from("{name: [}", "--defense")


def test_a_command_is_about_one_configuration() -> None:
    assert defense_from("{name: TopK, ratio: [0.1]}") == Method(name="TopK", options={"ratio": 0.1})
    with pytest.raises(
        UserError, match=r"give 2 configurations, but one is needed: give single values"
    ):
        defense_from("{name: TopK, ratio: [0.1, 0.2]}")


def test_what_is_not_given_is_as_configured_and_batch_norm_is_replaced(tmp_path: Path) -> None:
    assert scenario_from(None, None, None) == Scenario(replace_batch_norm=True)
    found = scenario_from("digits", "{name: mlp, width: 4}", tmp_path)
    assert (found.dataset, found.model, found.data_folder) == ("digits", SMALL.model, tmp_path)


@pytest.mark.parametrize("verdict", ["pass", "warn", "fail"])
def test_an_evaluation_that_cannot_be_trusted_ends_with_an_error(
    verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: Any = SimpleNamespace(checks=lambda: ["checks"])
    monkeypatch.setattr(checks, "overall", lambda checks: verdict)
    monkeypatch.setattr(checks, "conclusion", lambda found: f"Evaluation of [{found[0]}]")
    shown = io.StringIO()
    if verdict == "fail":
        with pytest.raises(typer.Exit) as caught:
            conclude(Console(file=shown), results)
        assert caught.value.exit_code == 1
    else:
        conclude(Console(file=shown), results)
    assert shown.getvalue() == "Evaluation of [checks]\n"


def test_a_path_is_printed_whole_whatever_is_in_it(tmp_path: Path) -> None:
    shown = io.StringIO()
    path = tmp_path / "[red]" / ("long" * 20)
    print_path(Console(file=shown, width=20), "Report:", path)
    assert shown.getvalue() == f"Report: {path}\n"
