from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leakfrontier.evaluate.engines.engine import Done, Failure
from leakfrontier.evaluate.foundations.errors import UserError
from leakfrontier.evaluate.run import probe as probe_module
from leakfrontier.evaluate.run.config import ConfigError, load_config
from leakfrontier.evaluate.run.probe import Trying, _tried, probe
from leakfrontier.evaluate.run.run import run
from leakfrontier.evaluate.users.methods import (
    Method,
    build_adversary,
    build_defense,
    check_loading,
)
from leakfrontier.evaluate.world.scenario import Scenario
from leakfrontier.reports import write_report

Config = dict[str, Any]
UserFile = Callable[..., Path]

HEADER = """
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from leakfrontier.adversaries import Adversary, Crafted, NotApplicable, Reconstruction
from leakfrontier.defenses import Batch, Defense, Guarantee, Refused, TopK, batch_gradient
"""

SCENARIO = Scenario(dataset="digits", model=Method(name="mlp", options={"width": 8}), candidates=5)


@pytest.fixture
def own(user_file: UserFile) -> Callable[[str], str]:
    """Return a function that writes the body of a class `Mine`, and names the class."""

    def write(code: str, base: str = "Defense", decorator: str = "@dataclass") -> str:
        lines = "".join(f"    {line}\n" for line in code.strip("\n").splitlines())
        file = user_file(f"{decorator}\nclass Mine({base}):\n{lines}", header=HEADER)
        return f"{file}:Mine"

    return write


def tried(kind: Any, name: str, scenario: Scenario = SCENARIO) -> list[str] | Failure:  # noqa: ANN401
    return _tried(Trying(scenario, kind, Method(name=name)))


def failure(kind: str, name: str, scenario: Scenario = SCENARIO) -> str:
    found = tried(kind, name, scenario)
    assert isinstance(found, Failure), found
    return found.message


UPDATE = (
    "def on_update(self, update, rng):\n    return {name: %s for name, value in update.items()}"
)
CLAIM = "def guarantee(self, plan):\n    return %s"

BROKEN = {
    UPDATE % "value.half()": "Mine.on_update must return float32, got float16 for '1.weight'",
    UPDATE % "value.double()": "Mine.on_update must return float32, got float64 for '1.weight'",
    UPDATE % "value.sign().long()": "Mine.on_update must return float32, got int64 for",
    UPDATE % "value * math.nan": "Mine.on_update returned NaN or infinite values for",
    UPDATE % "value.mul_(2)": "Mine.on_update modified its argument",
    UPDATE % "value.flatten()": "Mine.on_update must keep the shape (8, 64)",
    UPDATE % "value.numpy()": "Mine.on_update must return tensors, got ndarray",
    UPDATE % "unknown": "NameError: name 'unknown' is not defined (mine.py, line ",
    "def on_batch(self, batch, rng):\n    return Batch(batch.inputs.half(), batch.targets)": (
        "Mine.on_batch must return inputs of float32, got float16"
    ),
    "def on_round(self, updates, rng):\n    return updates[0]": (
        "Mine.on_round must return a list of updates, got dict"
    ),
    "def batches(self, examples, batch_size, epochs, rng):\n    yield [0, 1]": (
        "Mine.batches must yield vectors of example numbers (torch.long), got list"
    ),
    "def batches(self, examples, batch_size, epochs, rng):\n    yield torch.tensor([9])": (
        "Mine.batches must yield numbers below 8, got tensor([9])"
    ),
    "def on_model(self, model):\n    pass": "Mine.on_model must return a model, got NoneType",
    "def replay(self, observed):\n    return observed": "Mine.replay must return a Defense, got",
    "def replay(self, observed):\n    return TopK(self.ratio)": (
        "AttributeError: 'Mine' object has no attribute 'ratio' (mine.py, line "
    ),
    "def log_likelihood(self, observed, expected, batch_size=None):\n    return 0.5": (
        "Mine.log_likelihood must return one number, as a tensor, got float"
    ),
    "def log_likelihood(self, observed, expected, batch_size=None):\n"
    "    return observed['1.bias']": "one number, as a tensor, got shape (8,)",
    "@property\ndef cohort(self):\n    return 0": "Mine.cohort must be a whole number from 1",
    "@property\ndef strength(self):\n    return 'high'": "Mine.strength must be a number or None",
    CLAIM % "1.0": "Mine.guarantee must return a Guarantee or None, got float",
    CLAIM % "Guarantee(math.nan, 1e-5, 'record', 'replace', 'PLD')": (
        "epsilon of Mine.guarantee must be a number >= 0, got nan"
    ),
    CLAIM % "Guarantee(-1.0, 1e-5, 'record', 'replace', 'PLD')": "must be a number >= 0, got -1.0",
    CLAIM % "Guarantee(1.0, 0.0, 'record', 'replace', 'PLD')": "must be in (0, 1), got 0.0",
    CLAIM % "Guarantee(1.0, 1e-5, 'user', 'replace', 'PLD')": "must be 'record' or 'client'",
    CLAIM % "Guarantee(1.0, 1e-5, 'record', 'swap', 'PLD')": "must be 'zero-out' or 'add/",
    # What a class is, is told before anything is called.
    "def on_updates(self, update, rng):\n    return {}": (
        "Mine.on_updates is never called: did you mean on_update?"
    ),
    "def gradients(self, model, loss, batch, rng):\n    return {}": "did you mean gradient?",
    "def on_update(self, update):\n    return update": (
        "Mine.on_update must take (self, update, rng), got (self, update)"
    ),
    "def gradient(self, model, batch, rng):\n    return {}": (
        "Mine.gradient must take (self, model, loss, batch, rng), got (self, model, batch, rng)"
    ),
    "def log_likelihood(self, observed, expected):\n    return None": (
        "Mine.log_likelihood must take (self, observed, expected, batch_size)"
    ),
    "def cohort(self):\n    return 2": "Mine.cohort is used as an attribute: put @property",
    "on_update = 3": "Mine.on_update must be a method, got int",
}


@pytest.mark.parametrize(("code", "message"), BROKEN.items())
def test_a_broken_defense_is_named(own: Callable[..., str], code: str, message: str) -> None:
    assert message in failure("defense", own(code))


def test_a_method_of_ones_own_beside_the_hook_is_fine(own: Callable[..., str]) -> None:
    code = (
        UPDATE % "2 * value"
        + "\ndef on_updates(self, update):\n    pass\ndef _gradient(s):\n    pass"
    )
    assert tried("defense", own(code)) == []


def test_options_need_the_decorator(own: Callable[..., str]) -> None:
    message = (
        "Mine.scale is not an option because Mine is not a dataclass. Write:\n"
        "    @dataclass\n    class Mine"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        build_defense(Method(name=own("scale: float = 1.0", decorator="")))


@pytest.mark.parametrize(
    ("code", "idle"),
    [
        ("pass", True),
        (UPDATE % "value.clone()", True),
        (UPDATE % "0.5 * value", False),
        (UPDATE % "value + 0.1 * torch.randn(value.shape, generator=rng)", False),
        ("def on_receive(self, model, agreed):\n    return model", False),
        ("def on_receive(self, model, agreed):\n    raise Refused('no')", False),
        (CLAIM % "Guarantee(math.inf, 1e-5, 'client', 'replace', 'none')", False),
    ],
)
def test_a_defense_that_changes_nothing_is_warned_of(
    own: Callable[..., str], code: str, idle: bool
) -> None:
    warned = ["Mine changes nothing: its uploads are those of an undefended client, bit for bit"]
    assert tried("defense", own(code)) == (warned if idle else [])


def test_a_defense_that_acts_from_its_second_upload_on(own: Callable[..., str]) -> None:
    code = """
count = 0
def on_update(self, update, rng):
    self.count += 1
    return {name: value * (1 if self.count == 1 else 0.5) for name, value in update.items()}
"""
    assert tried("defense", own(code)) == []


RECONSTRUCT = "def reconstruct(self, observation, rng):\n    return %s"
BROKEN_ATTACKS = {
    RECONSTRUCT % "None": "Mine must return a Reconstruction, got NoneType",
    RECONSTRUCT % "Reconstruction(torch.zeros(1, 2))": "must return inputs of shape (1, 8, 8)",
    RECONSTRUCT % "Reconstruction(torch.full((1, 1, 8, 8), math.nan))": "Mine returned NaN",
    RECONSTRUCT % "Reconstruction(torch.zeros(1, 1, 8, 8).long())": (
        "Mine must return inputs of torch.float32, got torch.int64"
    ),
    RECONSTRUCT % "Reconstruction([0.0])": "Mine must return a tensor of inputs, got list",
    RECONSTRUCT % "observation.nothing": "no attribute 'nothing' (mine.py, line ",
    "def reconstruct(self, observation):\n    pass": (
        "Mine.reconstruct must take (self, observation, rng), got (self, observation)"
    ),
    RECONSTRUCT % "1" + "\ndef crafted(self, model, round, rng):\n    pass": "did you mean craft?",
    RECONSTRUCT % "1" + "\ndef craft(self, model, round, rng):\n    return [model]": (
        "Mine.craft must return Crafted(models, kept), got list"
    ),
    RECONSTRUCT % "1" + "\ndef craft(self, model, round, rng):\n    return Crafted([])": (
        "Mine.craft must return a model for each of 1 clients, got 0"
    ),
}


@pytest.mark.parametrize(("code", "message"), BROKEN_ATTACKS.items())
def test_a_broken_adversary_is_named(own: Callable[..., str], code: str, message: str) -> None:
    name = own(code, "Adversary", "@dataclass(frozen=True)")
    assert message in failure("adversary", name)


def test_an_adversary_that_does_not_apply_is_none_the_worse(own: Callable[..., str]) -> None:
    code = "def reconstruct(self, observation, rng):\n    raise NotApplicable('never')"
    assert tried("adversary", own(code, "Adversary", "@dataclass(frozen=True)")) == []


def test_an_adversary_that_is_not_frozen_is_told_what_to_write(own: Callable[..., str]) -> None:
    name = own(RECONSTRUCT % "None", "Adversary", "@dataclass")
    words = "@dataclass(frozen=True)\n    class Mine(Adversary):"
    with pytest.raises(ValueError, match=re.escape(words)):
        build_adversary(Method(name=name))
    name = own("scale: float = 1.0\n" + RECONSTRUCT % "None", "Adversary", "")
    with pytest.raises(ValueError, match=re.escape("@dataclass(frozen=True)\n    class Mine(Adv")):
        build_adversary(Method(name=name))


MODELS = """
def build(space, kind):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    if kind == "nan":
        nn.init.constant_(model[1].weight, math.nan)
    if kind == "frozen":
        model.requires_grad_(False)
    if kind == "tokens":
        model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(192, 10))
    if kind == "classes":
        model.append(nn.Linear(10, 3))
    if kind == "unused":
        model.unused = nn.Module()
        model.unused.weight = nn.Parameter(torch.zeros(3))
        model.forward = lambda inputs: model[:4](inputs)
        return Wrapped(model)
    return model


class Wrapped(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.inner, self.unused = model[:4], nn.Linear(2, 2)

    def forward(self, inputs):
        return self.inner(inputs)
"""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nan", "mine.py:build has NaN or infinite weights in '1.weight'"),
        ("frozen", "mine.py:build has no trainable parameters: there is nothing to upload"),
        ("tokens", r"mine.py:build fails on inputs of shape \(2, 1, 8, 8\) and torch.float32: "),
        ("classes", r"mine.py:build must map 2 examples to shape \(2, 10\), got \(2, 3\)"),
    ],
)
def test_a_broken_model_is_named(user_file: UserFile, kind: str, message: str) -> None:
    method = Method(name=f"{user_file(MODELS, header=HEADER)}:build", options={"kind": kind})
    scenario = SCENARIO.model_copy(update={"model": method})
    assert re.search(message, failure("scenario", method.name, scenario))


def test_parameters_without_use_are_warned_of(user_file: UserFile) -> None:
    method = Method(name=f"{user_file(MODELS, header=HEADER)}:build", options={"kind": "unused"})
    scenario = SCENARIO.model_copy(update={"model": method})
    (note,) = tried("scenario", method.name, scenario)  # type: ignore[misc]
    assert "the loss does not depend on unused.weight, unused.bias" in note
    for name in ("none", "TopK", "Noise", "DPSGD"):
        options = {
            "TopK": {"ratio": 0.1},
            "Noise": {"scale": 0.1},
            "DPSGD": {"noise_multiplier": 1},
        }
        task = Trying(scenario, "defense", Method(name=name, options=options.get(name, {})))
        assert _tried(task) == []


def test_ours_are_tried_on_the_model_without_a_worker(
    tiny: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_module, "execute", None)
    tiny["defenses"] = ["none", {"name": "DPSGD", "noise_multiplier": 1.0}]
    assert probe(load_config(tiny)) == []
    tiny["scenarios"].append({**tiny["scenarios"][0], "title": "other"})
    tiny["defenses"].append({"name": "Soteria", "pruning_rate": 0.5, "layer": "8"})
    with pytest.raises(
        ConfigError, match=r"^defense Soteria.* on digits/.*: layer must be one of.*$"
    ):
        probe(load_config(tiny))


OWN = """
import os

@dataclass
class Spoils(Defense):
    scale: float = 1.0
    def on_update(self, update, rng):
        if os.getpid() == PARENT:
            raise ValueError("it runs in the process of the command itself")
        return {name: value * math.nan for name, value in update.items()}

class Hangs(Defense): pass
class AlsoHangs(Defense): pass
class Idle(Defense): pass
"""


def test_a_run_names_what_is_broken_once_before_it_starts(
    tiny: Config, user_file: UserFile, tmp_path: Path
) -> None:
    file = user_file(OWN.replace("PARENT", str(os.getpid())), header=HEADER)
    tiny["defenses"] = ["none", {"name": f"{file}:Spoils", "scale": [1, 2]}]
    with pytest.raises(ConfigError) as caught:
        run(load_config(tiny | {"seeds": 3}), tmp_path / "out", workers=1)
    start = "defense Spoils(scale=1) on digits/mlp(width=16): Spoils.on_update returned NaN"
    assert str(caught.value).startswith(start)
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "out").exists()


def at_once(call: Callable[[Trying], Any], own: list[Trying], **_: object) -> Iterator[Any]:
    """Do the work of a worker here; who hangs is stopped before it starts."""
    for task in own:
        hangs = task.method.name.endswith("Hangs")
        yield Done(task, Failure("timeout", "") if hangs else call(task), 0.0)


def test_every_method_that_hangs_is_named(
    tiny: Config, user_file: UserFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_module, "execute", at_once)
    file = user_file(OWN, header=HEADER)
    tiny["defenses"] = ["none", f"{file}:Hangs", f"{file}:AlsoHangs"]
    with pytest.raises(ConfigError) as caught:
        probe(load_config(tiny | {"time_limit": 8}))
    reason = "did not finish within the time limit of 8 s, on a single upload"
    names = ("Hangs", "AlsoHangs")
    expected = [f"defense {name} on digits/mlp(width=16): {reason}" for name in names]
    assert str(caught.value).splitlines() == expected


@pytest.mark.usefixtures("undrawn")
def test_what_is_warned_of_stays_on_the_page(
    tiny: Config, user_file: UserFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_module, "execute", at_once)
    tiny["defenses"] = ["none", f"{user_file(OWN, header=HEADER)}:Idle"]
    results = run(load_config(tiny), tmp_path, workers=1)
    assert [note.partition(":")[0] for note in results.notes] == ["Idle changes nothing"]
    assert "Idle changes nothing" in write_report(tmp_path).read_text()


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("while True: pass", "mine.py did not finish loading within 2 s"),
        ("import os\nos._exit(3)", "mine.py cannot be loaded: worker died with exit code 3"),
    ],
)
def test_a_file_that_does_not_come_back_from_loading(
    tiny: Config, user_file: UserFile, code: str, message: str
) -> None:
    file, start = user_file(code, header=""), time.monotonic()
    with pytest.raises(UserError, match=message):
        load_config(tiny | {"time_limit": 2, "defenses": [f"{file}:Mine"]})
    assert time.monotonic() - start < 60


@pytest.mark.usefixtures("guarded")
def test_what_is_loaded_is_not_loaded_in_a_worker_again(
    user_file: UserFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = user_file("class Mine(Defense): pass\n")
    build_defense(Method(name=f"{file}:Mine"))
    monkeypatch.setattr("leakfrontier.evaluate.users.methods.execute", None)
    check_loading([f"{file}:Mine", "math:sqrt", "no/such/file.py:Mine"], 1.0)
    with pytest.raises(TypeError):
        check_loading([f"{user_file('class Mine(Defense): x = 1')}:Mine"], 1.0)
