from collections import Counter

import pytest
import torch
from torch import Tensor

from leakfrontier.evaluate.foundations.statistics import clopper_pearson
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, World, load_world
from leakfrontier.evaluate.world.victims import (
    candidate_count,
    candidates,
    cohort,
    disjoint_count,
    look_alikes,
    victims,
)

SMALL = Method(name="mlp", options={"width": 16})


def world(**options: object) -> World:
    scenario = {"dataset": "digits", "model": SMALL, "candidates": 20, **options}
    return load_world(Scenario.model_validate(scenario))


def rows_of(inputs: Tensor) -> set[bytes]:
    return {row.numpy().tobytes() for row in inputs}


def test_victims_of_different_observations_are_different_examples() -> None:
    here = world(batch_size=3)
    drawn = torch.cat([victims(here, 0, index) for index in range(50)])
    assert len(set(drawn.tolist())) == 150
    assert victims(here, 0, 7).equal(drawn[21:24])  # whoever else is attacked
    assert not victims(here, 1, 7).equal(drawn[21:24])
    assert drawn.min() < 150  # at random, not the first ones
    assert drawn.max() > len(here.train.targets) - 150


def test_there_are_only_so_many_victims() -> None:
    here = world(batch_size=100)
    victims(here, 0, 13)
    with pytest.raises(ValueError, match="15 observations of 100 examples need 1500"):
        victims(here, 0, 14)


def test_a_cohort_is_the_victims_and_others() -> None:
    here = world(batch_size=3)
    sought = victims(here, 0, 2)
    first, *others = cohort(here, sought, clients=4, seed=0, observation=2)
    assert first.inputs.equal(here.train.inputs[sought])
    assert [len(share.inputs) for share in others] == [3, 3, 3]
    bystanders = rows_of(torch.cat([share.inputs for share in others]))
    assert len(bystanders) == 9
    assert not bystanders & rows_of(first.inputs)
    assert len(cohort(here, sought, clients=1, seed=0, observation=2)) == 1
    with pytest.raises(ValueError, match="1000 clients need 2997 more examples, got"):
        cohort(here, sought, clients=1000, seed=0, observation=2)


def test_look_alikes_have_the_victims_label_and_are_no_victims() -> None:
    here = world(batch_size=2)
    for index in range(10):
        sought = victims(here, 0, index)
        others = look_alikes(here, sought, seed=0, observation=index)
        assert others.shape == (2, 19)
        for victim, row in zip(sought, others, strict=True):
            assert (here.train.targets[row] == here.train.targets[victim]).all()
            assert len({*row.tolist()} - {*sought.tolist()}) == 19


def test_candidates_are_the_look_alikes_of_the_identification_metric() -> None:
    here = world()
    places: Counter[int] = Counter()
    for index in range(300):
        victim = victims(here, 0, index)
        pool = candidates(here, victim, seed=0, observation=index)
        among_them = (pool.inputs[:, 0] == here.train.inputs[victim]).flatten(1).all(1)
        (place,) = among_them.nonzero().flatten().tolist()
        places[place] += 1
        others = here.train.inputs[look_alikes(here, victim, seed=0, observation=index)[0]]
        assert rows_of(others) == rows_of(pool.inputs[~among_them, 0])
        assert (pool.targets == here.train.targets[victim]).all()
    assert len(places) == 20
    assert all(clopper_pearson(n, 300, 0.9999).low < 1 / 20 for n in places.values())


@pytest.mark.parametrize(("disjoint", "more"), [(True, False), (False, True)])
def test_only_disjoint_candidates_give_nothing_away_by_themselves(
    disjoint: bool, more: bool
) -> None:
    """A guess that avoids what several victims have in common must not beat chance."""
    here, right, tries, chance = world(batch_size=16, candidates=100), 0, 0, 0.0
    for index in range(30):
        sought = victims(here, 0, index)
        where = {"seed": 0, "observation": index, "disjoint": disjoint}
        pool = candidates(here, sought, **where)  # type: ignore[arg-type]
        flat = pool.inputs.flatten(2)
        for column, victim in enumerate(here.train.inputs[sought].flatten(1)):
            seen = (flat[:, column, None, None] == flat[None]).all(-1).flatten(1).sum(1)
            rarest = (seen == seen.min()).nonzero().flatten()
            is_victim = (flat[rarest, column] == victim).all(-1)
            right += int(is_victim[0])
            tries, chance = tries + 1, chance + 1 / len(flat)
    found = clopper_pearson(right, tries, 0.99)
    assert (found.low > chance / tries) == more


def test_disjoint_candidates_are_fewer_where_victims_share_a_label() -> None:
    here = world(batch_size=4, candidates=100)
    alike = (here.train.targets == 3).nonzero().flatten()
    apart = torch.stack([(here.train.targets == label).nonzero()[0, 0] for label in range(4)])
    assert disjoint_count(here, apart) == candidate_count(here) == 100
    assert disjoint_count(here, alike[:4]) == len(alike) * 9 // 40
    pool = look_alikes(here, alike[:4], seed=0, observation=0, disjoint=True)
    assert len({*pool.flatten().tolist(), *alike[:4].tolist()}) == pool.numel() + 4
    assert disjoint_count(here, alike[:100]) < 2


def test_the_smallest_class_sets_how_many_candidates_there_are() -> None:
    here = world(candidates=1000)
    smallest = int(torch.bincount(here.train.targets).min())
    assert candidate_count(here) == smallest
    assert candidate_count(world(candidates=1000, batch_size=4)) == smallest - 3
    assert candidate_count(world()) == 20
    with pytest.raises(ValueError, match=f"batches of {smallest} and their look-alikes need"):
        candidate_count(world(batch_size=smallest))
