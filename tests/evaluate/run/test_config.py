from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from leakfrontier.adversaries import PANEL
from leakfrontier.evaluate.run.cells import AttackTrial, ReplayTrial, TrainTrial
from leakfrontier.evaluate.run.config import PRESETS, ConfigError, RunConfig, load_config
from leakfrontier.evaluate.run.run import plan
from leakfrontier.evaluate.world.scenario import SCENARIOS

Config = dict[str, Any]


def scenario(**change: object) -> Callable[[Config], Config]:
    return lambda tiny: {**tiny, "scenarios": [{**tiny["scenarios"][0], **change}]}


def config(**change: object) -> Callable[[Config], Config]:
    return lambda tiny: {**tiny, **change}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_use_the_panel(name: str) -> None:
    loaded = load_config(name)
    budget = ", published budgets" if name == "full" else ""
    assert loaded.panel == PANEL.version + budget
    cells = [trial.cell.key for trial in plan(loaded.model_copy(update={"seeds": 1}))]
    assert len(set(cells)) == len(cells) > 20


@pytest.mark.parametrize("name", SCENARIOS)
def test_named_scenarios_go_by_their_names(name: str) -> None:
    assert SCENARIOS[name].name == name
    assert load_config({"scenarios": [name], "defenses": ["none"]}).scenarios == (SCENARIOS[name],)


def test_a_file_a_mapping_and_a_stored_configuration_are_the_same(
    tmp_path: Path, tiny: Config
) -> None:
    tiny["defenses"] = ["none", {"name": "TopK", "ratio": [0.1, 0.5]}]
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(tiny))
    loaded = load_config(file)
    assert loaded == load_config(str(file)) == load_config(tiny)
    assert [m.options.get("ratio") for m in loaded.defenses] == [None, 0.1, 0.5]
    assert RunConfig.model_validate_json(loaded.model_dump_json()) == loaded
    assert loaded.panel == f"custom ({PANEL.version})"


def test_more_defenses_come_after_those_of_the_file(tiny: Config) -> None:
    more = [{"name": "TopK", "ratio": [0.1, 0.2]}]
    names = [m.name for m in load_config(tiny, extra_defenses=more).defenses]
    assert names == ["none", "TopK", "TopK"]
    del tiny["defenses"]
    assert [m.name for m in load_config(tiny, extra_defenses=["none"]).defenses] == ["none"]


def test_the_plan_attacks_what_it_trains(tiny: Config) -> None:
    tiny["scenarios"][0]["checkpoints"] = [0, 2]
    tiny["defenses"] = ["none", {"name": "TopK", "ratio": 0.1}]
    tiny["adversaries"] = ["PriorGuess", {"name": "InvertingGradients", "iterations": 5}]
    tiny["seeds"] = 2
    trials = plan(load_config(tiny))
    replays = [trial for trial in trials if isinstance(trial, ReplayTrial)]
    training = [trial for trial in trials if isinstance(trial, TrainTrial)]
    attacks = [trial for trial in trials if isinstance(trial, AttackTrial)]
    assert [trial.defense.name for trial in replays] == ["TopK"]
    assert len(training) == 4
    assert trials == replays + training + attacks  # attacks on checkpoints need training
    knowledge = {}
    for trial in attacks:
        place = (trial.seed, trial.checkpoint, trial.defense.name, trial.adversary.name)
        knowledge.setdefault(place, []).append(trial.knows_defense)
    assert len(knowledge) == 2 * 2 * 2 * 2
    for (*_, defense, adversary), known in knowledge.items():
        both = defense == "TopK" and adversary == "InvertingGradients"
        assert known == ([True, False] if both else [True])


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        # Unknown names: the known ones are listed.
        (
            config(defenses=["Nope"]),
            ["unknown defense 'Nope'", "none, DPSGD, ", ", Chain"],
        ),
        (config(adversaries=["Nope"]), ["unknown adversary 'Nope'", "PriorGuess, LinearLeakage"]),
        (config(adversaries="panle"), ["must be 'panel', got 'panle'"]),
        (config(scenarios=["nope"]), ["unknown scenario 'nope'", ", ".join(SCENARIOS)]),
        (scenario(protocol="FedNope"), ["scenarios.0.protocol", "choose one of FedSGD, FedAvg"]),
        # Unknown keys: the known ones are listed.
        (
            config(defences=[]),
            ["unknown key 'defences'", "scenarios, defenses, adversaries, budget, seeds"],
        ),
        (config(**{"3": 4}), ["unknown key '3'"]),
        (scenario(datset="digits"), ["scenarios.0: unknown key 'datset'", "title, dataset, data"]),
        (
            scenario(training={"round": 3}),
            ["scenarios.0.training: unknown key 'round'", "rounds, clients, small_clients"],
        ),
        (
            config(defenses=[{"name": "TopK", "ratoi": 0.1}]),
            ["TopK has no option 'ratoi'", "ratio, error_feedback"],
        ),
        (
            scenario(protocol={"name": "FedAvg", "epoch": 1}),
            ["FedAvg has no option 'epoch'", "epochs, batch_size, lr"],
        ),
        # Values out of range.
        (
            config(defenses=[{"name": "DPSGD", "noise_multiplier": -0.1}]),
            ["noise_multiplier must be in [0, inf), got -0.1"],
        ),
        (
            config(defenses=[{"name": "DPSGD", "noise_multiplier": float("nan")}]),
            ["noise_multiplier must be in [0, inf), got nan"],
        ),
        (
            config(defenses=["none", {"name": "TopK", "ratio": [0.5, 1.1]}]),
            ["ratio must be in (0, 1], got 1.1"],
        ),
        (config(defenses=[{"name": "TopK", "ratio": []}]), ["TopK", "must not be empty"]),
        (
            config(adversaries=[{"name": "InvertingGradients", "iterations": 0}]),
            ["iterations must be at least 1, got 0"],
        ),
        (config(seeds=0), ["seeds: ", "at least 1, got 0"]),
        (config(observations=1.5), ["observations: ", "whole number", "got 1.5"]),
        # Python takes true for 1.
        (config(observations=True), ["observations: ", "whole number, got True"]),
        (config(seeds=True), ["seeds: ", "whole number, got True"]),
        (config(time_limit=True), ["time_limit: ", "number, got True"]),
        (scenario(batch_size=True), ["scenarios.0.batch_size: ", "whole number, got True"]),
        (scenario(checkpoints=[True]), ["scenarios.0.checkpoints.0: ", "whole number, got True"]),
        (scenario(training={"rounds": True}), ["training.rounds: ", "whole number, got True"]),
        (scenario(training={"lr": True}), ["training.lr: ", "number, got True"]),
        (config(defenses=[{"name": "TopK", "ratio": True}]), ["ratio must be a number, got true"]),
        (
            config(defenses=[{"name": "Noise", "scale": 1, "max_norm": True}]),
            ["max_norm must be a number, got true"],
        ),
        (config(seeds=10**9), ["seeds: ", "at most 10000"]),
        (config(time_limit=0), ["time_limit: ", "above 0, got 0"]),
        (config(time_limit=float("nan")), ["time_limit: ", "above 0, got nan"]),
        (scenario(batch_size=0), ["scenarios.0.batch_size: ", "got 0"]),
        (scenario(candidates=1), ["scenarios.0.candidates: ", "at least 2, got 1"]),
        (scenario(checkpoints=[5]), ["checkpoints must be rounds in [0, 4], got [5]"]),
        (scenario(checkpoints=[-1]), ["checkpoints must be rounds in [0, 4], got [-1]"]),
        (scenario(checkpoints=[]), ["checkpoints must be rounds in [0, 4], got []"]),
        (scenario(training={"lr": float("inf")}), ["scenarios.0.training.lr: ", "got inf"]),
        (scenario(training={"server": "lion"}), ["'sgd' or 'adam', got 'lion'"]),
        (scenario(training={"partition": "x"}), ["'iid', 'label-skew' or 'feature-skew'"]),
        (
            scenario(training={"clients": 2, "clients_per_round": 3}),
            ["clients_per_round must be at most clients = 2, got 3"],
        ),
        # Values of the wrong kind.
        (config(defenses="TopK"), ["defenses: must be a list, got 'TopK'"]),
        (config(defenses={"name": "TopK"}), ["defenses: must be a list, got {"]),
        (config(defenses=5), ["defenses: must be a list, got 5"]),
        (config(scenarios="digits/mlp"), ["scenarios: must be a list, got 'digits/mlp'"]),
        (config(scenarios=[3]), ["scenarios.0: ", "got 3"]),
        (config(defenses=[["TopK"]]), ["defenses.0: expected a name, or a mapping"]),
        (config(defenses=[{"ratio": 1}]), ["defenses.0: expected a name", "{'ratio': 1}"]),
        # Nothing to run, or two of one name.
        (config(defenses=[]), ["defenses must hold at least one"]),
        (config(defenses=None), ["defenses must hold at least one"]),
        (config(scenarios=[]), ["scenarios must hold at least one"]),
        (config(adversaries=[]), ["adversaries must hold at least one"]),
        (config(defenses=["Chain"]), ["a Chain must have links"]),
        (config(defenses=[{"name": "Chain", "links": []}]), ["a Chain must have links"]),
        (config(defenses=["none", "none"]), ["two defenses are called 'none'"]),
        (
            config(defenses=[{"name": "TopK", "ratio": [0.1, 0.1]}]),
            ["two defenses are called 'TopK(ratio=0.1)'"],
        ),
        (
            config(adversaries=["PriorGuess", "PriorGuess"]),
            ["two adversaries are called 'PriorGuess'"],
        ),
        (
            config(scenarios=["digits/mlp", "digits/mlp"]),
            ["two scenarios are called 'digits/mlp': give one a `title`"],
        ),
    ],
)
def test_what_cannot_be_run(
    tiny: Config, change: Callable[[Config], Config], messages: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(change(tiny))
    for message in messages:
        assert message in str(caught.value)


def test_what_is_missing_is_named(tiny: Config) -> None:
    del tiny["scenarios"]
    with pytest.raises(ConfigError, match=r"^scenarios: must be given$"):
        load_config(tiny)


def test_every_mistake_is_reported_once(tiny: Config) -> None:
    tiny["scenarios"][0] |= {"batch_size": 0}
    tiny |= {"seeds": 0, "defenses": ["Nope"]}
    with pytest.raises(ConfigError) as caught:
        load_config(tiny)
    places = [line.partition(": ")[0] for line in str(caught.value).splitlines()]
    assert places == ["scenarios.0.batch_size", "defenses", "seeds"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"scenarios: [a\ndefenses: }", r"is not valid YAML: .*line 2"),
        (b"scenarios: !!python/object/apply:os.getcwd []", "is not valid YAML: .*python/object"),
        (b"scenarios: [2020-13-01]", "is not valid YAML: month must be in 1..12"),
        (b"scenarios: \x00", "is not valid YAML"),
        (b"seeds: 1\nseeds: 2\n", "the key 'seeds' is given.*line 1.*and again.*line 2"),
        (b"- none\n- TopK\n", r"must hold a mapping with the keys \['scenarios', 'defenses'"),
        (b"", "must hold a mapping with the keys"),
        (bytes(range(128, 256)), "cannot read the configuration"),
    ],
)
def test_what_is_no_configuration_file(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"(?s)config.yaml.*{message}|{message}.*config.yaml"):
        load_config(file)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot read the configuration .*absent.yaml: .*No such"
    ):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_config(tmp_path)


def test_two_classes_of_one_name_are_refused(tiny: Config, user_file: Callable[..., Path]) -> None:
    files = [user_file("class Mine(Defense): pass\n", name) for name in ("a", "b")]
    with pytest.raises(ConfigError, match="two defenses are called 'Mine'"):
        load_config(tiny, extra_defenses=[f"{file}:Mine" for file in files])


def test_paths_are_relative_to_the_file_that_names_them(
    tmp_path: Path, tiny: Config, user_file: Callable[..., Path]
) -> None:
    folder = tmp_path / "configs"
    (folder / "images").mkdir(parents=True)
    there = user_file("class Mine(Defense): pass\n", "mine").rename(folder / "mine.py")
    tiny["scenarios"][0] |= {"dataset": "images", "data_folder": "downloads"}
    tiny["defenses"] = [
        "none",
        "mine.py:Mine",
        {"name": "Chain", "links": ["./mine.py:Mine", {"name": "TopK", "ratio": 0.1}]},
    ]
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(tiny))
    loaded = load_config(file)
    (one,) = loaded.scenarios
    assert one.dataset == str(folder / "images")
    assert one.data_folder == folder / "downloads"
    assert loaded.defenses[1].name == loaded.defenses[2].links[0].name == f"{there}:Mine"


def test_paths_on_the_command_line_are_relative_to_the_current_folder(
    tmp_path: Path, tiny: Config, user_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    user_file("class Mine(Defense): pass\n", "mine")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "run.yaml").write_text(yaml.safe_dump(tiny))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for spec in ("mine.py:Mine", "~/mine.py:Mine", f"{tmp_path}/mine.py:Mine"):
        loaded = load_config("configs/run.yaml", extra_defenses=[spec])
        configured = loaded.defenses[-1].config()
        assert configured["name"] == "mine.py:Mine"  # wherever it is
    with pytest.raises(ConfigError, match=r"there is no file .*configs/mine.py"):
        load_config(Path("configs/run.yaml").rename("run.yaml"), ["configs/mine.py:Mine"])


def test_a_results_key_does_not_depend_on_where_files_are(
    tmp_path: Path, tiny: Config, user_file: Callable[..., Path]
) -> None:
    file = user_file("class Mine(Defense): pass\n", "mine")
    keys = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        moved = tmp_path / name / "mine.py"
        moved.write_bytes(file.read_bytes())
        keys.append([t.cell.key for t in plan(load_config(tiny | {"defenses": [f"{moved}:Mine"]}))])
    assert keys[0] == keys[1]


def test_a_longer_search_is_one_line() -> None:
    line = "adversaries: [PriorGuess, {name: InvertingGradients, iterations: [300, 24000]}]"
    config = load_config(
        {"scenarios": ["fashion-mini/mlp"], "defenses": ["none"], **yaml.safe_load(line)}
    )
    assert [(one.name, one.options.get("iterations")) for one in config.members()] == [
        ("PriorGuess", None),
        ("InvertingGradients", 300),
        ("InvertingGradients", 24000),
    ]
    twice = {"name": "InvertingGradients", "iterations": [7, 7]}
    with pytest.raises(ConfigError, match="two adversaries are called"):
        load_config(
            {"scenarios": ["fashion-mini/mlp"], "defenses": ["none"], "adversaries": [twice]}
        )


@pytest.mark.parametrize("place", ["./tinybert", "models/x", "/nowhere/x", "~/nowhere-x", "own/x"])
@pytest.mark.parametrize("key", ["model", "tokenizer"])
def test_a_missing_path_of_a_model_is_an_immediate_error(
    key: str, place: str, tmp_path: Path
) -> None:
    (tmp_path / "own").mkdir()
    given = {"model": {"name": "hf", "id": place}} if key == "model" else {key: place}
    scenario = {"dataset": "messages", "task": "next-token", **given}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"scenarios": [scenario], "defenses": ["none"]}))
    with pytest.raises(ConfigError, match=f"scenarios.0.{key}: there is no folder or file"):
        load_config(file)


def test_an_id_on_the_hub_stays_one(tmp_path: Path) -> None:
    scenario = {"dataset": "messages", "model": {"name": "hf", "id": "owner/name"}}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"scenarios": [scenario], "defenses": ["none"]}))
    assert load_config(file).scenarios[0].model.options["id"] == "owner/name"


def test_a_folder_of_data_is_for_scenarios_that_name_none(tmp_path: Path) -> None:
    named = {"dataset": "mnist", "data_folder": str(tmp_path / "own"), "title": "own"}
    config = load_config({"scenarios": [{"dataset": "mnist"}, named], "defenses": ["none"]})
    found = config.with_data(tmp_path).scenarios
    assert [one.data_folder for one in found] == [tmp_path, tmp_path / "own"]
    assert [one.config() for one in found] == [one.config() for one in config.scenarios]
