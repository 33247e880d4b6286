"""What users did wrong, told apart from what we did."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

PLUGIN = "leakfrontier_plugin_"
"""What modules of users' files are called, before a hash of their path and content."""


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


def users_line(error: BaseException) -> str | None:
    """Return which line of a user's own file an error comes from, if from any."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if str(frame.f_globals.get("__name__")).startswith(PLUGIN):
            return f"{frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name}"
    return None
