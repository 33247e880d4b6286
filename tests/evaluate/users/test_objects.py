"""Objects of a session, as a configuration holds them."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from leakfrontier.adversaries import DLG, FedAvg, ImageSpace
from leakfrontier.defenses import DPSGD, Chain, Defense, TopK, Update
from leakfrontier.evaluate.foundations.plugins import load_attribute
from leakfrontier.evaluate.run.code_digests import factories, source_digest
from leakfrontier.evaluate.users.methods import (
    Method,
    build_adversary,
    build_defense,
    build_protocol,
    defense_grid,
)
from leakfrontier.evaluate.users.names import label
from leakfrontier.evaluate.users.objects import given_model, in_configuration, methods_of


@dataclass
class Rounded(Defense):
    step: float = 0.01

    def on_update(self, update: Update, rng: Generator) -> Update:
        return {name: (value / self.step).round() * self.step for name, value in update.items()}


@dataclass
class Masked(Defense):
    mask: Tensor = field(default_factory=lambda: torch.ones(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)


def method(value: object) -> Method:
    (found,) = methods_of([value])
    return found


def test_objects_of_ours_are_named_with_what_differs_from_the_defaults() -> None:
    assert method(TopK(ratio=0.2)) == Method(name="TopK", options={"ratio": 0.2})
    assert method(Defense()) == Method(name="none")
    assert method(TopK) == Method(name="TopK")
    assert method(DLG(iterations=7)) == Method(name="DLG", options={"iterations": 7})
    assert method(FedAvg(epochs=2)) == Method(name="FedAvg", options={"epochs": 2})
    assert build_adversary(method(DLG(iterations=7))) == DLG(iterations=7)
    assert build_protocol(method(FedAvg(epochs=2))) == FedAvg(epochs=2)


def test_names_and_mappings_are_kept() -> None:
    assert method("TopK") == Method(name="TopK")
    assert method({"name": "TopK", "ratio": [0.1, 0.2]}).options == {"ratio": [0.1, 0.2]}


def test_a_class_of_a_session_keeps_its_options() -> None:
    found = method(Rounded(0.5))
    assert found.name.endswith(":Rounded")
    assert found.options == {"step": 0.5}
    assert build_defense(found) == Rounded(0.5)
    assert method(Rounded).name == found.name


def test_an_object_that_options_do_not_make_travels_whole() -> None:
    changed = Rounded(0.5)
    changed.extra = 3  # type: ignore[attr-defined]
    for value in (Masked(torch.zeros(3)), changed):
        found = method(value)
        assert found.options == {}
        built = build_defense(found)
        assert built is not value
        assert [*vars(built)] == [*vars(value)]
    assert method(Masked(torch.zeros(3))).name == method(Masked(torch.zeros(3))).name
    assert method(Masked(torch.zeros(3))).name != method(Masked(torch.ones(3))).name
    assert method(Masked()).name != method(Masked(torch.zeros(2))).name


@dataclass
class Named(Defense):
    names: Iterable[str] = ()


@dataclass
class Silent(Chain):
    def on_update(self, update: Update, rng: Generator) -> Update:
        return {name: 0 * value for name, value in super().on_update(update, rng).items()}


def test_an_object_is_one_defense_whatever_its_options() -> None:
    (found,) = defense_grid([method(Named(["1.weight", "1.bias"]))])
    assert build_defense(found) == Named(["1.weight", "1.bias"])


def test_a_subclass_of_a_chain_is_itself() -> None:
    built = build_defense(method(Silent((TopK(ratio=0.5),))))
    assert type(built) is Silent


def test_objects_that_differ_in_a_tensor_have_names_of_their_own() -> None:
    assert label(method(Masked(torch.zeros(3)))) != label(method(Masked(torch.ones(3))))


def test_a_class_of_an_imported_file_is_named_by_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own_defense.py").write_text(
        "from dataclasses import dataclass\nfrom leakfrontier.defenses import Defense\n"
        "@dataclass\nclass Mine(Defense):\n    factor: float = 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("my_own_defense")
    found = method(module.Mine(2.0))
    assert found == Method(name=f"{tmp_path}/my_own_defense.py:Mine", options={"factor": 2.0})
    before = source_digest([], build_defense(found))
    with (tmp_path / "my_own_defense.py").open("a") as file:
        file.write("    def on_update(self, update, rng):\n        return update\n")
    assert source_digest([], build_defense(found)) != before


def test_an_object_takes_no_options() -> None:
    name = method(Masked(torch.zeros(3))).name
    with pytest.raises(ValueError, match="has no option 'mask'"):
        build_defense(Method(name=name, options={"mask": 1}))


def test_the_links_of_a_chain_may_be_objects() -> None:
    chain = Chain((Rounded(0.5), TopK(ratio=0.2)))
    assert build_defense(method(chain)) == chain


def test_a_class_of_a_file_is_named_by_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom leakfrontier.defenses import Defense\n"
        "@dataclass\nclass Mine(Defense):\n    step: float = 1.0\n"
    )
    cls: Any = load_attribute(f"{file}:Mine")
    assert method(cls(2.0)) == Method(name=f"{file}:Mine", options={"step": 2.0})


@pytest.mark.parametrize("value", [3, nn.Linear(1, 1), None, dict])
def test_what_is_no_method_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="expected a defense, an adversary or a protocol"):
        methods_of([value])


SPACE = ImageSpace((1, 2, 2), 2)


def made(model: Method) -> nn.Module:
    (factory,) = factories(model)
    built: nn.Module = factory(SPACE)  # type: ignore[operator]
    return built


def test_models_are_objects_classes_or_functions() -> None:
    net = Net()
    given = made(given_model(net))
    assert given is not net
    assert torch.equal(given.layer.weight, net.layer.weight)  # type: ignore[arg-type,union-attr]
    assert given_model(net).name.endswith(":Net")
    assert given_model(Net).name != given_model(net).name
    assert isinstance(made(given_model(Net)), Net)
    sized = made(given_model(lambda space: nn.Linear(space.shape[1], 1)))
    assert sized.in_features == 2
    assert given_model("lenet") == Method(name="lenet")
    assert given_model({"name": "mlp", "width": 8}).options == {"width": 8}
    with pytest.raises(ValueError, match="expected a model"):
        given_model(3)


def test_a_class_that_takes_the_space_is_given_it() -> None:
    class Sized(nn.Linear):
        def __init__(self, space: ImageSpace) -> None:
            super().__init__(space.shape[1], 1)

    assert made(given_model(Sized)).in_features == 2


def test_a_configuration_may_hold_objects() -> None:
    content = {
        "scenarios": [{"model": Net, "protocol": FedAvg(epochs=2)}, "fashion-mini/lenet"],
        "defenses": ["none", DPSGD(noise_multiplier=1.5)],
        "adversaries": "panel",
    }
    found = in_configuration(content)
    assert found["defenses"] == ["none", Method(name="DPSGD", options={"noise_multiplier": 1.5})]
    assert found["scenarios"][0]["protocol"].name == "FedAvg"
    assert found["scenarios"][0]["model"].name.endswith(":Net")
    assert found["scenarios"][1] == "fashion-mini/lenet"
    assert found["adversaries"] == "panel"
    assert content["defenses"][1] == DPSGD(noise_multiplier=1.5)


def test_what_a_class_of_a_session_may_use_of_ours_counts() -> None:
    own = source_digest([], build_defense(method(Rounded(0.5))))
    assert own == source_digest([], build_defense(method(Rounded(0.6))))  # options are in the key
    assert own != source_digest([], TopK(ratio=0.2))
    assert own != source_digest([])
