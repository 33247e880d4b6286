from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sentences import language_model, seen_by_server, sentences

from leakfrontier.adversaries.text import diverse_beams
from leakfrontier.adversaries.text.diverse_beams import Candidate, Fluency, Search, search
from leakfrontier.adversaries.text.prefixes import Extended, Prefixes
from leakfrontier.adversaries.text.token_pool import TokenPool
from leakfrontier.adversaries.text.transformer import find_transformer


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_language_model_remembers_beams_that_change_places(family: str) -> None:
    view = find_transformer(seen_by_server(language_model(family), sentences([6, 5])))
    beams, tokens, rows = sentences([10] * 4), torch.arange(20), torch.tensor([1, 1, 3])
    moved = torch.cat([beams[rows, :2], beams[:3, 2:5]], dim=1)
    fluency = Fluency(view)
    fluency.scores(beams[:, :2], tokens)
    fluency.keep(rows)
    torch.testing.assert_close(
        fluency.scores(moved, tokens), Fluency(view).scores(moved, tokens), rtol=0, atol=1e-5
    )


class Told:
    """A model of which all is known: how far every token is, whatever stands before it."""

    device = torch.device("cpu")

    def __init__(self, distances: list[float], positions: int) -> None:
        self.distances, self.positions = torch.tensor(distances), positions

    def no_prefix(self) -> Prefixes:
        return Prefixes(torch.zeros(1, 0, dtype=torch.int64))

    def extend(self, prefixes: Prefixes, tokens: torch.Tensor, _: object) -> Extended:
        count, length = prefixes.tokens.shape
        vectors = self.distances[tokens].double().expand(count, -1)
        memory = torch.zeros(count, 1, length + len(tokens), 1)
        return Extended([vectors], prefixes, tokens, memory, memory)


@pytest.fixture
def no_language(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = SimpleNamespace(scores=lambda *_: 0.0, keep=lambda _: None)
    monkeypatch.setattr(diverse_beams, "Fluency", lambda _: silent)


def searched(
    distances: list[float], positions: int, how: Search, largest: float = torch.inf
) -> list[Candidate]:
    """Return what is found where tokens may be used up to a distance."""
    pool = TokenPool([torch.arange(len(distances))], [], 0.0)
    view: Any = Told(distances, positions)
    return search(view, torch.nn.Identity(), lambda x: x, lambda _, d: d <= largest, pool, how)


def plain(**options: Any) -> Search:  # noqa: ANN401 - of several types
    return Search(
        **{"width": 1, "groups": 1, "language": 0.0, "diversity": 0.0, "repetition": 0.0} | options
    )


@pytest.mark.usefixtures("no_language")
def test_one_beam_takes_the_nearest_token_at_every_step() -> None:
    (found,) = searched([0.3, 0.1, 0.2], 3, plain())
    assert found.tokens == (1, 1, 1)
    spread = float(torch.tensor([0.3, 0.1, 0.2]).double().std())
    assert found.score == pytest.approx(0.1 / spread)


@pytest.mark.usefixtures("no_language")
def test_groups_that_pay_for_what_others_chose_differ_from_them() -> None:
    same = searched([0.1, 0.11, 5.0], 2, plain(groups=2))
    assert sorted(one.tokens for one in same) == [(0, 0), (1, 0)]
    different = searched([0.1, 0.11, 5.0], 2, plain(groups=2, diversity=1.0))
    assert sorted(one.tokens for one in different) == [(0, 0), (1, 1)]


@pytest.mark.usefixtures("no_language")
def test_a_trigram_that_was_there_before_has_its_price() -> None:
    assert searched([0.1, 0.2], 4, plain())[0].tokens == (0, 0, 0, 0)
    assert searched([0.1, 0.2], 4, plain(repetition=100.0))[0].tokens == (0, 0, 0, 1)


@pytest.mark.usefixtures("no_language")
def test_all_that_is_allowed_is_kept_while_there_are_beams_for_it() -> None:
    found = searched([0.1, 0.2, 9.0], 2, plain(width=2, groups=2), largest=1.0)
    assert {one.tokens for one in found} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert found[0].tokens == (0, 0)  # the best first
    assert found[-1].tokens == (1, 1)


@pytest.mark.usefixtures("no_language")
def test_a_sentence_begins_even_where_nothing_is_allowed_and_ends_there() -> None:
    (found,) = searched([0.3, 0.1], 3, plain(), largest=0.0)
    assert found.tokens == (1,)
