import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch.func import vmap

from leakfrontier.evaluate.foundations import seeds
from leakfrontier.evaluate.foundations.seeds import (
    SystemGenerator,
    copied,
    fork,
    generator,
    global_draws,
    narrow_seeds,
)


def draw(rng: torch.Generator) -> list[float]:
    return torch.randn(4, generator=rng).tolist()


def test_draws_depend_on_what_they_are_for_and_on_nothing_else() -> None:
    assert draw(generator("victims", 0)) == draw(generator("victims", 0))
    different = [("victims", 0), ("victims", 1), ("victims", "0"), ("client", 0), ("victims", 0, 0)]
    assert len({tuple(draw(generator(*parts))) for parts in different}) == len(different)
    assert draw(generator({"a": 1, "b": 2})) == draw(generator({"b": 2, "a": 1}))


def test_another_process_draws_the_same() -> None:
    """Unlike Python's own hashes, which change with every process."""
    script = (
        "from leakfrontier.evaluate.foundations.seeds import generator\n"
        "print(generator('victims', {'a': 0.5}, None).initial_seed())"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert int(result.stdout) == generator("victims", {"a": 0.5}, None).initial_seed()


def test_a_fork_draws_what_its_source_does_not() -> None:
    source = generator("client")
    forked = fork(source)
    assert draw(forked) != draw(source)
    again = generator("client")
    assert draw(fork(again)) == draw(fork(generator("client")))
    assert draw(fork(again)) != draw(fork(generator("client")))  # a source moves on


def test_a_fork_can_be_made_where_guesses_are_vectorised() -> None:
    source = generator("client")
    drawn = vmap(lambda x: x + torch.randn(4, generator=fork(source)), randomness="different")
    first, second = drawn(torch.zeros(2, 4))
    assert not first.equal(second)
    vmap(lambda x: x + (fork(source) is source))(torch.zeros(2))  # no draw, which would raise


def words(rng: torch.Generator) -> torch.Tensor:
    """Return the words of the Mersenne Twister: the state after its header of 24 bytes."""
    return rng.get_state()[24 : 24 + 8 * 624]


def as_torch_seeds(rng: torch.Generator) -> torch.Generator:
    """Return what an adversary would try: the seed's low 32 bits, which is all that torch uses."""
    return torch.Generator().manual_seed(rng.initial_seed() & (2**32 - 1))


def test_thirty_two_bits_do_not_give_the_draws_away() -> None:
    source = generator("client")
    for rng in (generator("training", 0), fork(source), source, SystemGenerator()):
        assert draw(as_torch_seeds(rng)) != draw(rng)


def test_the_whole_state_depends_on_all_bits_of_the_hash() -> None:
    a, b = torch.Generator(), torch.Generator()
    seeds._set_state(a, bytes(16))
    seeds._set_state(b, bytes(15) + b"\x01")  # beyond what is a seed
    assert a.initial_seed() == b.initial_seed()
    assert float((words(a) != words(b)).float().mean()) > 0.45  # half are upper halves: zeros
    assert len(words(a).view(torch.int64).unique()) == 624


def test_a_copy_draws_the_same_and_leaves_its_source_alone() -> None:
    source = generator("client")
    assert draw(copied(source)) == draw(copied(source)) == draw(source)


def test_what_the_system_seeds_is_never_the_same_nor_are_its_forks() -> None:
    one = SystemGenerator()
    forks = [fork(one), fork(one), SystemGenerator()]
    assert all(isinstance(rng, SystemGenerator) for rng in forks)
    assert len({tuple(draw(rng)) for rng in (one, *forks)}) == 4


@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, lambda g: g.clone_state(), lambda g: pickle.loads(pickle.dumps(g))],
)
def test_copies_of_what_the_system_seeds_draw_something_else(
    again: Callable[[SystemGenerator], torch.Generator],
) -> None:
    source = SystemGenerator()
    other = again(source)
    assert isinstance(other, SystemGenerator)
    assert draw(other) != draw(source)
    with pytest.raises(ValueError, match="cannot be copied"):
        copied(source)


def test_a_forked_process_has_other_states() -> None:
    source = SystemGenerator()
    read, write = os.pipe()
    if not (child := os.fork()):
        os.write(write, str(draw(source)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1000).decode() != str(draw(source))


def test_global_draws_have_a_whole_state_and_end() -> None:
    before, rng = torch.random.get_rng_state(), generator("client")
    with global_draws(rng):
        inside = torch.randn(4).tolist()
        seed = torch.initial_seed()
    assert torch.random.get_rng_state().equal(before)
    assert inside != draw(torch.Generator().manual_seed(seed))
    with global_draws(rng):
        assert torch.randn(4).tolist() == inside


def test_narrow_seeds_are_those_of_torch_and_end() -> None:
    wide = draw(generator("client"))
    with narrow_seeds():
        rng = generator("client")
        assert draw(as_torch_seeds(rng)) == draw(rng)
        assert draw(as_torch_seeds(forked := fork(rng))) == draw(forked)
    assert draw(generator("client")) == wide
