"""What users did wrong, told apart from what we did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """A mistake of the user's; its message is all that the command line shows."""


@contextmanager
def given_by_user() -> Iterator[None]:
    """Blame a ValueError on what the user gave: options of methods, models, data."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error
