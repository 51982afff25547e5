"""Methods of tokenizers: as_target_tokenizer and build_inputs_with_special_tokens.

The first was replaced by tokenizer(text_target=…) (4.22); transformers 5 removed both, the second from tokenizers of
the library tokenizers. Needless, name by name, where the class
has the method. And decode of predictions that Seq2SeqTrainer padded with -100: the examples of 4.15 and 4.20 hand
them over as they are, for they were padded with the padding token then; today that is an OverflowError, and stays one
for other negative numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hf_mps.core.notices import print_notice
from hf_mps.core.patching import Give, Patch

IGNORED = -100  # the label that a loss leaves out
METHODS = ("as_target_tokenizer", "build_inputs_with_special_tokens")


def _decode(stock: Callable[..., Any], self: Any, token_ids: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return stock(self, token_ids, *args, **kwargs)
    except OverflowError:
        if self.pad_token_id is None:
            raise
    from transformers.utils import to_py_obj

    print_notice(f"tokenizer.decode: {IGNORED}, with which Trainer pads predictions, is read as the padding token")
    return stock(self, _filled(to_py_obj(token_ids), self.pad_token_id), *args, **kwargs)


def _filled(ids: Any, pad: int) -> Any:
    if isinstance(ids, list | tuple):
        return [_filled(each, pad) for each in ids]
    return pad if ids == IGNORED else ids


@contextmanager
def as_target_tokenizer(self: Any) -> Iterator[None]:
    """Tokenize what is read in this context as a target: with the target language's special tokens where it has any."""
    print_notice("tokenizer.as_target_tokenizer(): tokenizer(text_target=…) takes its place")
    _switch(self, "target")
    self._in_target_context_manager = True
    try:
        yield
    finally:
        self._in_target_context_manager = False
        _switch(self, "input")


def _switch(tokenizer: Any, mode: str) -> None:
    switch = getattr(tokenizer, f"_switch_to_{mode}_mode", None)
    if switch is not None:
        switch()


def build_inputs_with_special_tokens(
    self: Any, token_ids_0: list[int], token_ids_1: list[int] | None = None
) -> list[int]:
    """Return the ids with the special tokens that the tokenizer puts around one text or two.

    A tokenizer of the library tokenizers adds them to a text only: they are read off what it does with one.
    Raises ValueError where no word of its own is found.
    """
    probe = self.convert_ids_to_tokens(next(iter(set(range(len(self))) - set(self.all_special_ids))))
    bare = self.encode(probe, add_special_tokens=False)
    if not bare:
        raise ValueError(f"{type(self).__name__} encodes {probe!r} as nothing: its special tokens cannot be read off")
    if token_ids_1 is None:
        before, after = _around(self.encode(probe), bare)
        return [*before, *token_ids_0, *after]
    before, rest = _around(self.encode(probe, probe), bare)
    between, after = _around(rest, bare)
    return [*before, *token_ids_0, *between, *token_ids_1, *after]


def _around(ids: list[int], part: list[int]) -> tuple[list[int], list[int]]:
    at = next(start for start in range(len(ids)) if ids[start : start + len(part)] == part)
    return ids[:at], ids[at + len(part) :]


_CLASS = "transformers.tokenization_utils_base:PreTrainedTokenizerBase"
patches = {
    **{f"{_CLASS}.{name}": Give(name) for name in METHODS},
    f"{_CLASS}.decode": Patch(_decode, own=True),
}
