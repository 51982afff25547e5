"""The line that a call is refused with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hf_mps.core.errors import UserError


def refusal(call: Callable[..., Any], *arguments: Any, **settings: Any) -> str:
    """The line of the UserError that `call(*arguments, **settings)` ends in; fails the test where it ends otherwise."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **settings)
    return str(caught.value)
