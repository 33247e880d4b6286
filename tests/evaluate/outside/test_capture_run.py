"""Attacks on captures: scored as in a run, or shown without a claim."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import ImageSpace
from leakfrontier.evaluate.conclude.analysis import victim_matrix
from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.foundations.errors import UserError
from leakfrontier.evaluate.outside.capture import Description, capture, write_capture
from leakfrontier.evaluate.outside.capture_run import attack_captures
from leakfrontier.evaluate.run.cells import AttackTrial, Rounds
from leakfrontier.evaluate.run.run import run_trials
from leakfrontier.evaluate.run.server import Server
from leakfrontier.evaluate.run.store import Store
from leakfrontier.evaluate.users.methods import Method, build_adversary
from leakfrontier.evaluate.world.scenario import Scenario, load_world
from leakfrontier.reports.gallery import make_gallery

Command = Callable[..., tuple[int, str, str]]

MODEL = Method(name="mlp", options={"width": 16})
SCENARIO = Scenario(dataset="digits", model=MODEL, candidates=20)
ATTACKS = [
    Method(name="PriorGuess"),
    Method(name="LinearLeakage"),
    Method(name="PriorAware"),
    Method(name="InvertingGradients", options={"iterations": 20}),
]
NONE, NOISE = Method(name="none"), Method(name="Noise", options={"scale": 0.1})
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


def captured(
    folder: Path,
    defense: Method,
    *,
    truth: bool = True,
    known: bool = True,
    uploads: int = UPLOADS,
) -> Path:
    """Write the uploads of a run as captures."""
    world = load_world(SCENARIO)
    (first, *_) = trials(defense)
    built, adversary = world.defense(defense), build_adversary(first.adversary)
    threat = world.threat(first.knows_defense)
    server = Server(world, built, adversary, threat, first.seed, first.draws, examined=None)
    rounds = Rounds(first, server, first._scenes(world, built, folder))
    about = Description.model_validate(
        {
            "model": MODEL,
            "space": world.space,
            "batch_size": 1,
            "dataset": "digits" if truth else None,
            "defense": defense if known else None,
        }
    )
    for number in range(uploads):
        upload = rounds.observe(number).upload
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
def in_a_run(tmp_path_factory: pytest.TempPathFactory) -> Conclusions:
    out = tmp_path_factory.mktemp("run")
    return run_trials(trials(TOPK), out, panel="test", config={}, workers=1)


@pytest.fixture(scope="module")
def of_captures(tmp_path_factory: pytest.TempPathFactory) -> tuple[Conclusions, bool]:
    folder = tmp_path_factory.mktemp("captures")
    captured(folder / "in", TOPK)
    return attack_captures(
        folder / "in", folder / "out", adversaries=ATTACKS, candidates=20, workers=1
    )


def test_rows_are_those_of_a_run(
    in_a_run: Conclusions, of_captures: tuple[Conclusions, bool]
) -> None:
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
    of_captures: tuple[Conclusions, bool],
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
    captured(tmp_path / "in", Method(name="none"), uploads=8)
    code, output, errors = command(
        *("attack", tmp_path / "in", "--out", tmp_path / "out", "--workers", 1),
        *("--adversary", "LinearLeakage", "--adversary", "PriorGuess"),
    )
    assert code == 0, errors
    assert "Evaluation: YES, with caveats (power)" in output  # eight uploads are few
    page = (tmp_path / "out/report.html").read_text()
    assert "LinearLeakage" in page
    assert "gallery" in page


def test_a_list_of_options_stands_for_one_attack_each(tmp_path: Path, command: Command) -> None:
    captured(tmp_path / "in", Method(name="none"))
    code, _, errors = command(
        *("attack", tmp_path / "in", "--out", tmp_path / "out", "--workers", 1),
        *("--adversary", "{name: InvertingGradients, iterations: [2, 3]}"),
    )
    assert code in (0, 1), errors  # so short a search need not find anybody
    found = Store(tmp_path / "out").results().rates()["adversary"]
    assert found.tolist() == [f"InvertingGradients(iterations={n})" for n in (2, 3)]


def test_without_the_truth_nothing_is_claimed(tmp_path: Path, command: Command) -> None:
    captured(tmp_path / "in", Method(name="none"), truth=False, known=False)
    code, output, errors = command(
        *("attack", tmp_path / "in", "--out", tmp_path / "out", "--workers", 1),
        *("--adversary", "LinearLeakage", "--adversary", "PriorAware"),
        *("--adversary", "{name: InvertingGradients, iterations: 20}"),
    )
    assert code == 0, errors
    assert "No success rate is reported" in output
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


FACTORY = """
from torch import nn

def net(space):
    pixels = space.shape[0] * space.shape[1] * space.shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 12), nn.ReLU(), nn.Linear(12, 10))
"""
WORLD = load_world(SCENARIO)


def own_loop(
    folder: Path,
    steps: int,
    *,
    model: Method = MODEL,
    size: int = 2,
    first: int = 0,
    training: int = 0,
    rounds: bool = False,
    labels: bool = False,
    client: str = "",
    defense: Method | None = NONE,
) -> Path:
    """Capture the steps of a training loop, each on its own pictures, as the guide does.

    Args:
        folder: Where captures go.
        steps: How many steps.
        model: Which model.
        size: Pictures of a step.
        first: The first step's pictures are the data's from there on.
        training: Steps before, which change the weights.
        rounds: Whether descriptions say the round.
        labels: Whether descriptions tell the labels.
        client: Whose they are.
        defense: The defense, if it is stated.
    """
    net: nn.Module | None = None
    for step in range(-training, steps):
        start = first + size * step if step >= 0 else 0
        images, targets = WORLD.train.at(slice(start, start + size))
        about = Description.model_validate(
            {
                "model": model,
                "space": WORLD.space,
                "batch_size": size,
                "dataset": "digits",
                "defense": defense,
                "round": step if rounds else 0,
                "labels": targets.tolist() if labels else None,
                "client": client,
            }
        )
        net = net or about.build()
        net.zero_grad()
        keep = (
            capture(net, folder / f"step-{step}", about, truth=(images, targets))
            if step >= 0
            else nullcontext()
        )
        with keep:
            cross_entropy(net(images), targets).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    return folder


def attacked(folder: Path) -> Conclusions:
    attacks = [Method(name="PriorGuess"), Method(name="LinearLeakage")]
    results, scored = attack_captures(
        folder / "in",
        folder / "out",
        adversaries=attacks,
        candidates=20,
        workers=1,
        trust_code=True,
    )
    assert scored
    assert set(results.cells["status"]) == {"ok"}
    return results


def counted(results: Conclusions) -> dict[str, tuple[int, int]]:
    """Return uploads and victims of every scenario, round and defense, and check all tables."""
    found = {}
    for row in results.rates().itertuples():
        if row.adversary != "LinearLeakage" or not row.observations:
            continue
        place = f"{row.scenario}, {row.checkpoint}, {row.defense}"
        found[place] = row.observations, row.victims
        worst = results.worst_case().set_index(["scenario", "checkpoint", "defense"])
        worst = worst.loc[(row.scenario, row.checkpoint, row.defense)]
        assert worst["observations"] == row.observations
        assert worst["rate"] == pytest.approx(row.found / row.victims)
        matrix = victim_matrix(results, row.scenario, row.checkpoint)[row.defense].dropna()
        assert len(matrix) == row.victims
        assert matrix.sum() == row.found
    keys = ["scenario", "checkpoint", "defense", "adversary", "knows_defense"]
    assert not results.attacks.duplicated([*keys, "seed", "observation", "victim"]).any()
    return found


SMALL = "digits/mlp(width=16)"


def test_steps_of_an_own_model_are_uploads_of_one_scenario(tmp_path: Path) -> None:
    """Every capture takes its own copy of the factory along."""
    (tmp_path / "net.py").write_text(FACTORY)
    own = Method(name=f"{tmp_path / 'net.py'}:net")
    own_loop(tmp_path / "in", 3, model=own)
    results = attacked(tmp_path)
    assert counted(results) == {"digits/net/batch 2, 0, none": (3, 6)}
    assert len(results.cells) == 2
    rates = results.rates().set_index("adversary")
    assert rates.loc["LinearLeakage", "counterfactual"] < 0.5  # of another step
    gallery = make_gallery(results, "digits/net/batch 2", 0)
    assert gallery is not None
    truth = gallery.references[0].tiles
    assert len({tile.source for tile in truth}) == 6


def test_captures_that_differ_are_counted_apart(tmp_path: Path) -> None:
    batch = f"{SMALL}/batch 2"
    own_loop(tmp_path / "in/a", 3)
    own_loop(tmp_path / "in/b", 2, client="b", first=20)  # another client
    own_loop(tmp_path / "in/c", 2, training=3, first=40)  # other weights
    own_loop(tmp_path / "in/d", 3, rounds=True, first=60)  # another round from the second on
    own_loop(tmp_path / "in/e", 2, size=1, first=80)  # other batch size
    own_loop(tmp_path / "in/f", 2, labels=True, first=100)  # labels known
    own_loop(tmp_path / "in/g", 2)  # the same pictures and weights again: uploads of their own
    (tmp_path / "net.py").write_text(FACTORY)
    own_loop(tmp_path / "in/h", 2, model=Method(name=f"{tmp_path / 'net.py'}:net"))
    assert counted(attacked(tmp_path)) == {
        f"{batch}, 0, none": (3 + 2 + 2 + 1 + 2, 20),
        f"{batch}, 1, none": (1, 2),
        f"{batch}, 2, none": (1, 2),
        f"{SMALL}, 0, none": (2, 2),
        f"{batch}/labels known, 0, none": (2, 4),
        "digits/net/batch 2, 0, none": (2, 4),
    }


def test_defenses_are_paired_on_the_same_victims_and_control(tmp_path: Path) -> None:
    own_loop(tmp_path / "in/none", 2)
    own_loop(tmp_path / "in/none-too", 1, first=30)
    own_loop(tmp_path / "in/topk", 2, defense=TOPK)  # of the same pictures and weights
    own_loop(tmp_path / "in/other", 3, defense=NOISE, first=50)
    own_loop(tmp_path / "in/unknown", 2, defense=None, first=70)
    results = attacked(tmp_path)
    place = f"{SMALL}/batch 2"
    assert counted(results) == {
        f"{place}, 0, none": (2 + 1 + 3 + 2, 16),  # captured, and made of what others hold
        f"{place}, 0, TopK(ratio=0.3)": (2, 4),
        f"{place}, 0, Noise(scale=0.1)": (3, 6),
        f"{place}, 0, not stated": (2, 4),
    }
    matrix = victim_matrix(results, place, 0)
    both = matrix[["none", "TopK(ratio=0.3)"]].dropna()
    assert len(both) == 4
    assert len(matrix[["TopK(ratio=0.3)", "Noise(scale=0.1)"]].dropna()) == 0
    gallery = make_gallery(results, place, 0)
    assert gallery is not None
    assert all(any(tile.source for tile in strip.tiles) for strip in gallery.worst)


def test_galleries_without_truth_show_every_upload(tmp_path: Path, command: Command) -> None:
    for client in ("a", "b"):
        own_loop(tmp_path / f"in/{client}/loop", 2)
    for path in (tmp_path / "in").rglob("truth.safetensors"):
        path.unlink()
    code, _, errors = command(
        *("attack", tmp_path / "in", "--out", tmp_path / "out", "--workers", 1),
        *("--adversary", "LinearLeakage"),
    )
    assert code == 0, errors
    page = (tmp_path / "out/gallery.html").read_text()
    for client in ("a", "b"):
        for step in range(2):
            assert f"in/{client}/loop/step-{step}" in page


def test_attacks_that_send_models_are_refused(tmp_path: Path) -> None:
    captured(tmp_path / "in", Method(name="none"))
    with pytest.raises(UserError, match="sends its own models"):
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
