from pathlib import Path

import pytest
from jinja2 import DictLoader, UndefinedError
from markupsafe import Markup

from leakfrontier.reports import charts, html


@pytest.fixture(autouse=True)
def templates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render short templates, without the scripts that take seconds to bundle."""
    known = {
        "title": "<h1>{{ title }}</h1>",
        "numbers": "{{ text | unbroken }}",
        "style": "{% for name, light, dark in palette %}{{ name }}:{{ dark }};{% endfor %}",
        "script": "<script>{{ bundle }}</script>",
    }
    monkeypatch.setattr(html, "PackageLoader", lambda _: DictLoader(known))
    monkeypatch.setattr(html, "javascript", lambda: Markup("draw() && 1"))


def test_values_are_escaped_and_markup_is_not() -> None:
    assert html.render("title", title="<b> & co") == "<h1>&lt;b&gt; &amp; co</h1>"
    assert html.render("title", title=Markup("<b>x</b>")) == "<h1><b>x</b></h1>"
    assert html.render("script") == "<script>draw() && 1</script>"


def test_a_value_that_was_forgotten_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'title' is undefined"):
        html.render("title")


def test_every_colour_has_its_counterpart_in_the_dark() -> None:
    style = html.render("style")
    for light, dark in charts.DARK.items():
        assert f"{charts.variable_name(light)}:{dark};" in style


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        ("12 % of 3 words", "12_% of 3 words"),
        ("[0.1, 0.25] and a, b", "[0.1,_0.25] and a, b"),
        ("p = 0.3, n = x", "p =_0.3, n = x"),
        ("[1, -2.5]", "[1,_-2.5]"),
    ],
)
def test_numbers_stay_on_one_line(text: str, joined: str) -> None:
    assert html.render("numbers", text=text) == joined.replace("_", "\u00a0")


def test_markup_stays_markup_when_numbers_are_joined() -> None:
    assert html.render("numbers", text=Markup("<b>5 %</b>")) == "<b>5\u00a0%</b>"
    assert html.render("numbers", text="<b>5 %</b>") == "&lt;b&gt;5\u00a0%&lt;/b&gt;"


def test_a_file_appears_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "page.html"
    html.write(path, b"first")
    assert path.read_bytes() == b"first"
    assert [*path.parent.iterdir()] == [path]

    real = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        real(path, content[:3])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space left"):
        html.write(path, b"second")
    assert path.read_bytes() == b"first"


def test_scripts_cannot_end_their_element(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("LEAKFRONTIER_CACHE", str(tmp_path))
    monkeypatch.setattr(html.vl_convert, "javascript_bundle", lambda *_, **__: "'</script>'")
    assert html.javascript.__wrapped__() == "'<\\/script>'"
