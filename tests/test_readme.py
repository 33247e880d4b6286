"""What the README shows works as it stands."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer.main
import yaml
from PIL import Image
from torch.nn.functional import cross_entropy

from leakfrontier.defenses import DPSGD, Batch, Defense
from leakfrontier.defenses.vector import flatten
from leakfrontier.evaluate.commands.main import app
from leakfrontier.evaluate.foundations.plugins import load_attribute
from leakfrontier.evaluate.run.config import load_config
from leakfrontier.evaluate.run.store import Store

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README.read_text(), re.DOTALL)
COMMANDS = [
    line.partition(" #")[0].partition(" > ")[0].strip()
    for language, text in BLOCKS
    if language == "bash"
    for line in text.splitlines()
    if line.startswith("leakfrontier ")
]
TINY = {
    "scenarios": [
        {
            "dataset": "digits",
            "model": {"name": "mlp", "width": 16},
            "candidates": 20,
            "training": {"rounds": 2, "clients": 4, "clients_per_round": 2, "batch_size": 8},
        }
    ],
    "defenses": ["none", "my_defense.py:Rounded", "my_private_defense.py:ClippedNoise"],
    "adversaries": ["PriorGuess", "my_attack.py:Bias", "my_server.py:OneRow"],
    "observations": 3,
    "individual": True,
}


def python_blocks() -> dict[str, str]:
    """Return the Python blocks by the file that their first line names."""
    blocks = [text for language, text in BLOCKS if language == "python"]
    return {
        found[1] if (found := re.match(r"# (\w+\.py)\n", text)) else "script.py": text
        for text in blocks
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a user's folder, with all files that the README speaks of."""
    for name, text in python_blocks().items():
        (tmp_path / name).write_text(text)
    (tmp_path / "my_models.py").write_text(
        "import math\nfrom torch import nn\n\ndef build(space):\n"
        "    size = math.prod(space.shape)\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(size, space.classes))\n"
    )
    for label in ("a", "b"):
        (tmp_path / "path/to/images" / label).mkdir(parents=True)
        for number in range(3):
            Image.new("L", (8, 8), 40 * number).save(
                tmp_path / f"path/to/images/{label}/{number}.png"
            )
    (tmp_path / "my_run.yaml").write_text(yaml.safe_dump(TINY))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_is_something_to_test() -> None:
    own = {"my_defense.py", "my_private_defense.py", "my_attack.py", "my_server.py"}
    assert {*own, "script.py"} == set(python_blocks())
    assert len(COMMANDS) >= 10


def test_the_private_defense_is_dpsgd_and_its_replay_leaves_out_the_noise(folder: Path) -> None:
    ours = load_attribute("my_private_defense.py:ClippedNoise")(sigma=0.5, norm=0.1)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    data = Batch(torch.randn(5, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1]))

    def upload(defense: Defense, seed: int) -> torch.Tensor:
        rng = torch.Generator().manual_seed(seed)
        return flatten(defense.gradient(model, cross_entropy, data, rng))

    clipped = upload(ours.replay({}), 0)
    torch.testing.assert_close(clipped, upload(DPSGD(0.0, 0.1), 0))
    torch.testing.assert_close(clipped, upload(ours.replay({}), 1))
    noise = torch.stack([upload(ours, seed) - clipped for seed in range(200)])
    assert noise.std().item() == pytest.approx(0.5 * 0.1 / 5, rel=0.1)


def test_the_script_runs_as_it_is_and_the_defenses_and_the_adversaries_work(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, folder / "script.py"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "Rounded" in done.stdout
    assert (folder / "runs/mine/report.html").exists()
    results = Store(folder / "runs/mine").results()
    assert set(results.cells["status"]) == {"ok"}
    rates = results.rates().set_index(["defense", "adversary"])["rate"]
    assert rates["none", "Bias"] == 1.0
    assert rates["Rounded", "Bias"] > 0
    assert rates["ClippedNoise", "Bias"] < 1
    assert rates["none", "OneRow"] == 1.0
    assert rates["ClippedNoise", "OneRow"] < 1
    (claim,) = results.guarantees.to_dict("records")
    assert (claim["defense"], claim["unit"]) == ("ClippedNoise", "record")
    assert claim["noise_multiplier"] == pytest.approx(1, rel=0.01)
    assert claim["measured_noise"] == pytest.approx(1, rel=0.05)
    assert not claim["violated"]


@pytest.mark.parametrize("number", range(sum(language == "yaml" for language, _ in BLOCKS)))
def test_configurations_are_valid(folder: Path, number: int) -> None:
    content = yaml.safe_load([text for language, text in BLOCKS if language == "yaml"][number])
    if isinstance(content, list):  # defenses alone
        content = {**TINY, "defenses": content}
    assert load_config(content).defenses


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_understood(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    group = typer.main.get_command(app)
    command = group.commands[name]  # type: ignore[attr-defined]
    command.make_context(name, arguments)  # raises for unknown options
