"""Methods and attributes that configurations, models, processors, tokenizers and callbacks of transformers 4
had, and features of datasets 3.

Needless, name by name, where the class has the attribute; its patch says what replaced each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hf_mps.core.notices import asked_by_a_library, print_notice
from hf_mps.core.patching import Give, Patch
from hf_mps.layer.compat.names import CONFIG


class Unset:
    """An attribute that a configuration may lack; no data descriptor, so one that was set is its own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, config: Any, owner: type | None = None) -> None:
        # A dataclass looks for a field's default on its class: there must be none.
        if config is None or asked_by_a_library():
            raise AttributeError(f"{type(config or owner).__name__!r} object has no attribute {self._name!r}")
        print_notice(f"config.{self._name} is unset and gone from transformers 5: read as None")


_CONFIG = "transformers.configuration_utils:PreTrainedConfig"
# An unset one is an AttributeError since transformers 5. An installed library that asks for it gets stock's answer.
_CONFIGS = {f"{_CONFIG}.{name}": Give(Unset(name)) for name in CONFIG}


COUNTS = ("num_beams", "num_return_sequences")


def _generate(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    for name in COUNTS:
        if name in kwargs and kwargs[name] is None:
            print_notice(f"generate({name}=None): left out, the default stays")
            del kwargs[name]
    return stock(self, *args, **kwargs)


# The summarization and translation scripts without a Trainer pass generate(num_beams=None). None was the default until
# 4.24; today it is compared with a number (TypeError). Leaving the argument out says the same.
_MODELS = {"transformers.generation.utils:GenerationMixin.generate": _generate}


class FreezeFeatureExtractor:
    """The method, there for models that have today's; a model's own of that name is its own."""

    def __get__(self, model: Any, owner: type | None = None) -> Any:
        freeze = getattr(owner if model is None else model, "freeze_feature_encoder", None)
        if freeze is None:
            raise AttributeError(f"{getattr(owner, '__name__', owner)} has no attribute 'freeze_feature_extractor'")
        if not asked_by_a_library():
            print_notice(
                "model.freeze_feature_extractor() is gone from transformers 5; in its place: freeze_feature_encoder()"
            )
        return freeze


# Replaced by freeze_feature_encoder (4.16, removed in 5).
_SPEECH = {"transformers.modeling_utils:PreTrainedModel.freeze_feature_extractor": Give(FreezeFeatureExtractor())}


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


# Replaced by processor(text=…) and processor.pad(labels=…) (4.22), removed in transformers 5.
_PROCESSORS = {"transformers.processing_utils:ProcessorMixin.as_target_processor": Give(as_target_processor)}


def _on_train_begin(stock: Callable[..., Any], self: Any, args: Any, *more: Any, **kwargs: Any) -> Any:
    asked = vars(args).get("logging_dir")
    if asked and "logging_dir" not in args.__dataclass_fields__ and getattr(self, "logging_dir", None) is None:
        # As the callback does with the variable's value.
        self.logging_dir = os.path.expanduser(asked)  # noqa: PTH111
    return stock(self, args, *more, **kwargs)


# Replaced by TENSORBOARD_LOGGING_DIR, which the callback reads when it is made: that one wins where it is set.
_CALLBACKS = {"transformers.integrations.integration_utils:TensorBoardCallback.on_train_begin": _on_train_begin}


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
    getattr(tokenizer, f"_switch_to_{mode}_mode", lambda: None)()


def build_inputs_with_special_tokens(
    self: Any, token_ids_0: list[int], token_ids_1: list[int] | None = None
) -> list[int]:
    """Return the ids with the special tokens that the tokenizer puts around one text or two.

    A tokenizer of the library tokenizers adds them to a text only: they are read off what it does with one.
    Raises ValueError where its own word is not found.
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


_TOKENIZER = "transformers.tokenization_utils_base:PreTrainedTokenizerBase"
# as_target_tokenizer was replaced by tokenizer(text_target=…) (4.22); transformers 5 removed both, the second from
# tokenizers of the library tokenizers. The examples of 4.15 and 4.20 decode predictions as Seq2SeqTrainer returns them,
# padded with the padding token then and with -100 today: an OverflowError, which stays one for other negative numbers.
_TOKENIZERS = {
    **{f"{_TOKENIZER}.{name}": Give(name) for name in METHODS},
    f"{_TOKENIZER}.decode": Patch(_decode, own=True),
}


class Columns(dict[str, Any]):
    """Such a dictionary as a script reads it: it has `feature`, the features of the single rows."""

    @property
    def feature(self) -> dict[str, Any]:
        """Return what each list is of."""
        print_notice('features["…"].feature is gone from datasets 4; in its place: features["…"]["…"].feature')
        return {name: each.feature for name, each in self.items()}


def _item(features: Any, name: str) -> Any:
    found = dict.__getitem__(features, name)
    of_lists = type(found) is dict and found and all(hasattr(each, "feature") for each in found.values())
    return Columns(found) if of_lists and not asked_by_a_library() else found


# Until datasets 3 a Sequence of a dictionary was an object with `feature`; since 4.0 the column is a dictionary of
# lists itself. Features has only dict's own method.
_FEATURES = {"datasets.features.features:Features.__getitem__": Give(_item, own=True)}

patches: dict[str, Any] = _CONFIGS | _MODELS | _SPEECH | _PROCESSORS | _CALLBACKS | _TOKENIZERS | _FEATURES
