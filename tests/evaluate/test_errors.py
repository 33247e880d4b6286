from __future__ import annotations

import pytest

from leakfrontier.evaluate.config import ConfigError
from leakfrontier.evaluate.errors import UserError, given_by_user
from leakfrontier.evaluate.store import StoreError


@given_by_user()
def fail(error: Exception) -> None:
    raise error


def test_a_value_error_in_what_the_user_gave_is_the_users() -> None:
    with pytest.raises(UserError, match="ratio must be in") as caught:
        fail(ValueError("ratio must be in (0, 1], got 2"))
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("error", [KeyError("ours"), ConfigError("theirs"), StoreError("theirs")])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        fail(error)
    assert caught.value is error
