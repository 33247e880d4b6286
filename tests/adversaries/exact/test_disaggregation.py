import torch
from federated import batch, deep, factors, observed, rng
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from leakfrontier.adversaries.exact.disaggregation import (
    Pool,
    deflate,
    greedy_filter,
    initial_filter,
    pattern_starts,
    solve,
)
from leakfrontier.adversaries.exact.relu_layer import Factors
from leakfrontier.defenses import Batch

SIZE = 10


def problem(size: int = SIZE, seed: int = 0) -> tuple[Batch, Factors, Tensor]:
    """Return a batch, the factors of its gradient and the true directions."""
    share, model = batch(size, seed), deep(nn.ReLU())
    found = factors(observed(model, share))
    first, rest = model[1], model[2:]  # type: ignore[index]
    hidden = first(share.inputs.flatten(1)).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy(rest(hidden), share.targets), hidden)
    return share, found, normalize(gradient.double() @ found.left, dim=1)


def test_the_true_directions_give_the_batch_and_explain_its_pattern() -> None:
    share, found, truth = problem()
    for directions in (truth, -truth):  # signs are fixed by the bias gradient
        solution = solve(found, directions)
        assert solution.coefficient == 1
        inputs = (solution.inverse @ found.right).float()
        torch.testing.assert_close(inputs, share.inputs.flatten(1), rtol=0, atol=1e-4)


def test_a_false_direction_shows_in_the_agreement() -> None:
    _, found, truth = problem()
    wrong = truth.clone()
    wrong[3] = normalize(truth[3] + truth[4], dim=0)
    agreement = solve(found, wrong).agreement
    assert agreement[3] < 0.9
    assert agreement[[0, 1, 2, 5, 6, 7, 8, 9]].min() == 1


def test_the_initial_filter_takes_the_first_independent_directions() -> None:
    directions = torch.eye(3).double()[[0, 0, 1, 1, 2]]
    directions[3] = normalize(directions[0] + directions[2], dim=0)
    assert initial_filter(directions).tolist() == [0, 2, 4]
    assert initial_filter(directions[:2]).tolist() == [0]


def test_the_greedy_filter_swaps_a_false_direction_for_a_true_one() -> None:
    _, found, truth = problem()
    wrong = truth.clone()
    wrong[3] = normalize(truth[3] + truth[4], dim=0)
    directions, solution = greedy_filter(found, wrong, truth[3:4], enough=0.99)
    assert solution.coefficient == 1
    torch.testing.assert_close(directions, truth)


def test_the_greedy_filter_takes_the_first_swap_that_helps_and_goes_on_from_there() -> None:
    _, found, truth = problem()
    mixed = torch.randn(40, SIZE, generator=rng(1)).double()
    others = normalize(torch.cat([mixed[:20], truth[[3]], mixed[20:], truth[[7, 5]]]), dim=1)
    wrong = truth.clone()
    wrong[[3, 5, 7]] = normalize(truth[[3, 5, 7]] + truth[[4, 6, 8]], dim=1)
    expected, swaps = wrong, 0
    for other in others:  # one after the other
        best = solve(found, expected)
        parts = torch.linalg.solve(expected.T, other).abs() * (best.agreement < 0.99)
        for column in parts.argsort(descending=True)[:3]:
            swapped = expected.clone()
            swapped[column] = other
            if parts[column] >= 1e-3 and solve(found, swapped).coefficient > best.coefficient:
                expected, swaps = swapped, swaps + 1
                break
    assert swaps >= 3
    directions, solution = greedy_filter(found, wrong, others, enough=0.99)
    torch.testing.assert_close(directions, expected)
    assert solution.coefficient == solve(found, expected).coefficient
    for none in (others[:0], directions[:1]):  # nothing to swap, or nothing that may be
        assert torch.equal(greedy_filter(found, directions, none, enough=0.0)[0], directions)


def test_deflation_points_to_the_missing_directions() -> None:
    _, found, truth = problem()
    known, missing = truth[:7], truth[7:]
    remainder = deflate(found, known)
    orthogonal = torch.linalg.svd(known, full_matrices=True).Vh[7:]
    captured, by_orthogonality = (
        (missing @ basis.T).norm(dim=1) for basis in (remainder.basis, orthogonal)
    )
    assert captured.min() > 0.9
    assert captured.mean() > by_orthogonality.mean()
    inverse = torch.linalg.inv(truth.T)[:7]
    cosines = (normalize(remainder.rows, dim=1) * normalize(inverse, dim=1)).sum(1)
    assert cosines.min() > 0.95
    torch.testing.assert_close((remainder.rows * known).sum(1), torch.ones(7).double())


def test_deflation_of_nothing_leaves_everything_open() -> None:
    _, found, truth = problem()
    assert len(deflate(found, truth[:0]).basis) == SIZE
    assert len(deflate(found, truth).basis) == 0


def test_a_neuron_that_one_example_activates_starts_at_its_direction() -> None:
    _, found, truth = problem(4)
    active = ~found.zeros(truth)
    alone = active.sum(0) == 1
    starts = pattern_starts(found, found.left[alone], torch.eye(4).double())
    whose = active[:, alone].double().argmax(0)
    assert len(starts) > 5
    cosines = (starts * truth[whose]).sum(1).abs()
    torch.testing.assert_close(cosines, torch.ones_like(cosines))


def test_pattern_starts_are_closer_than_rows() -> None:
    _, found, truth = problem()
    live = found.left[found.live]
    starts = pattern_starts(found, live, torch.eye(SIZE).double())
    nearest, nearest_of_rows = (
        (rows @ truth.T).abs().amax(1).mean() for rows in (starts, normalize(live, dim=1))
    )
    assert nearest > nearest_of_rows + 0.05


def test_the_pool_holds_each_direction_once_and_only_sparse_ones() -> None:
    _, found, truth = problem()
    pool = Pool(found, exact=True)
    random = normalize(torch.randn(50, SIZE, generator=rng()).double(), dim=1)
    assert not pool.add(random)
    near = normalize(truth[:6] + 1e-4 * random[:6], dim=1)
    assert pool.add(torch.cat([near, -near, truth[:6]]))
    assert len(pool.directions) == len(pool.basis) == 6
    assert not pool.add(near)
    assert pool.solution is None
    assert not pool.confirmed
    assert pool.add(truth)
    assert pool.confirmed


def test_a_false_direction_in_the_pool_gives_way_to_a_sparser_one() -> None:
    _, found, truth = problem()
    pool = Pool(found, exact=True)
    pool.add(truth[1:])
    false = normalize(truth[0] + 0.1 * truth[1], dim=0)
    pool.directions = torch.cat([pool.directions, false.unsqueeze(0)])
    pool.add(truth)
    assert pool.confirmed
    assert len(pool.directions) == SIZE
