import pytest
import torch

from leakfrontier.adversaries import ADVERSARIES
from leakfrontier.evaluate.data.data import load_dataset
from leakfrontier.evaluate.papers import dager, somp
from leakfrontier.evaluate.users.methods import Method, build_adversary
from leakfrontier.evaluate.world.scenario import Scenario

ALL = [*somp.TABLES, *dager.TABLES]


@pytest.mark.parametrize("table", ALL, ids=lambda table: table.name)
def test_every_row_names_an_attack_that_there_is(table: somp.Table) -> None:
    for row in table.rows:
        for model, procedure in table.procedures.items():
            options = dict(procedure(row.method))
            assert options.pop("model") == model
            name = options.pop("attack")
            assert name in ADVERSARIES
            build_adversary(Method(name=name, options=options))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tables' model be a small one that reads words."""
    model = Method(name="gpt2", options={"layers": 2, "width": 96, "heads": 4})
    monkeypatch.setattr(somp, "MODELS", {"small": model})
    monkeypatch.setattr(somp, "Scenario", lambda **o: Scenario(**{**o, "tokenizer": "words"}))


@pytest.mark.parametrize("more", [{}, {"sigma": 10.0}, {"E": 2, "eta": 1e-4, "B_mini": 1}])
@pytest.mark.usefixtures("small")
def test_a_trial(more: dict[str, float]) -> None:
    problem = {"dataset": "cola", "B": 2, **more}
    method = {"attack": "PriorGuess" if "sigma" in more else "DAGER", "model": "small"}
    rng = torch.Generator().manual_seed(0)
    scores = somp.text_trial(problem, method, load_dataset("messages"), rng)
    assert len(scores["rouge1"]) == 2
    assert scores["seconds"][0] >= 0
    if not more:
        assert scores["exact"] == [1.0, 1.0]
    assert (scores["noise"][0] > 1) == ("sigma" in more)


@pytest.mark.usefixtures("small")
def test_texts_without_a_score_are_not_worth_0(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = torch.tensor([torch.nan, 1.0], dtype=torch.float64)
    scores = dict.fromkeys(somp.METRICS, missing)
    monkeypatch.setattr(
        "leakfrontier.evaluate.modality.modality.Text.scores", lambda *given: scores
    )
    problem, rng = {"dataset": "cola", "B": 2}, torch.Generator().manual_seed(0)
    method = {"attack": "PriorGuess", "model": "small"}
    found = somp.text_trial(problem, method, load_dataset("messages"), rng)
    assert found["rouge2"] == [1.0]
