import subprocess
import sys

import torch
from torch.func import vmap

from leakfrontier.evaluate.seeds import fork, generator


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
        "from leakfrontier.evaluate.seeds import generator\n"
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
