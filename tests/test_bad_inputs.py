"""What users get wrong, whatever the command: exit code 2, and a message that names it.

To add a case, add a line to `CASES`, and what it reads to `FILES`.
"""

from __future__ import annotations

import json
import re
import shlex
import sqlite3
import wave
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from leakfrontier.evaluate.engines import engine
from leakfrontier.evaluate.engines.engine import Done
from leakfrontier.evaluate.run import probe
from leakfrontier.evaluate.run.store import FILE_NAME, Store
from leakfrontier.evaluate.users import methods

Command = Callable[..., tuple[int, str, str]]
Config = dict[str, Any]

TINY: Config = {
    "scenarios": [{"dataset": "digits", "model": {"name": "mlp", "width": 16}, "candidates": 20}],
    "defenses": ["none"],
    "adversaries": ["PriorGuess"],
    "observations": 3,
}

FILES: dict[str, str | bytes] = {
    "empty.yaml": "",
    "list.yaml": "- none\n- TopK\n",
    "broken.yaml": "scenarios: [a\ndefenses: }",
    "twice.yaml": "seeds: 1\ndefenses: [none]\nseeds: 2\n",
    "deep.yaml": "[" * 1000,
    "endless.yaml": "scenarios: &a [*a]\ndefenses: [none]\n",
    "binary.yaml": bytes(range(128, 256)),
    "code.yaml": "scenarios: !!python/object/apply:os.getcwd []",
    "crashes.py": "1 / 0\n",
    "exits.py": "raise SystemExit(3)\n",
    "syntax.py": "class Mine(Defense:\n",
    "missing_import.py": "import nothing_of_that_name\n",
    "mine.py": """
from dataclasses import dataclass
from leakfrontier.adversaries import Adversary
from leakfrontier.defenses import Defense

@dataclass
class Mine(Defense):
    scale: float

    def __post_init__(self):
        if not self.scale > 0:
            raise ValueError(f"scale must be positive, got {self.scale}")

class Other:
    pass

@dataclass
class Crashes(Defense):
    def __post_init__(self):
        raise KeyError("no luck")

@dataclass
class Hooked(Defense):
    def on_model(self, model):
        raise KeyError("no hook")

@dataclass
class Spoils(Defense):
    def on_update(self, update, rng):
        return {name: value.nonsense() for name, value in update.items()}

    def guarantee(self, plan):
        raise KeyError("no guarantee")

@dataclass(frozen=True)
class Abstract(Adversary):
    pass
""",
    "models.py": """
from torch import nn

def number(space):
    return 3

def crashes(space):
    raise RuntimeError("no luck")

def normalised(space):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))

def narrow(space):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

def wide(space):
    return nn.Sequential(nn.Flatten(), nn.Linear(65, 10))

def constant(space):
    return nn.Flatten()

instance = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
""",
    "broken.jsonl": '{"text": "a", "label": "b"}\n{"text": \n',
    "unlabelled.jsonl": '{"text": "a"}\n',
    "numbers.jsonl": '{"text": 3, "label": "b"}\n',
    "nothing.jsonl": "",
    "text.txt": "some text",
    "corrupt/results.sqlite": b"no database" * 1000,
    "cut_images/cat/a.png": b"\x89PNG\r\n\x1a\nnothing more",
    "cut_sounds/cat/a.wav": b"RIFF",
    "other_files/cat/a.txt": "a cat",
    "train_only/train.jsonl": '{"text": "a", "label": "b"}\n',
}


def image(path: Path, size: int = 8, mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (size, size)).save(path)


def sound(path: Path, channels: int = 1, rate: int = 8000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(bytes(40 * channels))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all that the cases read."""
    root = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content.encode() if isinstance(content, str) else content)
    for name in ("no_results", "no_classes", "an_empty_class/cat"):
        (root / name).mkdir(parents=True)
    image(root / "two_sizes/cat/a.png")
    image(root / "two_sizes/cat/b.png", size=9)
    image(root / "deep_colours/cat/a.png", mode="I;16")
    image(root / "both/cat/a.png")
    sound(root / "both/cat/b.wav")
    sound(root / "stereo/cat/a.wav", channels=2)
    sound(root / "two_rates/cat/a.wav")
    sound(root / "two_rates/cat/b.wav", rate=16000)
    for number in range(2):
        image(root / f"too_few/cat/{number}.png")
    image(root / "strange/train/cat/a.png")
    image(root / "strange/test/dog/a.png")
    Store(root / "begun", create=True)
    Store(root / "newer", create=True)
    with sqlite3.connect(root / "newer" / FILE_NAME) as database:
        database.execute("PRAGMA user_version = 99")
    (root / "foreign").mkdir()
    with sqlite3.connect(root / "foreign" / FILE_NAME) as database:
        database.execute("CREATE TABLE something (other)")
    Store(root / "older_panel", create=True).begin("2020.1", {}, [])
    return root


def scenario(**change: object) -> Config:
    return {"scenarios": [{**TINY["scenarios"][0], **change}]}


def defense(name: str, **options: object) -> Config:
    return {"defenses": [{"name": name, **options}]}


RUN = "run CONFIG --out out"
ADVISE = "advise --epsilon 3 --examples 60000 --batch 256 --rounds 500"
AUDIT = "audit '{name: DPSGD, noise_multiplier: 1.0}'"
MEMBERSHIP = "membership '{name: DPSGD, noise_multiplier: 1.0}' --out out"
NAN = float("nan")

CASES: list[tuple[str, Config, str]] = [
    # Command lines. CONFIG stands for the tiny configuration with a change.
    ("nothing", {}, "No such command 'nothing'"),
    ("run --nothing", {}, "--nothing"),  # the words are Click's, and change
    (
        "run --preset nothing",
        {},
        "'nothing' is not one of 'quick', 'quick-text', 'standard', 'full'",
    ),
    ("run CONFIG --preset quick", {}, "a configuration file or --preset, not both"),
    ("run CONFIG --workers 0", {}, "Invalid value for '--workers'"),
    ("run CONFIG --workers two", {}, "Invalid value for '--workers'"),
    ("list", {}, "Missing argument"),
    ("list nothing", {}, "'nothing' is not one of 'defenses'"),
    # Files that are no configurations.
    ("run absent.yaml", {}, "cannot read the configuration absent.yaml: [Errno 2] No such file"),
    ("run no_results", {}, "cannot read the configuration no_results: [Errno 21] Is a directory"),
    ("run empty.yaml", {}, "empty.yaml must hold a mapping with the keys ['scenarios'"),
    ("run list.yaml", {}, "list.yaml must hold a mapping with the keys"),
    ("run broken.yaml", {}, "broken.yaml is not valid YAML"),
    ("run twice.yaml", {}, "the key 'seeds' is given in"),
    ("run deep.yaml", {}, "deep.yaml is not valid YAML: it is nested too deeply"),
    ("run endless.yaml", {}, "the alias 'a' refers to its own value"),
    ("run binary.yaml", {}, "cannot read the configuration binary.yaml"),
    ("run code.yaml", {}, "could not determine a constructor for the tag"),
    # Keys and values.
    (RUN, {"defences": []}, "unknown key 'defences'; the keys are scenarios, defenses"),
    (RUN, {"scenarios": None}, "scenarios: must be a list, got None"),
    (RUN, {"scenarios": []}, "scenarios must hold at least one, got none"),
    (RUN, {"scenarios": ["nope"]}, "unknown scenario 'nope': choose one of fashion-mini/mlp"),
    (RUN, {"defenses": []}, "defenses must hold at least one, got none"),
    (RUN, {"defenses": "TopK"}, "defenses: must be a list, got 'TopK'"),
    (RUN, {"defenses": ["none", "none"]}, "two defenses are called 'none'"),
    (RUN, {"adversaries": "panle"}, "must be 'panel', got 'panle'"),
    (RUN, {"adversaries": []}, "adversaries must hold at least one, got none"),
    (RUN, {"budget": "large"}, "budget: must be 'cpu' or 'published', got 'large'"),
    (RUN, {"seeds": True}, "seeds: must be a whole number, got True"),
    (RUN, {"seeds": 0}, "seeds: must be at least 1, got 0"),
    (RUN, {"seeds": 10**9}, "seeds: must be at most 10000"),
    (RUN, {"observations": 2.5}, "observations: must be a whole number, got 2.5"),
    (RUN, {"observations": "3"}, "observations: must be a whole number, got '3'"),
    (RUN, {"observations": 10**9}, "observations must be at most 1438, got 1000000000"),
    (RUN, {"time_limit": NAN}, "time_limit: must be above 0, got nan"),
    (RUN, {"time_limit": -1}, "time_limit: must be above 0, got -1"),
    (RUN, {"individual": "perhaps"}, "individual: must be true or false"),
    (RUN, scenario(datset="digits"), "scenarios.0: unknown key 'datset'"),
    (RUN, scenario(batch_size=0), "scenarios.0.batch_size: must be at least 1"),
    (RUN, scenario(batch_size=5000), "batches of 5000 and their look-alikes need at least 5001"),
    (RUN, scenario(candidates=1), "scenarios.0.candidates: must be at least 2"),
    (RUN, scenario(checkpoints=[151]), "checkpoints must be rounds in [0, 150], got [151]"),
    (RUN, scenario(checkpoints="0"), "scenarios.0.checkpoints: must be a list"),
    (RUN, scenario(title=3), "scenarios.0.title: must be a text, got 3"),
    (RUN, scenario(protocol="FedNope"), "unknown protocol 'FedNope': choose one of FedSGD"),
    (RUN, scenario(protocol={"name": "FedAvg", "lr": NAN}), "lr must be positive and finite"),
    (
        RUN,
        scenario(protocol={"name": "FedBuff", "buffer": 50}),
        "training.clients must be at least 50",
    ),
    (
        RUN,
        scenario(training={"lr": NAN}),
        "training.lr: must be a finite number, got nan",
    ),
    (RUN, scenario(training={"server": "lion"}), "'sgd' or 'adam', got 'lion'"),
    (RUN, scenario(training={"clients": 100_000}), "training.clients must be at most 1438"),
    (
        RUN,
        scenario(training={"clients": 1, "clients_per_round": 2}),
        "clients_per_round must be at most clients = 1",
    ),
    # Defenses.
    (RUN, defense("Nope"), "unknown defense 'Nope': choose one of none, DPSGD"),
    (RUN, defense("TopK"), "defense TopK: cannot be built with no options"),
    (RUN, defense("TopK", ratoi=1), "TopK has no option 'ratoi'; its options are ratio"),
    (RUN, defense("TopK", ratio=0), "ratio must be in (0, 1], got 0"),
    (RUN, defense("TopK", ratio=True), "ratio must be a number, got true"),
    (RUN, defense("TopK", ratio="half"), "cannot be built with {'ratio': 'half'}"),
    (RUN, defense("TopK", ratio=[]), "TopK: a list of values must not be empty"),
    (RUN, defense("DPSGD", noise_multiplier=NAN), "noise_multiplier must be in [0, inf), got nan"),
    (RUN, defense("DPSGD", noise_multiplier=-1), "noise_multiplier must be in [0, inf), got -1"),
    (RUN, defense("Quantization", bits=0), "bits must be"),
    (RUN, defense("Quantization", bits=2.5), "bits must be"),
    (RUN, defense("SecureAggregation", clients=5000), "5000 clients with 1 examples each"),
    (RUN, defense("Chain"), "a Chain must have links"),
    (RUN, defense("Chain", links=[]), "a Chain must have links"),
    (RUN, defense("Chain", links=["Nope"]), "unknown defense 'Nope'"),
    (RUN, defense("TopK", ratio=0.1, links=["none"]), "only a Chain has links, got TopK"),
    (f"{RUN} --defense Nope", {}, "unknown defense 'Nope'"),
    (f"{RUN} --defense '{{name: [}}'", {}, "--defense '{name: [}' is not a valid YAML mapping"),
    (f"{RUN} --defense '{{ratio: 1}}'", {}, "expected a name, or a mapping with the key 'name'"),
    (f"{RUN} --defense '{{name: TopK, name: none}}'", {}, "the key 'name' is given"),
    # Files of the user's own.
    (f"{RUN} --defense absent.py:Mine", {}, "there is no file "),
    (f"{RUN} --defense crashes.py:Mine", {}, "crashes.py fails when it is loaded: ZeroDivision"),
    (f"{RUN} --defense exits.py:Mine", {}, "exits.py fails when it is loaded: SystemExit: 3"),
    (f"{RUN} --defense syntax.py:Mine", {}, "syntax.py fails when it is loaded: SyntaxError"),
    (f"{RUN} --defense missing_import.py:Mine", {}, "No module named 'nothing_of_that_name'"),
    (f"{RUN} --defense mine.py:Nope", {}, "mine.py has no 'Nope'; it defines Mine"),
    (f"{RUN} --defense mine.py:Other", {}, "mine.py:Other must be a subclass of Defense"),
    (f"{RUN} --defense mine.py:Mine", {}, "mine.py:Mine: cannot be built with no options"),
    (f"{RUN} --defense mine.py:Crashes", {}, "mine.py:Crashes: KeyError: 'no luck'"),
    (RUN, defense("mine.py:Mine", scale=-1), "scale must be positive, got -1"),
    (RUN, defense("mine.py:Mine", size=1), "has no option 'size'; its options are scale"),
    (RUN, defense("nothing.of.that.name:Mine"), "cannot import nothing.of.that.name"),
    (RUN, defense("mine.py:"), "got 'mine.py:'"),
    (RUN, {"adversaries": ["mine.py:Mine"]}, "mine.py:Mine must be a subclass of Adversary"),
    (RUN, {"adversaries": ["mine.py:Abstract"]}, "mine.py:Abstract: cannot be built"),
    (
        RUN,
        {"adversaries": [{"name": "InvertingGradients", "iterations": 0}]},
        "iterations must be at least 1, got 0",
    ),
    (RUN, scenario(model="nope"), "model must be one of mlp, linear"),
    (RUN, scenario(model={"name": "mlp", "width": -3}), "mlp(width=-3)"),
    (RUN, scenario(model="models.py:number"), "models.py:number"),
    (RUN, scenario(model="models.py:crashes"), "no luck"),
    (RUN, scenario(model="models.py:normalised"), "BatchNorm"),
    (RUN, scenario(model="models.py:instance"), "models.py:instance is a model, not a function"),
    (RUN, scenario(mode="training"), "scenarios.0.mode: must be 'eval' or 'train'"),
    (RUN, scenario(model="models.py:narrow"), "models.py:narrow"),
    (RUN, scenario(model="models.py:wide"), "models.py:wide"),
    (RUN, scenario(model="models.py:constant"), "models.py:constant"),
    # Data.
    (RUN, scenario(dataset="nope"), "dataset must be one of fashion-mini, digits"),
    (RUN, scenario(dataset="no/such/folder"), "there is no folder or file no/such/folder"),
    (RUN, scenario(dataset="no/[/such] [b]"), "there is no folder or file no/[/such] [b]"),
    (RUN, scenario(dataset="text.txt"), "text.txt must be a folder or a .jsonl file"),
    (RUN, scenario(dataset="./no_classes"), "no_classes has no classes"),
    (RUN, scenario(dataset="./an_empty_class"), "an_empty_class/cat holds no images or WAV"),
    (RUN, scenario(dataset="./other_files"), "other_files/cat holds no images or WAV"),
    (RUN, scenario(dataset="./cut_images"), "cut_images/cat/a.png"),
    (RUN, scenario(dataset="./two_sizes"), "all images must have one size, got 8x8"),
    (RUN, scenario(dataset="./deep_colours"), "a.png has more than 8 bits per channel"),
    (RUN, scenario(dataset="./both"), "must hold images or sounds, got both"),
    (RUN, scenario(dataset="./cut_sounds"), "cut_sounds/cat/a.wav"),
    (RUN, scenario(dataset="./stereo"), "stereo/cat/a.wav"),
    (RUN, scenario(dataset="./two_rates"), "two_rates/cat/b.wav"),
    (RUN, scenario(dataset="./too_few"), "too_few"),
    (RUN, scenario(dataset="./strange"), "has classes without training data: dog"),
    (RUN, scenario(dataset="./broken.jsonl"), "broken.jsonl"),
    (RUN, scenario(dataset="./unlabelled.jsonl"), "unlabelled.jsonl"),
    (RUN, scenario(dataset="./numbers.jsonl"), "numbers.jsonl"),
    (RUN, scenario(dataset="./nothing.jsonl"), "nothing.jsonl"),
    (RUN, scenario(dataset="./train_only"), "no test.jsonl or val.jsonl"),
    # Folders of results.
    ("run CONFIG --out text.txt", {}, "cannot make the folder text.txt"),
    ("run CONFIG --out corrupt", {}, "corrupt/results.sqlite cannot be used as a results file"),
    ("run CONFIG --out foreign", {}, "foreign/results.sqlite is a database of another program"),
    ("run CONFIG --out newer", {}, "newer/results.sqlite has format 99"),
    ("run CONFIG --out older_panel", {}, "was made with panel '2020.1'"),
    ("report", {}, "Missing argument"),
    ("report absent", {}, "absent has no results.sqlite"),
    ("report text.txt", {}, "text.txt has no results.sqlite"),
    ("report no_results", {}, "no_results has no results.sqlite"),
    ("report begun", {}, "begun/results.sqlite holds no run yet"),
    ("report corrupt", {}, "corrupt/results.sqlite cannot be used as a results file"),
    ("report foreign", {}, "a database of another program"),
    ("report newer", {}, "newer/results.sqlite has format 99"),
    # Tables.
    ("reproduce nope", {}, "unknown table 'nope': choose one of spearpp-table1"),
    ("reproduce dlg --rows 0", {}, "rows must be numbers from 1 to 4"),
    ("reproduce dlg --rows 3-1", {}, "got '3-1'"),
    ("reproduce dlg --rows all", {}, "got 'all'"),
    ("reproduce dlg --trials 0", {}, "Invalid value for '--trials'"),
    ("reproduce dlg --seed -1", {}, "Invalid value for '--seed'"),
    ("reproduce dlg --procedure nope --out out", {}, "procedure of dlg must be one of ours"),
    ("reproduce dlg --data absent --out out", {}, "there is no folder absent"),
    ("reproduce dlg --data strange --out out", {}, "dlg needs cifar100"),
    ("reproduce dlg --out text.txt", {}, "cannot write to the folder text.txt"),
    ("reproduce dlg --out corrupt", {}, "corrupt/results.sqlite cannot be used"),
    # DP parameters.
    ("advise --epsilon 3", {}, "give examples (or examples_per_client), batch_size and rounds"),
    (f"{ADVISE} --min-accuracy 0.5", {}, "got epsilon, min_accuracy"),
    (f"{ADVISE} --epsilon -1", {}, "epsilon must be in (0, inf), got -1"),
    (f"{ADVISE} --epsilon nan", {}, "epsilon must be in (0, inf), got nan"),
    (f"{ADVISE} --batch 60001", {}, "the sample rate would be above 1"),
    (f"{ADVISE} --batch 0", {}, "got 0"),
    (f"{ADVISE} --delta 2", {}, "delta must be in (0, 1), got 2"),
    (f"{ADVISE} --clients 0", {}, "clients must be between 1 and the 60000 examples, got 0"),
    (f"{ADVISE} --candidates 1", {}, "candidates"),
    (f"{ADVISE} --unit person", {}, "'person' is not one of 'record', 'client'"),
    (f"{ADVISE} --seed -1", {}, "Invalid value for '--seed'"),
    (f"{ADVISE} --out text.txt", {}, "cannot write to the folder text.txt"),
    ("advise --epsilon 3 --dataset nope", {}, "dataset must be one of fashion-mini"),
    ("advise --epsilon 3 --dataset digits --model nope --out out", {}, "model must be one of"),
    # Audits.
    ("audit", {}, "Missing argument"),
    ("audit Nope", {}, "unknown defense 'Nope'"),
    ("audit none", {}, "there is nothing to audit"),
    ("audit '{name: TopK, ratio: 0.1}'", {}, "there is nothing to audit"),
    (
        "audit '{name: DPSGD, noise_multiplier: [1, 2]}'",
        {},
        "give 2 configurations",
    ),
    ("audit mine.py:Other", {}, "mine.py:Other must be a subclass of Defense"),
    ("audit crashes.py:Mine", {}, "crashes.py fails when it is loaded"),
    ("audit mine.py:Hooked", {}, "Hooked on digits/mlp(width=32): KeyError: 'no hook'"),
    ("audit mine.py:Spoils", {}, "no attribute 'nonsense' (mine.py, line 30)"),
    (f"{AUDIT} --model models.py:number", {}, "models.py:number"),
    (f"{AUDIT} --steps 0", {}, "steps must be at least 1, got 0"),
    (f"{AUDIT} --sample-rate nan", {}, "sample_rate must be in (0, 1], got nan"),
    (f"{AUDIT} --delta 0", {}, "delta must be in (0, 1), got 0"),
    (f"{AUDIT} --runs 0", {}, "Invalid value for '--runs'"),
    (f"{AUDIT} --method nope", {}, "'nope' is not one of 'residual-noise'"),
    (f"{AUDIT} --model nope", {}, "model must be one of mlp"),
    (f"{AUDIT} --seed -1", {}, "Invalid value for '--seed'"),
    # Membership.
    ("membership Nope --out out", {}, "unknown defense 'Nope'"),
    (
        "membership mine.py:Spoils --out out --dataset digits --model mlp --uploads 100",
        {},
        "AttributeError: 'Tensor' object has no attribute 'nonsense'",
    ),
    (f"{MEMBERSHIP} --uploads 5", {}, "Invalid value for '--uploads'"),
    (f"{MEMBERSHIP} --batch 0", {}, "Invalid value for '--batch'"),
    (f"{MEMBERSHIP} --dataset digits --batch 5000", {}, "5000"),
    (f"{MEMBERSHIP} --dataset ./cut_images", {}, "cut_images/cat/a.png"),
    (f"{MEMBERSHIP} --model models.py:crashes", {}, "no luck"),
    (f"{MEMBERSHIP} --seed -1", {}, "Invalid value for '--seed'"),
    (f"{MEMBERSHIP} --out text.txt", {}, "cannot write to the folder text.txt"),
]
UNWRITABLE = ("run CONFIG", "reproduce dlg", MEMBERSHIP, ADVISE)


def _at_once(
    function: Callable[[Any], Any], tasks: Iterable[Any], **_: object
) -> Iterator[Done[Any, Any]]:
    yield from (Done(task, function(task), 0.0) for task in tasks)


@pytest.fixture
def refused(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, Config], str]:
    """Return a function that runs what must be refused before any cell: the message."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(engine, "execute", None)
    for module in (methods, probe):  # without a process for each case
        monkeypatch.setattr(module, "execute", _at_once)
    monkeypatch.delenv("LEAKFRONTIER_DATA", raising=False)

    def run(line: str, change: Config) -> str:
        (folder / "config.yaml").write_text(yaml.safe_dump({**TINY, **change}))
        arguments = shlex.split(line.replace("CONFIG", "config.yaml"))
        code, output, errors = command(*arguments)
        assert code == 2, output + errors
        assert "Traceback" not in output + errors
        return re.sub(r"[│\s]+", " ", errors)  # as if there were no boxes and no lines

    return run


@pytest.mark.parametrize(
    ("line", "change", "message"),
    CASES,
    ids=[f"{line} {json.dumps(change)}" if change else line for line, change, _ in CASES],
)
def test_a_mistake_is_named(
    refused: Callable[[str, Config], str], line: str, change: Config, message: str
) -> None:
    assert message in refused(line, change)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc is where root cannot write")
@pytest.mark.parametrize("line", UNWRITABLE)
def test_a_folder_that_cannot_be_written_to(
    refused: Callable[[str, Config], str], line: str
) -> None:
    message = refused(f"{line} --out /proc/self", {})
    assert "/proc/self" in message
    assert "writable" in message or "cannot write to the folder" in message


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 60
    assert {line.partition(" ")[0] for line, *_ in CASES} >= {
        "run",
        "report",
        "reproduce",
        "advise",
        "audit",
        "membership",
        "list",
    }
