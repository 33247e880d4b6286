from pathlib import Path
from typing import Any

import pytest
import torch

from leakfrontier.defenses import ATS, Defense
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, Training, load_world

TOPK = Method(name="TopK", options={"ratio": 0.1})
DPSGD = Method(name="DPSGD", options={"noise_multiplier": 1.0})
BOTH = Method(name="Chain", links=(DPSGD, TOPK))


@pytest.mark.parametrize(
    ("change", "description"),
    [
        ({}, "fashion-mini/mlp"),
        ({"model": Method(name="lenet"), "dataset": "digits"}, "digits/lenet"),
        ({"batch_size": 8, "knows_targets": True}, "fashion-mini/mlp/batch 8/labels known"),
        (
            {"protocol": Method(name="FedAvg", options={"epochs": 2})},
            "fashion-mini/mlp/FedAvg(epochs=2)",
        ),
        ({"task": "next-token", "dataset": "messages"}, "messages/mlp/next-token"),
    ],
)
def test_a_scenario_is_described_by_what_is_not_default(
    change: dict[str, Any], description: str
) -> None:
    assert Scenario(**change).name == description
    titled = Scenario(**change, title="mine")
    assert (titled.name, titled.description) == ("mine", description)


def test_results_depend_on_the_experiment_and_not_on_how_it_is_shown_or_where() -> None:
    plain = Scenario().config()
    shown = Scenario(title="a", device="auto", data_folder=Path("there"), defenses=(TOPK,))
    assert shown.config() == plain
    for change in ({"batch_size": 2}, {"threat": "passive"}, {"training": Training(rounds=3)}):
        assert Scenario(**change).config() != plain


def test_data_in_a_folder_is_known_by_its_content(tmp_path: Path) -> None:
    configs = []
    for place in ("here", "there", "other"):
        folder = tmp_path / place / "texts"
        folder.mkdir(parents=True)
        text = "b" if place == "other" else "a"
        (folder / "train.jsonl").write_text(f'{{"text": "{text}", "label": "x"}}\n')
        scenario = Scenario(dataset=str(folder))
        assert scenario.data_name == "texts"
        configs.append(scenario.config())
    assert configs[0] == configs[1] != configs[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoints": (0, 151)}, r"checkpoints must be rounds in \[0, 150\], got \[0, 151\]"),
        ({"checkpoints": ()}, r"checkpoints must be rounds in \[0, 150\], got \[\]"),
        ({"task": "next-token", "knows_targets": True}, "the targets are the private text"),
        ({"protocol": Method(name="FedProx")}, "unknown protocol 'FedProx'"),
        ({"candidates": 1}, "candidates\n.* 2 "),
        ({"batchsize": 1}, "unknown key 'batchsize'; the keys are title, dataset"),
        ({"batch_size": True}, "batch_size\n"),
    ],
)
def test_bad_scenarios_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scenario(**change)


def test_no_more_clients_take_part_than_there_are() -> None:
    assert Training(clients=3).clients_per_round == 3
    assert Training(clients=300).clients_per_round == 16
    with pytest.raises(ValueError, match="clients_per_round must be at most clients = 3, got 4"):
        Training(clients=3, clients_per_round=4)


def test_the_learning_rate_of_a_defense_comes_before_that_of_its_family() -> None:
    training = Training(lr=0.1, defense_lr={"TopK": 0.2, "TopK(ratio=0.1)": 0.3})
    assert training.lr_under(Method(name="none")) == 0.1
    assert training.lr_under(Method(name="TopK", options={"ratio": 0.5})) == 0.2
    assert training.lr_under(TOPK) == 0.3


def test_by_default_clients_train_on_batches_of_the_attacked_size() -> None:
    def drawn(**options: object) -> set[int]:
        training = Training.model_validate({"clients": 5, **options})
        return {
            *load_world(Scenario(dataset="digits", batch_size=4, training=training)).drawn_sizes
        }

    assert drawn() == {4}
    assert drawn(batch_size=7) == {7}
    assert drawn(batch_size="all") == {287, 288}
    assert drawn(batch_size=20, small_clients={3: 2}) == {3, 20}


def test_clients_have_the_stated_sizes() -> None:
    training = Training(clients=10, small_clients={1: 3, 8: 2}, size_ratio=100)
    assert training.all_clients == training.participants == 15
    sizes = load_world(Scenario(dataset="digits", training=training)).share_sizes
    assert sizes[:5] == (1, 1, 1, 8, 8)
    assert sum(sizes) == len(load_world(Scenario(dataset="digits")).train.targets)
    assert [*sizes[5:]] == sorted(sizes[5:])
    assert 60 < sizes[-1] / sizes[5] < 140


def test_a_federation_is_described_in_words() -> None:
    assert Training(clients=10, clients_per_round=5, rounds=7).described() == (
        "10 clients share the data. 5 take part in each of 7 rounds. Uploads count equally."
    )
    unequal = Training(clients=3, small_clients={1: 2, 8: 4}, size_ratio=10, weighting="examples")
    assert unequal.described() == (
        "3 clients share the data, the largest 10 times as many as the smallest, beside 2 of 1 and "
        "4 of 8 examples each. 9 take part in each of 150 rounds. Uploads count by their examples."
    )


def test_wrong_federations_are_refused() -> None:
    with pytest.raises(ValueError, match="momentum needs server: sgd"):
        Training(momentum=0.9)
    with pytest.raises(ValueError, match="clients_per_round must be at most clients = 22"):
        Training(clients=20, small_clients={1: 2}, clients_per_round=23)
    with pytest.raises(ValueError, match="batch_size must be from 1"):
        Training(batch_size=0)
    many = Training(clients=10, small_clients={200: 8})
    with pytest.raises(ValueError, match="need 1610 examples, but digits has"):
        _ = load_world(Scenario(dataset="digits", training=many)).share_sizes


def test_newer_options_at_their_defaults_are_no_part_of_the_identity() -> None:
    assert "weighting" not in Scenario().config()["training"]
    assert Scenario(training=Training(weighting="examples")).config()["training"]["weighting"]


SMALL = Scenario(dataset="digits", model=Method(name="mlp", options={"width": 4}))


def test_every_defense_starts_from_the_same_model_and_another_seed_from_another() -> None:
    world = load_world(SMALL)
    first, again, other = (
        torch.cat([p.flatten() for p in world.model(Defense(), seed).parameters()])
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_defense_is_told_how_inputs_were_normalised() -> None:
    world = load_world(SMALL)
    told = world.defense(Method(name="ATS", options={"policy": "3"}))
    assert isinstance(told, ATS)
    assert told == ATS("3").for_space(world.space.mean, world.space.std)  # type: ignore[attr-defined]
    values = world.train_values
    assert 0 <= float(values.inputs.min()) < float(values.inputs.max()) <= 1


def test_the_threat_model_is_the_scenarios() -> None:
    world = load_world(SMALL.model_copy(update={"knows_targets": True}))
    threat = world.threat(knows_defense=True)
    assert (threat.knows_targets, threat.knows_defense) == (True, True)
    assert threat.public is not None
    assert torch.equal(threat.public.inputs, world.test.inputs)
    alone = load_world(SMALL.model_copy(update={"public_data": False})).threat(knows_defense=False)
    assert (alone.knows_targets, alone.knows_defense, alone.public) == (False, False, None)


def test_next_tokens_need_texts() -> None:
    with pytest.raises(ValueError, match="task: next-token needs texts, but digits holds none"):
        load_world(Scenario(dataset="digits", task="next-token"))


def test_validation_examples_are_held_by_no_client() -> None:
    whole, world = load_world(Scenario()), load_world(Scenario(validation=0.1))
    assert whole.validation is None
    assert world.validation is not None
    assert (len(world.train.targets), len(world.validation.targets)) == (1800, 200)
    together = torch.cat([world.train.inputs, world.validation.inputs]).flatten(1)
    assert torch.equal(
        together.sort(dim=0).values, whole.train.inputs.flatten(1).sort(dim=0).values
    )
    held = {row.numpy().tobytes() for row in world.train.inputs}
    kept = {row.numpy().tobytes() for row in world.validation.inputs}
    assert len(kept) >= 199  # hardly any picture occurs twice
    assert len(held & kept) <= 1
    assert torch.equal(world.test.inputs, whole.test.inputs)


def test_the_validation_part_depends_only_on_the_dataset() -> None:
    one = load_world(Scenario(validation=0.1)).validation
    other = load_world(Scenario(validation=0.1, model=Method(name="lenet"), batch_size=4))
    assert one is not None
    assert other.validation is not None
    assert torch.equal(one.inputs, other.validation.inputs)


def test_cells_keep_their_keys_without_validation() -> None:
    assert "validation" not in Scenario().config()
    assert Scenario(validation=0.1).config()["validation"] == 0.1
    with pytest.raises(ValueError, match="validation"):
        Scenario(validation=0.6)
