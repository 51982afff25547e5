"""processor.as_target_processor(), which made a speech processor its tokenizer for a while.

Replaced by processor(text=…) and processor.pad(labels=…) (4.22), removed in transformers 5. Needless where the
class has the method.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_mps.core.notices import print_notice
from hf_mps.core.patching import Give


class _Target:
    """A processor while it is its tokenizer; the class of an object is what its call is looked up on."""

    tokenizer: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tokenizer(*args, **kwargs)

    def pad(self, *args: Any, **kwargs: Any) -> Any:
        return self.tokenizer.pad(*args, **kwargs)


@contextmanager
def as_target_processor(self: Any) -> Iterator[None]:
    """Let `processor(text)` and `processor.pad(labels)` be the tokenizer's in this context."""
    print_notice("processor.as_target_processor(): processor(text=…) and processor.pad(labels=…) take its place")
    stock = type(self)
    self.__class__ = type(stock.__name__, (_Target, stock), {})
    try:
        yield
    finally:
        self.__class__ = stock


patches = {"transformers.processing_utils:ProcessorMixin.as_target_processor": Give(as_target_processor)}
