"""Every defense of the presets trains and can be attacked, in each protocol."""

import runpy
from pathlib import Path

import pytest

from leakfrontier.adversaries import Threat
from leakfrontier.evaluate.foundations.seeds import narrow_seeds
from leakfrontier.evaluate.foundations.statistics import clopper_pearson
from leakfrontier.evaluate.privacy.claims import training_plan
from leakfrontier.evaluate.run.cells import AttackTrial, TrainTrial
from leakfrontier.evaluate.run.config import PRESETS, ConfigError, load_config
from leakfrontier.evaluate.run.run import plan
from leakfrontier.evaluate.users.methods import Method, build_defense
from leakfrontier.evaluate.users.names import family
from leakfrontier.evaluate.world.scenario import SCENARIOS, Scenario, Training, load_world
from leakfrontier.evaluate.world.victims import other_cohort, other_examples

standard = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "standard.py"))

FIRST = {  # one setting of each kind: the rest differs in strength alone
    method.name: method for method in reversed(load_config("full").defenses)
}
PROTOCOLS = {
    "FedSGD": Method(name="FedSGD"),
    "FedAvg": Method(name="FedAvg", options={"epochs": 2, "batch_size": 2, "lr": 0.01}),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_the_attacked_upload_is_the_trained_one(preset: str) -> None:
    config = load_config(preset)
    for scenario in config.scenarios:
        assert other_examples(scenario) == ""
        defenses = config.defenses_of(scenario)
        assert {other_cohort(scenario, defense) for defense in defenses} == {""}


STANDARD = load_config("standard")


def test_the_standard_preset_varies_what_a_paper_should_report() -> None:
    scenarios = STANDARD.scenarios
    assert {one.model.name for one in scenarios} == {"mlp", "lenet", "cnn", "resnet18"}
    assert {one.batch_size for one in scenarios} == {1, 8}
    assert {one.protocol.name for one in scenarios} == {"FedSGD", "FedAvg"}
    assert {bool(round) for one in scenarios for round in one.checkpoints} == {False, True}
    assert {one.threat for one in scenarios} == {
        Threat.ARCHITECTURE
    }  # and all that comes before it
    for scenario in scenarios:
        families = {family(one) for one in STANDARD.defenses_of(scenario)}
        assert families == {"none", "DPSGD", "TopK", "Quantization", "ATS", "SecureAggregation"}


def test_no_success_in_the_standard_preset_means_at_most_five_percent() -> None:
    uploads = STANDARD.seeds * STANDARD.observations
    assert clopper_pearson(0, uploads).high <= 0.05 < clopper_pearson(0, uploads - 1).high


@pytest.mark.parametrize("scenario", STANDARD.scenarios, ids=lambda one: one.name)
def test_the_standard_noise_is_that_of_its_epsilons(scenario: Scenario) -> None:
    world = load_world(scenario)
    with narrow_seeds():  # as its packs were drawn, whose noise is frozen
        rounds = max(standard["busiest"](scenario, seed) for seed in range(STANDARD.seeds))
    schedule = training_plan(world, "record", rounds)
    found = {
        defense.options["noise_multiplier"]: build_defense(defense).guarantee(schedule)
        for defense in STANDARD.defenses_of(scenario)
        if defense.name == "DPSGD"
    }
    epsilons = [one.epsilon for sigma, one in found.items() if one is not None and sigma > 0.2]
    targets = (1, 3, 8) if len(epsilons) == 3 else (8,)
    assert epsilons == pytest.approx(targets, rel=0.01)
    assert all(have <= want for have, want in zip(epsilons, targets, strict=True))


def test_the_busiest_client_is_that_of_the_training(tmp_path: Path) -> None:
    scenario = Scenario(
        dataset="digits", training=Training(rounds=6, clients=5, clients_per_round=2, batch_size=1)
    )
    private = Method(name="DPSGD", options={"noise_multiplier": 1.0})
    (claimed,) = TrainTrial(scenario, private, seed=3).run(tmp_path).guarantees
    assert claimed.steps == standard["busiest"](scenario, 3)


def test_a_family_may_have_its_own_learning_rate(tmp_path: Path) -> None:
    plain, quick = (
        Scenario(dataset="digits", training=Training(rounds=2, clients=4, **rates))
        for rates in ({}, {"defense_lr": {"TopK": 0.5}})
    )
    assert "defense_lr" not in plain.config()["training"]
    topk = Method(name="TopK", options={"ratio": 0.5})
    assert quick.training.lr_under(topk) == 0.5
    assert quick.training.lr_under(Method(name="none")) == quick.training.lr
    single = Training(defense_lr={"TopK": 0.5, "TopK(ratio=0.5)": 0.25})
    assert single.lr_under(topk) == 0.25
    assert single.lr_under(Method(name="TopK", options={"ratio": 0.1})) == 0.5
    losses = [
        TrainTrial(scenario, topk, seed=0).run(tmp_path).utility[-1].loss
        for scenario in (plain, quick)
    ]
    assert losses[0] != pytest.approx(losses[1], rel=0.2)
    with pytest.raises(ConfigError, match="the run has no defense 'TopK'"):
        load_config({"scenarios": [quick.model_dump(mode="json")], "defenses": ["none"]})


def test_a_scenario_may_have_defenses_of_its_own() -> None:
    content = {
        "scenarios": [
            {
                "title": "a",
                "dataset": "digits",
                "defenses": [{"name": "TopK", "ratio": [0.1, 0.2]}],
            },
            {"title": "b", "dataset": "digits"},
        ],
        "defenses": ["none"],
        "adversaries": ["PriorGuess"],
    }
    config = load_config(content)
    arms = [
        (trial.scenario.name, trial.defense.options.get("ratio"))
        for trial in plan(config)
        if isinstance(trial, TrainTrial)
    ]
    assert arms == [("a", None), ("a", 0.1), ("a", 0.2), ("b", None)]
    assert "defenses" not in config.scenarios[0].config()
    assert [one.name for one in config.of_scenarios(["b"]).scenarios] == ["b"]
    with pytest.raises(ConfigError, match="no scenario is called 'c': choose from a, b"):
        config.of_scenarios(["c"])
    content["defenses"] = ["none", {"name": "TopK", "ratio": 0.1}]
    with pytest.raises(ConfigError, match="two defenses are called"):
        load_config(content)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_by_default_the_attacked_upload_is_the_trained_one(batch_size: int) -> None:
    for scenario in (*SCENARIOS.values(), Scenario(training=Training(clients=3))):
        assert other_examples(scenario.model_copy(update={"batch_size": batch_size})) == ""
        assert scenario.training.clients_per_round == min(16, scenario.training.clients)


def test_an_upload_that_is_not_the_trained_one_is_told() -> None:
    scenario = Scenario(training=Training(clients_per_round=2, batch_size=16))
    eight = Method(name="SecureAggregation", options={"clients": 8})
    assert "sums of 8 clients, but a training round has 2" in other_cohort(scenario, eight)
    assert other_examples(scenario) == (
        "attacked uploads have 1 examples, trained ones 16: give both the same batch_size"
    )
    local = scenario.model_copy(update={"protocol": PROTOCOLS["FedAvg"], "batch_size": 8})
    assert "(8 and 100 local steps): use 100 as batch_size, or 250 as" in other_examples(local)
    clients = local.training.model_copy(update={"clients": 250})
    assert other_examples(local.model_copy(update={"training": clients})) == ""


SEARCH = Method(name="InvertingGradients", options={"iterations": 2})


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", FIRST)
def test_trains_and_is_attacked(name: str, protocol: str, tmp_path: Path) -> None:
    scenario = Scenario(
        dataset="digits",
        model=Method(name="lenet"),
        protocol=PROTOCOLS[protocol],
        batch_size=3,
        candidates=10,
        checkpoints=(0, 1),
        training=Training(rounds=1, clients=300, clients_per_round=8, batch_size=3),
    )
    trained = TrainTrial(scenario, FIRST[name], seed=0, logged=2).run(tmp_path)
    assert trained.utility[-1].total > 0
    for knows_defense, uploads in ((True, (0, 1)), (False, (0,))):
        trial = AttackTrial(
            scenario,
            FIRST[name],
            SEARCH,
            knows_defense,
            seed=0,
            checkpoint=1,
            observations=uploads,
            logged=2,
        )
        rows = trial.run(tmp_path).attacks
        assert {row.observation for row in rows} == {*uploads}
        assert all(row.identified is not None for row in rows)
