"""The same victims throughout, as images, sounds and texts."""

import base64
import io
import json
import wave
from pathlib import Path

import pytest
from PIL import Image
from synthetic import RENDERED, SCENARIOS, SHAPE, shared_results, write_tiny

from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.foundations.rows import Media, Rendering
from leakfrontier.reports.gallery import Gallery, Tile, Token, make_gallery

MLP = SCENARIOS[1]
PROTECTED = "DPSGD noise_multiplier=1.0"


def gallery(results: Conclusions, scenario: str = MLP) -> Gallery:
    found = make_gallery(results, scenario, 0)
    assert found is not None
    return found


def content(tile: Tile, media: str) -> bytes:
    start, data = tile.source.split(",")
    assert start == f"data:{media};base64"
    return base64.b64decode(data)


def test_the_same_victims_are_shown() -> None:
    results = shared_results(scenarios=(MLP,))
    found = gallery(results)
    truth, prior = found.references
    assert (truth.name, prior.name) == ("truth", "prior guess")
    assert len(truth.tiles) == 6 < RENDERED
    assert next(iter(found.defenses)) == "none"
    undefended = found.defenses["none"][0]
    assert all(tile.identified for tile in undefended.tiles)
    assert [tile.source for tile in undefended.tiles] == [tile.source for tile in truth.tiles]
    protected = found.defenses[PROTECTED][0]
    assert not any(tile.identified for tile in protected.tiles)
    first = results.renderings.sort_values(["victim", "seed", "observation"]).iloc[0]
    shown = content(truth.tiles[0], "image/png")
    assert shown == first["truth"]
    assert Image.open(io.BytesIO(shown)).size == SHAPE[1:]


def test_sounds_can_be_played() -> None:
    found = gallery(shared_results(scenarios=(MLP,), media="audio/wav"))
    assert found.media == "audio/wav"
    for strip in (found.references[0], found.defenses[PROTECTED][0]):
        assert len(strip.tiles) == 2
        with wave.open(io.BytesIO(content(strip.tiles[0], "audio/wav"))) as file:
            assert (file.getframerate(), file.getnframes()) == (8000, 4000)


def test_wrong_tokens_are_marked() -> None:
    found = gallery(shared_results(scenarios=(MLP,), media="tokens"))
    truth = found.references[0].tiles[0]
    assert truth.tokens == tuple(Token(text) for text in ("to ", "be ", "<or> ", "not"))
    guess = found.defenses[PROTECTED][0].tiles[0]
    assert guess.tokens == (
        Token("to "),
        Token("&", wrong=True),
        Token("or ", wrong=True),
        Token("nit", wrong=True),
    )
    assert found.defenses["none"][0].tiles[0].tokens == truth.tokens


@pytest.mark.parametrize(
    ("guess", "wrong"), [(["a"], [False, True]), (["a", "b", "c"], [False, False, True])]
)
def test_texts_of_another_length_are_wrong_beyond(
    tmp_path: Path, guess: list[str], wrong: list[bool]
) -> None:
    media: Media = "tokens"
    rendering = Rendering(0, 0, media, b'["a", "b"]', json.dumps(guess).encode())
    arms = [("none", "none", None, 900, [True])]
    found = gallery(write_tiny(tmp_path, arms, renderings=(rendering,)), "tiny/model")
    assert [token.wrong for token in found.defenses["none"][0].tiles[0].tokens] == wrong


def test_what_is_absent_says_why() -> None:
    results = shared_results(scenarios=(MLP,), cascade=True)
    strips = {strip.name: strip for strip in gallery(results).defenses["TopK ratio=0.1"]}
    later = strips["InvertingGradients (knows defense)"]
    assert {tile.absent for tile in later.tiles} == {"", "not needed"}
    assert {tile.absent for tile in strips["LinearLeakage"].tiles} == {""}


def test_without_renderings_there_is_no_gallery(tmp_path: Path) -> None:
    results = write_tiny(tmp_path, [("none", "none", None, 900, [True])])
    assert make_gallery(results, "tiny/model", 0) is None
