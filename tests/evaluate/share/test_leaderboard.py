"""Places: by leakage at equal utility, ties as ties, and nothing for what fails its own checks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from packing import make_pack, packed
from synthetic import SCENARIOS, make_results, write_tiny

from leakfrontier.adversaries import PANEL
from leakfrontier.evaluate.foundations.errors import UserError
from leakfrontier.evaluate.run.store import Store
from leakfrontier.evaluate.share import leaderboard
from leakfrontier.evaluate.share.judgement import Decision
from leakfrontier.evaluate.share.leaderboard import make_settings
from leakfrontier.evaluate.share.pack import Pack, read_pack
from leakfrontier.evaluate.share.statement import Stated, Statement
from leakfrontier.reports.tables import headline_table

NOBODY, HALF, ALL = [False] * 40, [True] * 20 + [False] * 20, [True] * 40


def tiny_pack(folder: Path, name: str, arms: list[tuple[str, int, list[bool]]]) -> Pack:
    """Return a pack of defenses with their right answers of 1000, and who is identified."""
    folder = folder / name
    folder.mkdir()
    write_tiny(
        folder,
        [(label, label.partition("(")[0], None, correct, found) for label, correct, found in arms],
        seeds=2,
    )
    return read_pack(packed(Store(folder).results(), folder / f"{name}.zip"))


def places(*packs: Pack) -> pd.DataFrame:
    (setting,) = make_settings(packs)
    table = setting.table[setting.table["server"] == "passive"]
    return table.set_index("defense")


def test_who_leaks_less_at_equal_utility_comes_first(tmp_path: Path) -> None:
    arms = [
        ("none", 800, ALL),
        ("Good", 800, NOBODY),
        ("Middling", 800, HALF),
        ("Dear", 600, NOBODY),
        ("Cheap", 900, HALF),
        ("Useless", 700, ALL),
    ]
    table = places(tiny_pack(tmp_path, "one", arms))
    assert table["place"].dropna().to_dict() == {"Good": 1, "Cheap": 1, "Dear": 1, "Middling": 2}
    assert table.loc["Good", "tied"] == 2
    assert table.loc["Good", "verdict"] == "Pareto-optimal"
    assert table.loc["Middling", "dominated"] in ("Good", "Cheap")
    assert table.loc["Dear", "verdict"] == "dominated by Good"  # as private, less accurate
    assert table.loc["Useless", "verdict"] == "no privacy gain shown (less accurate)"
    assert table.loc["none", "verdict"] == "undefended control"
    assert [*table.index[:2]] == ["Good", "Cheap"]  # dominated ones come after those that are not


ARMS = [
    ("none", 800, ALL),
    ("Accurate", 900, ALL),
    ("Good", 700, NOBODY),
    ("Near", 705, [True] * 2 + [False] * 38),
    ("Same", 690, NOBODY),
    ("Dear", 500, NOBODY),
    ("Leaky", 700, HALF),
]


def test_a_row_has_one_verdict_wherever_it_stands(tmp_path: Path) -> None:
    pack = tiny_pack(tmp_path, "one", ARMS)
    table, points = places(pack), pack.results.frontier().points.set_index("defense")
    assert points["verdict"].to_dict() == table["verdict"].to_dict()
    assert table["verdict"].to_dict() == {
        "none": "undefended control",
        "Accurate": "no privacy gain shown (more accurate)",  # it protects nobody
        "Good": "Pareto-optimal",
        "Near": "Pareto-optimal",
        "Same": "tied with Good",
        "Dear": "dominated by Good",
        "Leaky": "dominated by Good",
    }
    assert (table["place"] == 1).to_dict() == {
        name: name in ("Good", "Near", "Same", "Dear") for name in table.index
    }
    assert pd.isna(table.loc["Accurate", "place"])
    defended = points[~points["control"]]
    assert (defended["pareto"] == (defended["verdict"] == "Pareto-optimal")).all()
    judged = defended.index.isin(table.index[table["place"].notna()])
    assert (defended["p_pareto"].notna() == judged).all()
    marks = headline_table(points.reset_index())
    for line, mark in zip(marks.rows, marks.marks, strict=True):
        assert (mark == "pareto") == (line[-1] == "Pareto-optimal")


def test_across_packs_intervals_decide(tmp_path: Path) -> None:
    few = [True] * 3 + [False] * 37
    first = tiny_pack(tmp_path, "one", [("none", 800, ALL), ("Good", 800, NOBODY)])
    second = tiny_pack(
        tmp_path, "two", [("none", 800, ALL), ("Near", 800, few), ("Bad", 800, HALF)]
    )
    table = places(first, second)
    assert table["place"].dropna().to_dict() == {"Good": 1, "Near": 1, "Bad": 3}
    assert table.loc["Good", "tied"] == table.loc["Near", "tied"] == 1
    assert (table.index == "none").sum() == 1  # measured alike by both
    alone = places(second)
    assert alone["place"].dropna().to_dict() == {"Near": 1, "Bad": 2}


def test_across_packs_one_seed_shows_no_difference_in_accuracy(tmp_path: Path) -> None:
    packs = []
    for name, correct in {"Cheap": 800, "Dear": 500}.items():
        folder = tmp_path / name
        folder.mkdir()
        arms = [("none", "none", None, 800, ALL), (name, name, None, correct, NOBODY)]
        write_tiny(folder, arms)
        packs.append(read_pack(packed(Store(folder).results(), folder / f"{name}.zip")))
    assert places(*packs).loc["Dear", "verdict"] == "tied with Cheap"
    more = [
        tiny_pack(tmp_path, one, [("none", 800, ALL), (one, correct, NOBODY)])
        for one, correct in {"A": 800, "B": 500}.items()
    ]
    assert places(*more).loc["B", "verdict"] == "dominated by A"


def test_proven_defenses_have_places_of_their_own(tmp_path: Path) -> None:
    options = {"guaranteed": True, "bound": 0.9}
    _, path = make_pack(tmp_path, scenarios=SCENARIOS[1:], observations=20, **options)
    table = places(read_pack(path))
    private = table["evidence"] == "proven"
    assert [*table["epsilon"][private]] == [4.0]  # of 400, 40 and 4
    assert table.index[0] == table.index[private][0]
    assert (table.loc[private, "place"] == 1).all()
    assert (table["gamma_upload"] == private.map({True: 0.9, False: 1.0})).all()
    assert table.loc[~private, "place"].min() == 1
    assert not table["dominated"][private].any()


def test_what_was_measured_differently_is_shown_twice(tmp_path: Path) -> None:
    first = tiny_pack(tmp_path, "one", [("none", 800, ALL), ("Good", 800, NOBODY)])
    second = tiny_pack(tmp_path, "two", [("none", 700, ALL), ("Good", 700, NOBODY)])
    table = places(first, second)
    assert (table.index == "Good").sum() == 2
    assert {*table.loc["Good", "pack"]} == {"one", "two"}


def test_a_failed_evaluation_has_no_place(tmp_path: Path) -> None:
    sound = tiny_pack(tmp_path, "sound", [("none", 800, ALL), ("Good", 800, HALF)])
    weak = tiny_pack(tmp_path, "weak", [("none", 800, NOBODY), ("Best", 900, NOBODY)])
    table = places(sound, weak)
    assert table.loc["Best", "evaluation"] == "fail"  # nothing works undefended either
    assert pd.isna(table.loc["Best", "place"])
    assert table.loc["Best", "verdict"] == ("its evaluation fails its checks (undefended control)")
    assert table.loc["Good", "place"] == 1  # and it beats nobody


@pytest.mark.parametrize("first", ["sound", "weak"])
def test_a_failed_evaluation_takes_no_place_away(tmp_path: Path, first: str) -> None:
    packs = [
        tiny_pack(tmp_path, "sound", [("none", 800, ALL), ("Good", 800, HALF)]),
        tiny_pack(tmp_path, "weak", [("none", 800, NOBODY), ("Good", 800, HALF)]),
    ]
    packs.sort(key=lambda pack: pack.name != first)
    good = places(*packs).loc["Good"]  # measured alike by both
    assert (good["pack"], good["place"]) == ("sound", 1)
    assert good["evaluation"] != "fail"


def test_packs_meet_in_a_scenario_whoever_takes_part_in_it() -> None:
    scenario = {"dataset": "digits", "title": "mine", "training": {"lr": 0.1, "rounds": 2}}
    joined = {**scenario, "defenses": ["TopK"], "title": "yours"}
    joined["training"] = {"lr": 0.1, "rounds": 2, "defense_lr": {"Mine(level=2)": 0.5}}
    same = leaderboard._scenario_digest(scenario)
    assert leaderboard._scenario_digest(joined, {"Mine"}) == same
    assert leaderboard._scenario_digest(joined) != same
    for name, other in {"dataset": "fashion-mini", "training": {"lr": 0.2, "rounds": 2}}.items():
        assert leaderboard._scenario_digest({**scenario, name: other}) != same


def test_the_rates_of_rivals_are_part_of_a_setting() -> None:
    """Otherwise a pack could give DP-SGD a bad rate."""
    scenario = {"dataset": "digits", "training": {"lr": 0.1, "defense_lr": {"DPSGD": 0.005}}}
    bad = {"dataset": "digits", "training": {"lr": 0.1, "defense_lr": {"DPSGD": 5.0}}}
    assert leaderboard._scenario_digest(scenario) != leaderboard._scenario_digest(bad)
    config = {
        "defenses": ["none", {"name": "sources/0/mine.py:Mine", "level": 2}, {"name": "DPSGD"}],
        "scenarios": [{"defenses": [{"name": "Chain", "links": [{"name": "a.py:Linked"}]}]}],
    }
    assert leaderboard._own_defenses(config) == {"Mine", "Linked"}
    config["defenses"] = [{"name": "evil.py:DPSGD"}]
    assert leaderboard._own_defenses(config) == {"Linked"}


@pytest.mark.parametrize("few", [{"observations": 4}, {"seeds": (0,)}], ids=str)
def test_packs_of_fewer_uploads_or_seeds_are_ranked_apart(
    tmp_path: Path, few: dict[str, Any]
) -> None:
    packs = []
    for name, change in {"many": {}, "few": few}.items():
        (tmp_path / name).mkdir()
        options = {"scenarios": SCENARIOS[1:], "observations": 6, **change}
        packs.append(read_pack(make_pack(tmp_path / name, name, **options)[1]))
    many, less = make_settings(packs)
    assert [one.pack for one in many.evaluations] == ["many"]
    assert (many.uploads, many.seeds) == (12, 2)
    assert many.extent == "12 uploads, 2 seeds"
    assert (less.uploads, less.seeds) in ((8, 2), (6, 1))
    one_seed = [replace(many, uploads=6, seeds=1).extent]
    assert one_seed == ["6 uploads, 1 seed"]


def statement(key: str, **outcomes: Decision) -> Statement:
    """Return a statement on the defenses of a tiny pack."""
    claims = [
        Stated("fashion-mini/mlp", 0, name, decision, (3, 3), (1, 1), 4, "")
        for name, decision in outcomes.items()
    ]
    return Statement(key, "2026-01-01T00:00:00Z", {}, tuple(claims), ())


def test_unverified_defenses_are_ranked_apart(tmp_path: Path) -> None:
    """Not even the best of them takes a place from a verified one."""
    arms = [("none", 800, ALL), ("Good", 800, HALF), ("Great", 900, NOBODY)]
    pack = tiny_pack(tmp_path, "one", arms)
    scenario = pack.results.frontiers()[0].scenario
    statements = [
        replace(one, claims=tuple(replace(claim, scenario=scenario) for claim in one.claims))
        for one in (
            statement("a", none="confirmed", Good="confirmed"),
            statement("b", none="confirmed", Good="confirmed", Great="undecided"),
            statement("b", none="confirmed", Good="confirmed"),  # the same key
            statement("c", Great="confirmed"),  # without the control
        )
    ]

    def table(*chosen: Statement) -> pd.DataFrame:
        (setting,) = make_settings([pack], {"one": chosen})
        return setting.table[setting.table["server"] == "passive"].set_index("defense")

    unverified = table()
    assert unverified["verified"].eq(0).all()
    assert unverified["place"].dropna().to_dict() == {"Great": 1, "Good": 2}
    found = table(*statements)
    assert found["verified"].to_dict() == {"none": 2, "Good": 2, "Great": 0}
    assert found["place"].dropna().to_dict() == {"Good": 1, "Great": 1}
    assert found.loc["Good", "verdict"] == "Pareto-optimal"
    assert [*found.index].index("Good") < [*found.index].index("Great")
    refuting = replace(
        statements[0], key="d", claims=(replace(statements[0].claims[1], decision="refuted"),)
    )
    disputed = table(*statements, refuting)
    assert disputed.loc["Good", ["verified", "refuted_by"]].tolist() == [2, 1]
    assert disputed["place"].dropna().to_dict() == {"Great": 1, "Good": 2}  # together again
    control = replace(refuting, claims=(replace(refuting.claims[0], defense="none"),))
    assert table(*statements, control)["refuted_by"].eq(1).all()
    wrong = replace(statements[0], key="e", problems=("a table does not follow",))
    assert table(*statements, wrong)["refuted_by"].eq(1).all()


def test_a_place_counts_all_servers(tmp_path: Path) -> None:
    _, path = make_pack(tmp_path, scenarios=SCENARIOS[1:], active=True, observations=20)
    for setting in make_settings([read_pack(path)]):
        passive, crafted, architecture = (
            setting.table[setting.table["server"] == server].set_index("defense")
            for server in ("passive", "parameters", "architecture")
        )
        assert (crafted["success"] == 1).all()  # that attack never fails
        assert architecture["success"].isna().all()
        for table in (crafted, architecture):
            pd.testing.assert_series_equal(table["place"], passive["place"], check_like=True)
            assert table["verdict"].to_dict() == passive["verdict"].to_dict()
            assert table["beside"].isna().all()
        assert passive["place"].notna().sum() >= 2
        assert passive["candidates_text"].eq("unknown").all()
        beside = passive["beside"].dropna()
        assert {*beside.index} == {"TopK(ratio=0.5)", "TopK(ratio=0.1)"}
        assert passive.loc[beside.index, "partner"].str.startswith("DPSGD").all()


def test_checks_are_those_of_the_setting(tmp_path: Path) -> None:
    results = make_results(tmp_path, checkpoints=(0, 40))
    part = results.part("fashion-mini/mlp", 40)
    assert part.attacks["checkpoint"].eq(40).all()
    assert {*part.cells["scenario"]} == {"fashion-mini/mlp"}
    assert len(part.utility) == len(results.utility) // 2
    assert part.frontiers()[0].points["success"].tolist() == (
        results.frontier("fashion-mini/mlp", 40).points["success"].tolist()
    )


def test_packs_of_two_panels_do_not_compare(tmp_path: Path) -> None:
    one = tiny_pack(tmp_path, "one", [("none", 800, ALL)])
    two = tiny_pack(tmp_path, "two", [("none", 800, ALL)])
    other = Pack("two", {**two.meta, "panel": "panel-2"}, two.entries)
    with pytest.raises(UserError, match="packs must be of one panel"):
        make_settings([one, other])
    fewer = {**two.meta["config"], "adversaries": [{"name": "PriorGuess"}]}
    other = Pack("two", {**two.meta, "config": fewer}, two.entries)
    with pytest.raises(UserError, match=r"packs must be of one panel.*PriorGuess"):
        make_settings([one, other])
    with pytest.raises(UserError, match="two packs are called 'one'"):
        make_settings([one, one])


def test_panels_that_differ_on_texts_alone_compare_on_all_else(tmp_path: Path) -> None:
    pack = tiny_pack(tmp_path, "one", [("none", 800, ALL)])

    def of(version: str, media: str | None) -> Pack:
        header = "number,observation,victim,media,truth,guess\n"
        shown = header + (f"0,0,0,{media},truth,guess\n" if media else "")
        entries = {
            **pack.entries,
            "rows/renderings.csv": shown.encode(),
            "truth": b"",
            "guess": b"",
        }
        return Pack(version, {**pack.meta, "panel": version}, entries)

    (earlier,) = PANEL.alike
    assert len(make_settings([of(one, "image/png") for one in (earlier, PANEL.version)])) == 1
    for media in ("tokens", None):  # or it is not known what is attacked
        with pytest.raises(UserError, match="packs must be of one panel"):
            make_settings([of(one, media) for one in (earlier, PANEL.version)])
    assert of(f"custom ({earlier})", "image/png").comparable == f"custom ({PANEL.version})"
    assert of(f"{earlier}1", "image/png").comparable == f"{earlier}1"
