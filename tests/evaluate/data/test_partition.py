import math

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from leakfrontier.defenses import Batch
from leakfrontier.evaluate.data.data import load_dataset
from leakfrontier.evaluate.data.partition import PARTITIONS, partition


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(batch: Batch) -> list[tuple[float, ...]]:
    return sorted(map(tuple, torch.column_stack([batch.inputs.flatten(1), batch.targets]).tolist()))


def class_shares(parts: list[Batch], classes: int = 10) -> torch.Tensor:
    counts = torch.stack([part.targets.bincount(minlength=classes) for part in parts])
    return counts / counts.sum(dim=1, keepdim=True)


@pytest.mark.parametrize("scheme", PARTITIONS)
@pytest.mark.parametrize("clients", [1, 2, 7, 359])
def test_every_example_is_used_once(scheme: str, clients: int) -> None:
    batch = load_dataset("digits").test
    parts = partition(batch, clients, scheme, rng())
    sizes = [len(part.targets) for part in parts]
    assert len(parts) == clients
    assert max(sizes) - min(sizes) <= 1
    whole = Batch(
        torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts])
    )
    assert rows(whole) == rows(batch)


@pytest.mark.parametrize("scheme", PARTITIONS)
def test_tokens_are_spread_like_images(scheme: str) -> None:
    tokens = torch.randint(30, (60, 12), generator=rng())
    batch = Batch(tokens, torch.arange(60) % 2)
    parts = partition(batch, 4, scheme, rng())
    assert {part.inputs.dtype for part in parts} == {torch.int64}
    assert [len(part.targets) for part in parts] == [15] * 4
    assert rows(Batch.joined(parts)) == rows(batch)


@pytest.mark.parametrize("scheme", PARTITIONS)
def test_partition_is_reproducible(scheme: str) -> None:
    batch = load_dataset("digits").test
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    first, same, other = (partition(batch, 4, scheme, rng(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(first, same, strict=True))
    assert not torch.equal(first[0].inputs, other[0].inputs)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_label_skew_follows_alpha() -> None:
    batch = load_dataset("fashion-mini").train
    largest = {}
    for alpha in (0.01, 1.0, 1e5):
        parts = partition(batch, 10, "label-skew", rng(), alpha=alpha)
        largest[alpha] = class_shares(parts).max(dim=1).values.median().item()
    assert largest[0.01] > 0.7 > largest[1.0] > 0.2 > largest[1e5]


def test_label_skew_of_the_first_client_is_dirichlet() -> None:
    # Var q_i = p (1 - p) / (alpha + 1); the multinomial draw of n examples adds its own.
    batch = Batch(torch.zeros(4000, 1), torch.arange(4000) % 4)
    alpha, size = 3.0, 100
    shares = torch.stack(
        [
            class_shares(partition(batch, 40, "label-skew", rng(seed), alpha=alpha)[:1], 4)[0]
            for seed in range(200)
        ]
    )
    variance = 0.25 * 0.75 / (alpha + 1)
    expected = variance + (0.25 * 0.75 - variance) / size
    assert shares.mean(dim=0).numpy() == pytest.approx(np.full(4, 0.25), abs=0.05)
    assert shares.var(dim=0).mean().item() == pytest.approx(expected, rel=0.15)


def test_label_skew_survives_extreme_concentration() -> None:
    batch = load_dataset("digits").test
    for alpha in (1e-8, 1e12):
        parts = partition(batch, 50, "label-skew", rng(), alpha=alpha)
        assert sum(len(part.targets) for part in parts) == len(batch.targets)


def test_feature_skew_separates_features_but_not_labels() -> None:
    batch = load_dataset("fashion-mini").train
    parts = partition(batch, 4, "feature-skew", rng())
    assert (class_shares(parts) - 0.1).abs().max() <= 0.005
    components = PCA(2).fit(batch.inputs.flatten(1).numpy())

    def spread(parts: list[Batch]) -> np.ndarray:
        scores = [components.transform(part.inputs.flatten(1).numpy()) for part in parts]
        centres = np.stack([score.mean(axis=0) for score in scores])
        return centres.std(axis=0) / np.concatenate(scores).std(axis=0)

    assert (spread(parts) > 4 * spread(partition(batch, 4, "iid", rng()))).all()
    assert (spread(parts) > 0.2).all()


def test_clients_are_not_ordered_by_class() -> None:
    batch = load_dataset("digits").train
    for scheme in PARTITIONS:
        targets = partition(batch, 2, scheme, rng(), alpha=1e5)[0].targets
        assert len(targets[:50].unique()) >= 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clients": 0}, "clients must be from 1 to .* 359, got 0"),
        ({"clients": 360}, "clients must be from 1 to .* 359, got 360"),
        ({"scheme": "skew"}, "one of iid, label-skew, feature-skew, got 'skew'"),
        ({"alpha": 0.0}, "alpha must be positive and finite, got 0.0"),
        ({"alpha": math.nan}, "alpha must be positive and finite, got nan"),
        ({"alpha": math.inf}, "alpha must be positive and finite, got inf"),
    ],
)
def test_partition_refuses(changes: dict[str, object], message: str) -> None:
    arguments = {"clients": 2, "scheme": "label-skew", "rng": rng(), **changes}
    with pytest.raises(ValueError, match=message):
        partition(load_dataset("digits").test, **arguments)  # type: ignore[arg-type]
