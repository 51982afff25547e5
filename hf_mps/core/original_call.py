"""A library's own function with something of ours around it, whose faults are never the caller's.

What is put around a function looks at a call, changes what goes in or comes out, or refuses it in a line for people.
Whatever else goes wrong in it ends in the library's own behaviour: the stock function is called where it was not yet,
and what it returned or raised is handed on where it was. It runs once in either case.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_mps.core.errors import Notice, RunError, UserError
from hf_mps.core.text import summary

REFUSALS = (UserError, RunError, Notice)
"""What the layer raises on purpose; a Notice is raised only where the user turned warnings into errors."""


class OriginalCall:
    """The stock function during one call of what was put around it: whether it ran, and how that ended."""

    __slots__ = ("called", "error", "function", "result")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.called = function, False
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make the call that the caller wants; what it returns counts, should anything go wrong afterwards."""
        try:  # as `foreign`, written out: Tensor.to comes through here
            self.result = self.function(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        self.error, self.called = None, True
        return self.result

    def partial(self, *args: Any, **kwargs: Any) -> Any:
        """Make a call whose result is not yet the caller's: a layer of several, a file under another name."""
        return self.foreign(self.function, *args, **kwargs)

    def foreign(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call something else that is the library's or the user's: what it raises goes through as the stock's does."""
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        self.error = None
        return result


@dataclass(eq=False)
class Around:
    """One function of ours around one of a library's; `wrapper(stock, *arguments)` is called while `owner.on`."""

    owner: Any
    place: str
    """What it is around, as `Trainer.train`."""
    stock: Callable[..., Any]
    wrapper: Callable[..., Any]

    def replacement(self) -> Callable[..., Any]:
        """The function that takes the stock one's place."""
        owner, stock = self.owner, self.stock

        @functools.wraps(stock)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if not owner.on:
                return stock(*args, **kwargs)
            call, theirs = OriginalCall(stock), None
            try:
                return self.wrapper(call, *args, **kwargs)
            except REFUSALS:
                raise
            except Exception as error:
                # By identity: an error of ours may be of the same kind, and say the same.
                if error is call.error or is_late(error):
                    raise
                theirs = call.error
                owner.failed(error)
            finally:
                call.error = None  # an error that its own frames hold would keep their tensors alive
            if theirs is not None:
                try:
                    raise theirs
                finally:
                    del theirs
            return call.result if call.called else stock(*args, **kwargs)

        return replacement


def is_late(error: Exception) -> bool:
    """Whether the device raises it for work that it was given before, to whoever waits first: it is the program's.

    From torch 2.14 on Metal tells so of an index out of range. By its name, as nothing here imports torch.
    """
    return type(error).__name__ == "AcceleratorError"


def described(error: Exception) -> str:
    """Return an error in one line, with the line of the layer's own code that it came from."""
    ours = [each for each in traceback.extract_tb(error.__traceback__) if f"{os.sep}hf_mps{os.sep}" in each.filename]
    place = f" ({ours[-1].filename.rpartition(f'hf_mps{os.sep}')[2]}:{ours[-1].lineno})" if ours else ""
    return f"{summary(error)}{place}"
