from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from leakfrontier.adversaries import PANEL, FedAvg, FedSGD, PriorGuess
from leakfrontier.defenses import DPSGD, Chain, TopK
from leakfrontier.evaluate.run.cells import AttackTrial, TrainTrial
from leakfrontier.evaluate.run.run import load_config
from leakfrontier.evaluate.users.methods import (
    Method,
    adversary_grid,
    build_adversary,
    build_defense,
    build_protocol,
    defense_grid,
)
from leakfrontier.evaluate.users.names import label
from leakfrontier.evaluate.world.scenario import Scenario, Training

UserFile = Callable[..., Path]

DEFENSE = """
@dataclass
class Mine(Defense):
    scale: float = 1.0

    @property
    def strength(self) -> float:
        return 1.0
"""

TRAINING = Training(rounds=4, clients=10, clients_per_round=2, batch_size=32)
SCENARIO = Scenario(dataset="digits", checkpoints=(0, 2), training=TRAINING)
TRAIN = TrainTrial(SCENARIO, Method(name="none"), seed=0)
ATTACK = AttackTrial(
    SCENARIO,
    Method(name="none"),
    Method(name="PriorGuess"),
    knows_defense=True,
    seed=0,
    checkpoint=0,
    observations=(0, 1, 2),
)


@pytest.mark.parametrize(
    "written",
    [
        {"name": "TopK", "ratio": 0.1},
        {"name": "TopK", "options": {"ratio": 0.1}},
    ],
)
def test_options_stand_beside_the_name_or_apart(written: dict[str, Any]) -> None:
    assert Method.model_validate(written) == Method(name="TopK", options={"ratio": 0.1})


def test_a_name_alone() -> None:
    assert Method.model_validate("none") == Method(name="none")


@pytest.mark.parametrize("written", [None, 3, ["TopK"], {}, {"ratio": 0.1}])
def test_what_has_no_name_is_refused(written: object) -> None:
    with pytest.raises(ValidationError, match="expected a name, or a mapping with the key 'name'"):
        Method.model_validate(written)


def test_options_must_be_plain_values() -> None:
    with pytest.raises(ValidationError, match="JSON value"):
        Method.model_validate({"name": "TopK", "ratio": object()})


def test_grid_is_every_combination_of_lists() -> None:
    method = Method(name="DPSGD", options={"noise_multiplier": [0, 1], "max_grad_norm": [2, 3]})
    options = [
        (m.options["noise_multiplier"], m.options["max_grad_norm"]) for m in defense_grid([method])
    ]
    assert options == [(0, 2), (0, 3), (1, 2), (1, 3)]
    assert {m.name for m in defense_grid([method])} == {"DPSGD"}


def test_lists_of_options_become_defenses_and_each_is_tried() -> None:
    several = Method(name="TopK", options={"ratio": [0.1, 0.5]})
    found = defense_grid([Method(name="none"), several])
    assert [label(one) for one in found] == ["none", "TopK(ratio=0.1)", "TopK(ratio=0.5)"]
    with pytest.raises(ValueError, match=r"ratio must be in \(0, 1\]"):
        defense_grid([Method(name="TopK", options={"ratio": [0.1, 2.0]})])


def test_grid_without_lists_is_the_method_itself() -> None:
    for method in (Method(name="none"), Method(name="TopK", options={"ratio": 0.1})):
        assert defense_grid([method]) == [method]


def test_adversaries_have_grids_as_defenses_have(user_file: UserFile) -> None:
    search = Method(name="InvertingGradients", options={"iterations": [300, 24000], "lr": 0.1})
    found = adversary_grid([Method(name="PriorGuess"), search])
    assert [one.options.get("iterations") for one in found] == [None, 300, 24000]
    assert [one.options.get("lr") for one in found] == [None, 0.1, 0.1]
    several = [[4, 5], [6]]
    for given, taken in (([4, 5], [[4, 5]]), (several, several)):  # an option that is a list itself
        one = Method(name="LAMP", options={"lengths": given})
        assert [method.options["lengths"] for method in adversary_grid([one])] == taken
    with pytest.raises(ValueError, match="a list of values must not be empty"):
        adversary_grid([Method(name="InvertingGradients", options={"iterations": []})])
    with pytest.raises(ValueError, match="iterations must"):
        adversary_grid([Method(name="InvertingGradients", options={"iterations": [300, -1]})])


SEVERAL = """
Pair = tuple[int, int]

@dataclass
class Several(Defense):
    sizes: Pair = (1, 2)
    kinds: list[str] | None = None
    scale: float = 1.0
"""


def test_options_of_defenses_that_are_lists_themselves_are_not_split(user_file: UserFile) -> None:
    name = f"{user_file(SEVERAL)}:Several"
    options = {"sizes": [3, 4], "kinds": ["a", "b"], "scale": [1.0, 2.0]}
    found = defense_grid([Method(name=name, options=options)])
    assert [one.options for one in found] == [options | {"scale": scale} for scale in (1.0, 2.0)]
    chain = Method.model_validate({"name": "Chain", "links": [{"name": name, "sizes": [3, 4]}]})
    assert defense_grid([chain]) == [chain]
    normalised = Method(name="ATS", options={"policy": "3-1-7", "mean": [0.5, 0.5, 0.5]})
    assert defense_grid([normalised]) == [normalised]


def test_grid_of_an_empty_list_is_refused() -> None:
    with pytest.raises(ValueError, match="TopK: a list of values must not be empty"):
        defense_grid([Method(name="TopK", options={"ratio": [], "error_feedback": True})])


def test_builds_what_is_registered() -> None:
    topk = build_defense(Method(name="TopK", options={"ratio": 0.1}))
    assert isinstance(topk, TopK)
    assert topk.ratio == 0.1
    dpsgd = build_defense(Method(name="DPSGD", options={"noise_multiplier": 2}))
    assert dpsgd == DPSGD(noise_multiplier=2)
    assert build_adversary(Method(name="PriorGuess")) == PriorGuess()
    assert build_protocol(Method(name="FedSGD")) == FedSGD()
    assert build_protocol(Method(name="FedAvg", options={"epochs": 3})) == FedAvg(epochs=3)


def test_the_panel_is_rebuilt_with_all_its_hyper_parameters() -> None:
    members = load_config({"scenarios": ["digits/mlp"], "defenses": ["none"]}).members()
    assert [build_adversary(member) for member in members] == list(PANEL.members.values())


@pytest.mark.parametrize(
    ("build", "method", "message"),
    [
        (
            build_defense,
            "Nope",
            "unknown defense 'Nope': choose one of none, DPSGD, .*TopK, .*or name",
        ),
        (build_adversary, "TopK", "unknown adversary 'TopK': choose one of PriorGuess, Linear"),
        (build_protocol, "FedProx", "unknown protocol 'FedProx': choose one of FedSGD, FedAvg"),
        (build_defense, {"name": "TopK", "k": 1}, "TopK has no option 'k'; its options are ratio,"),
        (build_defense, {"name": "none", "k": 1}, "no option 'k'; its options are none"),
        (build_defense, "DPSGD", "defense DPSGD: .* missing .* 'noise_multiplier'"),
        (
            build_defense,
            {"name": "TopK", "ratio": "a"},
            "defense TopK: cannot be built with .*'str'",
        ),
        (build_defense, {"name": "TopK", "ratio": 1.1}, r"^ratio must be in \(0, 1\], got 1.1"),
        (build_protocol, {"name": "FedAvg", "lr": 0}, "^lr must be positive and finite, got 0"),
        (build_defense, "math:sqrt", "math:sqrt must be a subclass of Defense"),
        (build_defense, "no_such_module:Mine", "cannot import no_such_module"),
    ],
)
def test_what_cannot_be_built(
    build: Callable[[Method], object], method: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(Method.model_validate(method))


def test_a_class_of_the_users(user_file: UserFile) -> None:
    file = user_file(DEFENSE)
    built = build_defense(Method(name=f"{file}:Mine", options={"scale": 2.5}))
    assert repr(built) == "Mine(scale=2.5)"
    with pytest.raises(ValueError, match="has no option 'scales'; its options are scale"):
        build_defense(Method(name=f"{file}:Mine", options={"scales": 2.5}))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("class Mine(Defense:\n", r"mine.py fails when it is loaded: SyntaxError: .*line \d+"),
        ("import no_such_module\n", "fails when it is loaded: ModuleNotFoundError: .*no_such_mod"),
        ("raise SystemExit(0)\n", "fails when it is loaded: SystemExit: 0"),
        ("class Yours(Defense): pass\n", "mine.py has no 'Mine'; it defines Yours"),
        ("class Mine: pass\n", "mine.py:Mine must be a subclass of Defense, got <class"),
        ("Mine = Defense()\n", r"mine.py:Mine must be a subclass of Defense, got Defense\(\)"),
        (
            "@dataclass\nclass Mine(Defense):\n    def __post_init__(self): 1 / 0\n",
            "mine.py:Mine: ZeroDivisionError: division by zero",
        ),
    ],
)
def test_a_faulty_class_of_the_users(user_file: UserFile, code: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_defense(Method(name=f"{user_file(code)}:Mine"))


def test_an_adversary_must_reconstruct(user_file: UserFile) -> None:
    file = user_file("@dataclass(frozen=True)\nclass Mine(Adversary):\n    pass\n")
    with pytest.raises(ValueError, match=r"Mine: cannot be built .*abstract.*reconstruct"):
        build_adversary(Method(name=f"{file}:Mine"))


def test_an_edit_of_the_same_length_within_a_second_counts(user_file: UserFile) -> None:
    file = user_file(DEFENSE)
    method = Method(name=f"{file}:Mine")
    assert build_defense(method).strength == 1.0
    assert type(build_defense(method)) is type(build_defense(method))
    time = file.stat().st_mtime_ns
    user_file(DEFENSE.replace("return 1.0", "return 2.0"))
    os.utime(file, ns=(time, time))
    assert build_defense(method).strength == 2.0


def test_config_holds_the_content_of_a_users_file(user_file: UserFile) -> None:
    method = Method(name=f"{user_file(DEFENSE)}:Mine")
    before = method.config()
    assert method.config() == before
    user_file(DEFENSE + "# a comment\n")
    assert method.config() != before
    user_file(DEFENSE)
    assert method.config() == before
    assert "source" not in Method(name="TopK", options={"ratio": 0.1}).config()


FACTORY = """
def factory(space):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
"""
GUESS = """
@dataclass(frozen=True)
class Guess(PriorGuess):
    pass
"""


def test_an_edited_file_changes_the_keys_of_its_own_cells_only(user_file: UserFile) -> None:
    files = {
        "defense": f"{user_file(DEFENSE, 'defense')}:Mine",
        "adversary": f"{user_file(GUESS, 'adversary')}:Guess",
        "model": f"{user_file(FACTORY, 'model')}:factory",
    }
    theirs = SCENARIO.model_copy(update={"model": Method(name=files["model"])})

    def keys() -> dict[str, str]:
        trials = {
            "train": TRAIN,
            "attack": ATTACK,
            "train defense": replace(TRAIN, defense=Method(name=files["defense"])),
            "attack defense": replace(ATTACK, defense=Method(name=files["defense"])),
            "attack adversary": replace(ATTACK, adversary=Method(name=files["adversary"])),
            "train model": replace(TRAIN, scenario=theirs),
            "attack model": replace(ATTACK, scenario=theirs),
        }
        return {name: replace(trial).cell.key for name, trial in trials.items()}

    for part, code in {"defense": DEFENSE, "adversary": GUESS, "model": FACTORY}.items():
        before = keys()
        user_file(code + "# edited\n", part)
        after = keys()
        changed = {name for name in before if before[name] != after[name]}
        assert changed == {name for name in before if name.endswith(f" {part}")}


@pytest.mark.parametrize(
    "change",
    [
        {"scenario": SCENARIO.model_copy(update={"batch_size": 2})},
        {"scenario": SCENARIO.model_copy(update={"knows_targets": True})},
        {"scenario": SCENARIO.model_copy(update={"public_data": False})},
        {"scenario": SCENARIO.model_copy(update={"candidates": 5})},
        {"scenario": SCENARIO.model_copy(update={"dataset": "fashion-mini"})},
        {"scenario": SCENARIO.model_copy(update={"model": Method(name="lenet")})},
        {"scenario": SCENARIO.model_copy(update={"protocol": Method(name="FedAvg")})},
        {"defense": Method(name="TopK", options={"ratio": 0.1})},
        {"adversary": Method(name="LinearLeakage")},
        {"knows_defense": False},
        {"seed": 1},
        {"checkpoint": 2},
        {"observations": (0, 1)},
        {"pictures": 0},
    ],
    ids=str,
)
def test_the_key_depends_on_everything_that_the_outcome_does(change: dict[str, Any]) -> None:
    assert replace(ATTACK, **change).cell.key != ATTACK.cell.key
    assert replace(ATTACK).cell.key == ATTACK.cell.key


def test_the_key_does_not_depend_on_what_reports_call_it() -> None:
    titled = SCENARIO.model_copy(update={"title": "mine"})
    for trial in (TRAIN, ATTACK):
        assert replace(trial, scenario=titled).cell.key == trial.cell.key
        assert replace(trial, scenario=titled).cell.labels["scenario"] == "mine"


def test_only_attacks_on_trained_models_depend_on_training() -> None:
    longer = SCENARIO.model_copy(update={"training": TRAINING.model_copy(update={"rounds": 5})})
    trained = replace(ATTACK, checkpoint=2)
    assert replace(ATTACK, scenario=longer).cell.key == ATTACK.cell.key
    assert replace(trained, scenario=longer).cell.key != trained.cell.key
    assert replace(TRAIN, scenario=longer).cell.key != TRAIN.cell.key


def test_a_chain_is_built_from_its_links_with_their_grids() -> None:
    method = Method.model_validate(
        {
            "name": "Chain",
            "links": [
                {"name": "DPSGD", "noise_multiplier": [0.5, 1.0]},
                {"name": "TopK", "ratio": 0.1},
            ],
        }
    )
    weak, strong = defense_grid([method])
    assert label(strong) == "DPSGD(noise_multiplier=1.0) then TopK(ratio=0.1)"
    assert build_defense(strong) == Chain((DPSGD(1.0), TopK(0.1)))
    assert weak.config() != strong.config()
    with pytest.raises(ValueError, match="only a Chain has links, got TopK"):
        build_defense(Method.model_validate({"name": "TopK", "links": ["none"]}))
    with pytest.raises(ValueError, match="Chain has no option 'ratio'"):
        build_defense(Method.model_validate({"name": "Chain", "ratio": 1, "links": []}))
