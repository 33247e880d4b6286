"""What the README and the pages of docs/ show, taken apart, so that tests can run it.

A Python block that begins with `# name.py` is a file in the reader's folder. The other Python
blocks of a page are one script, as the cells of a notebook are.
"""

import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml
from PIL import Image

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
GITHUB = "https://github.com/leakfrontier/leakfrontier/"
RAW = "https://raw.githubusercontent.com/leakfrontier/leakfrontier/"

SMALL_SCENARIO = {
    "dataset": "digits",
    "model": {"name": "mlp", "width": 16},
    "candidates": 20,
    "training": {"rounds": 2, "clients": 4, "clients_per_round": 2, "batch_size": 1},
}
SMALL_RUN = {
    "scenarios": [SMALL_SCENARIO],
    "defenses": ["none", "my_defense.py:Rounded", "my_private_defense.py:ClippedNoise"],
    "adversaries": ["PriorGuess", "my_attack.py:Bias", "my_server.py:OneRow"],
    "observations": 3,
}

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NAMED = re.compile(r"# (\w+\.py)\n")


@dataclass(frozen=True)
class Page:
    """A page and its blocks of code."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    def blocks(self, language: str) -> list[str]:
        return [text for one, text in _FENCE.findall(self.text) if one == language]

    @property
    def files(self) -> dict[str, str]:
        """Return the Python files that the page shows."""
        return {found[1]: text for text in self.blocks("python") if (found := _NAMED.match(text))}

    @property
    def script(self) -> str:
        """Return the other Python blocks, one after the other."""
        return "\n\n".join(text for text in self.blocks("python") if not _NAMED.match(text))

    @property
    def commands(self) -> list[list[str]]:
        """Return the commands of the page's shell blocks, without comments and redirections."""
        lines = "\n".join(self.blocks("bash")).replace("\\\n", " ").splitlines()
        parts = [part for line in lines for part in line.split(" && ")]
        words = [shlex.split(part.partition(" > ")[0], comments=True) for part in parts]
        return [one for one in words if one]

    @property
    def links(self) -> list[str]:
        """Return where the page's links and images lead."""
        return re.findall(r"\]\(([^)\s]+)\)", re.sub(_FENCE, "", self.text))


def pages() -> list[Page]:
    """Return the README and all pages of docs/."""
    return [Page(README), Page(ROOT / "CONTRIBUTING.md"), *map(Page, sorted(DOCS.rglob("*.md")))]


def guides() -> list[Page]:
    """Return the pages whose code readers run: the README, the index and the guides."""
    return [Page(README), Page(DOCS / "index.md"), *map(Page, sorted(DOCS.glob("guides/*.md")))]


def readers_folder(folder: Path) -> Path:
    """Fill a folder with all files that the guides speak of."""
    for page in guides():
        for name, text in page.files.items():
            (folder / name).write_text(text)
    for label in ("a", "b"):
        for place in ("path/to/images", "my_images"):
            (folder / place / label).mkdir(parents=True)
            for number in range(3):
                Image.new("L", (8, 8), 40 * number).save(folder / place / label / f"{number}.png")
    (folder / "my-model").mkdir()
    lines = [f'{{"text": "message number {n}", "label": "{n % 2}"}}\n' for n in range(8)]
    (folder / "my_texts.jsonl").write_text("".join(lines))
    (folder / "my_run.yaml").write_text(yaml.safe_dump(SMALL_RUN))
    return folder
