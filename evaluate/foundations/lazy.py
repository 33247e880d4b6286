"""A sequence whose elements are computed when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, overload

T = TypeVar("T")


class Lazy(Sequence[T], Generic[T]):
    """A sequence that is made of functions, each of which returns one element."""

    def __init__(self, make: Sequence[Callable[[], T]]) -> None:
        self._make, self._made = [*make], dict[int, T]()

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        """Return one element, or several."""
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        if place not in self._made:
            self._made[place] = self._make[place]()
        return self._made[place]

    def __len__(self) -> int:
        """Return the number of elements."""
        return len(self._make)
