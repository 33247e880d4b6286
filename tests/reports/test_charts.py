import json

import altair as alt
import pandas as pd
import pytest

from leakfrontier.reports.charts import (
    COLOURS,
    CONTROL,
    DARK,
    INK,
    NARROW,
    PAPER,
    Figure,
    family_colours,
    grid,
    share,
    slug,
    styled,
    unvalidated,
    variable_name,
)


def panel(name: str = "a") -> alt.LayerChart:
    points = pd.DataFrame({"x": [1, 2], "y": [0.5, 1.0], "name": [name, "</script>"]})
    dots = alt.Chart(points).mark_point(color=COLOURS[0]).encode(x="x", y=share("y", "how many"))
    return alt.layer(dots, dots.mark_text().encode(text="name"))


def figure(**options: object) -> Figure:
    with unvalidated():
        return Figure("name", "Title", "a < b", styled(panel()), **options)  # type: ignore[arg-type]


def test_data_is_apart_and_each_once() -> None:
    with unvalidated():
        spec = Figure("n", "t", "c", alt.concat(one := panel(), one, panel("b"))).spec
    assert [len(rows) for rows in spec["datasets"].values()] == [2, 2]
    assert "values" not in json.dumps({**spec, "datasets": None})


def test_json_for_a_page_is_safe_in_a_script_and_follows_the_colour_scheme() -> None:
    text = figure().page_spec()
    assert "<" not in text
    spec = json.loads(text)
    (rows,) = spec["datasets"].values()
    assert rows[1]["name"] == "</script>"
    assert spec["config"]["background"] == f"var({variable_name(PAPER)},{PAPER})"
    assert figure().spec["config"]["background"] == PAPER  # in files it is light


def test_only_fluid_figures_are_as_wide_as_there_is_room() -> None:
    assert json.loads(figure(layout="fluid").page_spec())["width"] == "container"
    assert "width" not in json.loads(figure(layout="scroll").page_spec())


def test_a_narrow_figure_is_there_if_it_is_another_one() -> None:
    assert figure().narrow_spec() == ""
    with unvalidated():
        both = Figure("n", "t", "c", *grid([panel()] * 2))
        assert [one["width"] for one in both.spec["concat"]] == [420, 420]
        small = json.loads(both.narrow_spec())
    assert small["columns"] == 1
    assert {one["width"] for one in small["concat"]} == {NARROW - 20}


@pytest.mark.parametrize(("count", "columns", "width"), [(1, 1, 460), (4, 3, 275)])
def test_few_panels_are_wider(count: int, columns: int, width: int) -> None:
    with unvalidated():
        spec = Figure("n", "t", "c", grid([panel()] * count)[0]).spec
    assert spec["columns"] == columns
    assert {one["width"] for one in spec["concat"]} == {width}


def test_a_notebook_shows_the_drawing_and_an_escaped_caption() -> None:
    one = figure()
    vars(one)["svg"] = "<svg/>"  # which takes a while to draw
    assert one._repr_html_() == "<figure><svg/><figcaption>a &lt; b</figcaption></figure>"


def test_the_control_is_dark_and_families_differ() -> None:
    families = [*"abcdefgh"]
    arms = pd.DataFrame({"family": ["none", *families], "control": [True] + [False] * 8})
    colours = family_colours(arms)
    assert colours["none"] == CONTROL
    assert [*colours][-1] == "none"
    assert len({colours[name] for name in families[:7]}) == 7
    assert colours["h"] == colours["a"]  # there are no more


def test_every_colour_of_charts_has_one_in_the_dark() -> None:
    assert {*COLOURS, CONTROL, INK, PAPER} <= {*DARK}
    assert len({variable_name(colour) for colour in DARK}) == len(DARK)
    assert variable_name("#D55E00") == "--c-d55e00"


@pytest.mark.parametrize(
    ("text", "name"),
    [("a/B c", "a-b-c"), ("../etc", "etc"), ("fashion-mini/mlp", "fashion-mini-mlp")],
)
def test_names_of_files_are_safe(text: str, name: str) -> None:
    assert slug(text) == name
