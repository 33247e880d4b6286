"""A run in one picture."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from packing import make_pack
from PIL import Image
from synthetic import SCENARIOS, make_results, write_tiny

from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.foundations.errors import UserError
from leakfrontier.reports.picture import picture, write_picture

Command = Callable[..., tuple[int, str, str]]
MLP = SCENARIOS[1]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Conclusions]:
    folder = tmp_path_factory.mktemp("run")
    return folder, make_results(folder)


def test_it_has_the_verdict_the_frontier_and_the_gallery(run: tuple[Path, Conclusions]) -> None:
    svg = picture(run[1], MLP)
    root = ElementTree.fromstring(svg)
    words = " ".join("".join(text.itertext()) for text in root.iter(f"{SVG}text"))
    for part in (
        "without a defense, attacks from nothing identify 100.0 % [83.2, 100.0] of the victims",
        "Evaluation: YES. Adversary panel panel-1",
        "DPSGD 1.0",  # beside its point and its victims
        "<= 16.8 %",
    ):
        assert part in words, part
    images = list(root.iter(f"{SVG}image"))
    assert len(images) == 5 * 7  # victims, under the truth and six defenses
    assert all(image.get("href", "").startswith("data:image/png") for image in images)
    width = float(root.get("width", "0"))
    rights = [float(image.get("x", "0")) + float(image.get("width", "0")) for image in images]
    assert max(rights) < width
    assert 'stroke="#D55E00" stroke-width="3"' in svg
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", svg)


def test_the_command_writes_it(
    run: tuple[Path, Conclusions], command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "picture.png"
    code, output, errors = command("report", run[0], "--picture", path, "--scenario", MLP)
    assert code == 0, errors
    assert f"Picture: {path}" in output.replace("\n", "")
    image = Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
    assert min(image.size) > 1000
    colours = {colour for _, colour in image.getcolors(maxcolors=10**7) or []}
    assert {(213, 94, 0), (0, 114, 178)} <= colours  # a frame of the gallery, a family's points


def test_a_pack_will_do(command: Command, tmp_path: Path) -> None:
    _, pack = make_pack(tmp_path)
    code, output, errors = command("report", pack, "--picture", tmp_path / "picture.svg")
    assert code == 0, errors
    assert "Evaluation: YES" in output
    assert (tmp_path / "picture.svg").read_text().count("<image ") >= 2 * 4
    code, _, errors = command("report", pack)
    assert code == 2
    assert "has no results.sqlite" in errors


def test_mistakes_are_named(
    run: tuple[Path, Conclusions], command: Command, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"must be \.svg or \.png"):
        write_picture(run[1], tmp_path / "picture.pdf")
    with pytest.raises(UserError, match="no scenario 'other'; it has fashion-mini/lenet, fashion"):
        write_picture(run[1], tmp_path / "picture.svg", "other")
    code, _, errors = command("report", run[0], "--scenario", MLP)
    assert code == 2
    assert "--scenario needs --picture" in errors
    empty = make_results(tmp_path / "empty", scenarios=(MLP,), missing=1000)
    with pytest.raises(UserError, match="nothing"):
        picture(empty)


def test_without_images_there_is_the_frontier_alone(tmp_path: Path) -> None:
    svg = picture(write_tiny(tmp_path, [("none", "none", None, 900, [True] * 4)]))
    assert "<image" not in svg
    assert "no defense" in svg
