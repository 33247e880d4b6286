import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from federated import SPACE, batch, convolutional, mlp, rng
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from leakfrontier.defenses import Batch
from leakfrontier.defenses.ats import ATS
from leakfrontier.defenses.ats_search import (
    ScoredPolicy,
    accuracy_score,
    draw_policies,
    privacy_score,
    search,
)

QUIET = Console(file=io.StringIO())
FOUND = [ScoredPolicy("3-1-7", 0.1, 0.5, 0.02, -1.2), ScoredPolicy("", 0.4, 0.7, 0.0, -1.0)]


def labelled(per_class: int = 3) -> Batch:
    data = batch(10 * per_class)
    return Batch(data.inputs, torch.arange(10).repeat(per_class))


def quick_search(seed: int = 0, console: Console = QUIET, **options: float) -> list[ScoredPolicy]:
    settings = {"candidates": 8, "steps": 2, "images": 10, "tolerance": 10.0, **options}
    return search(
        convolutional(),
        convolutional(),
        cross_entropy,
        labelled(),
        SPACE,
        rng(seed),
        console=console,
        **settings,  # type: ignore[arg-type]
    )


def gradients(model: nn.Module, example: Tensor, target: Tensor) -> list[Tensor]:
    value = cross_entropy(model(example[None]), target[None])
    return [g.flatten() for g in torch.autograd.grad(value, list(model.parameters()))]


def test_privacy_score_is_the_area_under_the_similarity() -> None:
    model, data, steps = convolutional(), batch(2), 4
    draws = rng(5)
    noise = SPACE.to_inputs(torch.rand(data.inputs.shape, generator=draws))
    ends = ATS("3-1-7").for_space(SPACE.mean, SPACE.std).on_batch(data, draws).inputs
    expected = []
    for start, end, target in zip(noise, ends, data.targets, strict=True):
        goal = gradients(model, end, target)
        curve = []
        for i in range(steps + 1):
            here = gradients(model, start + i / steps * (end - start), target)
            cosines = [cosine_similarity(*pair, dim=0) for pair in zip(here, goal, strict=True)]
            curve.append(float(torch.stack(cosines).mean()))
        expected.append(np.trapezoid(curve, dx=1 / steps))
    scores = privacy_score(model, cross_entropy, data, "3-1-7", SPACE, rng(5), steps)
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-4)
    assert (scores < 1).all()


def test_all_policies_start_at_the_same_noise() -> None:
    model, data = convolutional(), batch(4)
    nothing, also_nothing = (
        privacy_score(model, cross_entropy, data, policy, SPACE, rng(1), 3)
        for policy in ("", "28-39")
    )
    torch.testing.assert_close(nothing, also_nothing, rtol=1e-4, atol=1e-6)


def test_accuracy_score_is_that_of_the_eigenvalues() -> None:
    model, data = mlp(), batch(12)
    moved = ATS("0-10").for_space(SPACE.mean, SPACE.std).on_batch(data, rng(2)).inputs
    rows = []
    for example in moved:
        leaf = example[None].clone().requires_grad_()
        rows.append(torch.autograd.grad(model(leaf).sum(), leaf)[0].flatten().numpy())
    values = np.linalg.eigvals(np.corrcoef(np.stack(rows))).real + 1e-5
    expected = -(np.log(values) + 1 / values).mean()
    assert accuracy_score(model, data, "0-10", SPACE, rng(2)) == pytest.approx(expected, rel=1e-3)


def test_accuracy_score_is_best_for_independent_responses() -> None:
    assert -1.6 < accuracy_score(mlp(300), batch(6), "", SPACE, rng()) <= -1
    alike = Batch(batch(1).inputs.repeat(6, 1, 1, 1), torch.zeros(6))
    assert accuracy_score(mlp(300), alike, "", SPACE, rng()) < -1000
    dead = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
    nn.init.zeros_(dead[1].weight)
    assert accuracy_score(dead, batch(6), "", SPACE, rng()) < -1000


def test_search_ranks_by_mean_and_variance() -> None:
    found = quick_search(candidates=12)
    assert len(found) > 3
    assert [one.rank for one in found] == sorted(one.rank for one in found)
    columns = np.array([[one.privacy, one.variance] for one in found])
    unit = (columns - columns.min(0)) / np.ptp(columns, axis=0)
    np.testing.assert_allclose([one.rank for one in found], unit @ [0.7, 0.3], atol=1e-5)


def test_search_is_seeded_and_leaves_models_alone() -> None:
    assert quick_search(seed=1) == quick_search(seed=1)
    assert quick_search(seed=1) != quick_search(seed=2)
    model = convolutional().train()
    search(
        model,
        model,
        cross_entropy,
        labelled(),
        SPACE,
        rng(),
        candidates=2,
        steps=1,
        tolerance=100,
        console=QUIET,
    )
    assert model.training


def test_search_accepts_only_what_spares_accuracy() -> None:
    strict, lenient = quick_search(tolerance=1.05), quick_search(tolerance=10.0)
    kept = {one.policy for one in strict}
    refused = [one for one in lenient if one.policy not in kept]
    assert strict
    assert refused
    assert min(one.accuracy for one in strict) > max(one.accuracy for one in refused)


def test_search_shows_progress_and_time_left() -> None:
    out = io.StringIO()
    quick_search(console=Console(file=out, force_terminal=True, width=100))
    assert "8/8" in out.getvalue()
    assert "left" in out.getvalue()


def test_says_so_if_nothing_is_accepted() -> None:
    with pytest.raises(ValueError, match=r"none of 1 policies has an accuracy score .* tolerance"):
        search(
            mlp(),
            mlp(),
            cross_entropy,
            labelled(),
            SPACE,
            rng(3),
            candidates=1,
            steps=1,
            tolerance=1.0,
            console=QUIET,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": 0}, "candidates must be at least 1"),
        ({"per_class": 0}, "per_class must be at least 1"),
        ({"per_class": 4}, "per_class must be at most 3, got 4"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"images": 1}, "at least 2 images"),
        ({"tolerance": float("nan")}, r"tolerance must be in \[1, inf\)"),
    ],
)
def test_rejects_bad_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quick_search(**options)


def test_policies_have_up_to_three_entries_of_the_pool() -> None:
    drawn = draw_policies(3000, rng())
    assert len(set(drawn)) == len(drawn)
    entries = [[int(entry) for entry in policy.split("-") if policy] for policy in drawn]
    assert {len(one) for one in entries} >= {1, 2, 3}
    assert {entry for one in entries for entry in one} == set(range(50))


def test_scores_must_be_finite() -> None:
    with pytest.raises(ValueError, match="privacy must be finite"):
        replace(FOUND[0], privacy=float("nan"))
