"""Attacks on captures: scored as in a run, or shown without a claim."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch

from leakfrontier.adversaries import ImageSpace
from leakfrontier.evaluate.capture import Description, write_capture
from leakfrontier.evaluate.capture_run import attack_captures
from leakfrontier.evaluate.cells import AttackTrial, _Server
from leakfrontier.evaluate.errors import UserError
from leakfrontier.evaluate.methods import Method, build_adversary
from leakfrontier.evaluate.results import Results
from leakfrontier.evaluate.run import run_trials
from leakfrontier.evaluate.scenario import Scenario, load_world

Command = Callable[..., tuple[int, str, str]]

MODEL = Method(name="mlp", options={"width": 16})
SCENARIO = Scenario(dataset="digits", model=MODEL, candidates=20)
ATTACKS = [
    Method(name="PriorGuess"),
    Method(name="LinearLeakage"),
    Method(name="PriorAware"),
    Method(name="InvertingGradients", options={"iterations": 20}),
]
TOPK = Method(name="TopK", options={"ratio": 0.3})
UPLOADS = 3
ROW = ["adversary", "knows_defense", "observation", "victim"]
VALUES = [
    *("outcome", "identified", "identified_original", "counterfactual", "label_correct"),
    *("objective", "objective_at_truth", "bound"),
]


def trials(defense: Method) -> list[AttackTrial]:
    return [
        AttackTrial(
            SCENARIO,
            defense,
            attack,
            knows,
            seed=0,
            checkpoint=0,
            observations=tuple(range(UPLOADS)),
        )
        for attack in ATTACKS
        for knows in ([True, False] if build_adversary(attack).simulates else [True])
    ]


def captured(folder: Path, defense: Method, *, truth: bool = True, known: bool = True) -> Path:
    """Write the uploads of a run as captures."""
    world = load_world(SCENARIO)
    (first, *_) = trials(defense)
    built = world.defense(defense)
    server = _Server(first, world, built, build_adversary(first.adversary), folder)
    about = Description.model_validate(
        {
            "model": MODEL,
            "space": world.space,
            "batch_size": 1,
            "dataset": "digits" if truth else None,
            "defense": defense if known else None,
        }
    )
    for number in range(UPLOADS):
        upload = server.observe(number).upload
        assert upload is not None
        write_capture(
            folder / f"{number}",
            about,
            weights=upload.observation.model.state_dict(),
            update=upload.observation.update,
            truth=upload.truth if truth else None,
        )
    return folder


@pytest.fixture(scope="module")
def in_a_run(tmp_path_factory: pytest.TempPathFactory) -> Results:
    out = tmp_path_factory.mktemp("run")
    return run_trials(trials(TOPK), out, panel="test", config={}, workers=1)


@pytest.fixture(scope="module")
def of_captures(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, bool]:
    folder = tmp_path_factory.mktemp("captures")
    captured(folder / "in", TOPK)
    return attack_captures(
        folder / "in", folder / "out", adversaries=ATTACKS, candidates=20, workers=1
    )


def test_rows_are_those_of_a_run(in_a_run: Results, of_captures: tuple[Results, bool]) -> None:
    results, scored = of_captures
    assert scored
    assert set(results.cells["status"]) == {"ok"}
    ours = results.attacks[results.attacks["defense"] == "TopK(ratio=0.3)"]
    pair = [frame.set_index(ROW)[VALUES].sort_index() for frame in (ours, in_a_run.attacks)]
    assert len(pair[0]) == 6 * UPLOADS  # two attacks replay the client
    pd.testing.assert_frame_equal(*pair)
    scores = [
        frame[frame["defense"] == "TopK(ratio=0.3)"]
        .set_index([*ROW, "metric"])["value"]
        .sort_index()
        for frame in (results.scores, in_a_run.scores)
    ]
    assert len(scores[0])
    pd.testing.assert_series_equal(*scores)


def test_the_control_is_an_undefended_upload_of_the_same_examples(
    of_captures: tuple[Results, bool],
) -> None:
    results, _ = of_captures
    rates = results.rates().set_index(["defense", "adversary"])["rate"]
    assert rates["none", "LinearLeakage"] == 1.0


DROPPING = """
from torch import nn

def build(space):
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, space.classes))
"""


def test_it_is_said_whether_clients_dropped_anything(
    tmp_path: Path, user_file: Callable[..., Path]
) -> None:
    for mode in ("eval", "train"):
        model = Method(name=f"{user_file(DROPPING)}:build")
        about = Description(model=model, space=ImageSpace((1, 8, 8), 10), batch_size=1, mode=mode)
        weights = about.build().state_dict()
        write_capture(tmp_path / "in" / mode, about, weights=weights, update=weights)
    linear = [Method(name="LinearLeakage")]
    results, _ = attack_captures(
        tmp_path / "in", tmp_path / "out", adversaries=linear, trust_code=True, workers=1
    )
    assert set(results.cells["status"]) == {"ok"}
    assert ["is switched off" in note for note in results.notes] == [True, False]
    assert "clients train in training mode" in results.notes[1]


@pytest.mark.usefixtures("undrawn")
def test_the_command_writes_the_usual_page(tmp_path: Path, command: Command) -> None:
    captured(tmp_path / "in", Method(name="none"))
    code, output, errors = command(
        *("attack", tmp_path / "in", "--out", tmp_path / "out", "--workers", 1),
        *("--adversary", "LinearLeakage", "--adversary", "PriorGuess"),
    )
    assert code == 0, errors
    assert "Evaluation: YES, with caveats (blind guess, power)" in output  # three uploads are few
    page = (tmp_path / "out/report.html").read_text()
    assert "LinearLeakage" in page
    assert "gallery" in page


def test_without_the_truth_nothing_is_claimed(tmp_path: Path, command: Command) -> None:
    captured(tmp_path / "in", Method(name="none"), truth=False, known=False)
    code, output, errors = command(
        *("attack", tmp_path / "in", "--out", tmp_path / "out", "--workers", 1),
        *("--adversary", "LinearLeakage", "--adversary", "PriorAware"),
        *("--adversary", "{name: InvertingGradients, iterations: 20}"),
    )
    assert code == 0, errors
    assert "No success is claimed" in output
    page = (tmp_path / "out/gallery.html").read_text()
    assert "residual" in page
    assert "not applicable" in page
    assert " identified" not in page
    assert page.count("data:image/png") == 2 * UPLOADS
    assert len(list((tmp_path / "out/reconstructions").glob("*.png"))) == 2 * UPLOADS
    assert not (tmp_path / "out/report.html").exists()


def test_a_secure_sum_can_be_attacked_without_data(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    about = Description.model_validate(
        {
            "model": MODEL,
            "space": ImageSpace((1, 8, 8), 10),
            "batch_size": 2,
            "protocol": {"name": "FedSGD", "clients": 2},
            "defense": {"name": "SecureAggregation", "clients": 2},
        }
    )
    model = about.build()
    update = {
        name: torch.randn(value.shape, generator=rng) for name, value in model.named_parameters()
    }
    write_capture(tmp_path / "in", about, weights=model.state_dict(), update=update)
    attack = Method(name="InvertingGradients", options={"iterations": 2})
    results, _ = attack_captures(
        tmp_path / "in", tmp_path / "out", adversaries=[attack], candidates=20, workers=1
    )
    assert set(results.cells["status"]) == {"ok"}


def test_attacks_that_send_models_are_refused(tmp_path: Path) -> None:
    captured(tmp_path / "in", Method(name="none"))
    with pytest.raises(UserError, match="sends models of its own"):
        attack_captures(tmp_path / "in", tmp_path / "out", adversaries=[Method(name="LOKI")])


def test_data_of_another_kind_is_refused(tmp_path: Path, command: Command) -> None:
    captured(tmp_path / "in", Method(name="none"))
    code, _, errors = command(
        "attack", tmp_path / "in", "--out", tmp_path / "out", "--dataset", "fashion-mini"
    )
    assert code == 2
    assert "have shape (1, 28, 28) and 10 classes" in errors


def test_a_bad_capture_is_an_error_of_the_users(tmp_path: Path, command: Command) -> None:
    captured(tmp_path / "in", Method(name="none"))
    path = tmp_path / "in/1/capture.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model": "vit"}))
    code, _, errors = command("attack", tmp_path / "in", "--out", tmp_path / "out")
    assert code == 2
    assert "in/1/capture.json: model must be one of mlp" in errors
