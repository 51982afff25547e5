"""from_pretrained(use_auth_token=…) and load_dataset(use_auth_token=…).

Replaced by `token` (transformers 4.32, removed in 5; datasets 2.14, removed in 3). Today the word would end up in a
model's arguments or in a saved tokenizer. Needless where the function's own arguments name it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hf_mps.integrations.patch import around, say

# The classes whose from_pretrained reads the hub, wherever a library keeps them.
_READERS = (
    "PreTrainedModel",
    "_BaseAutoModelClass",
    "AutoConfig",
    "AutoTokenizer",
    "AutoProcessor",
    "AutoImageProcessor",
    "AutoFeatureExtractor",
    "PreTrainedConfig",
    "PretrainedConfig",
    "PreTrainedTokenizerBase",
    "ProcessorMixin",
    "FeatureExtractionMixin",
    "ImageProcessingMixin",
    "GenerationConfig",
)


def apply(module: ModuleType) -> None:
    """Let the module's readers of the hub take `use_auth_token` as `token`."""
    if module.__name__ == "datasets.load":
        # load_dataset looks this one up when it is called: a script may have imported load_dataset already.
        if "use_auth_token" not in inspect.signature(module.load_dataset_builder).parameters:
            around(module, "load_dataset_builder", _call)
        return
    for name in _READERS:
        reader = vars(module).get(name)
        if reader is not None and reader.__module__ == module.__name__ and "from_pretrained" in vars(reader):
            _take(reader)


def _take(reader: Any) -> None:
    stock = vars(reader)["from_pretrained"].__func__
    if getattr(stock, "hf_mps", None) == "auth_token" or "use_auth_token" in inspect.signature(stock).parameters:
        return

    @functools.wraps(stock)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return _call(functools.partial(stock, cls), *args, **kwargs)

    from_pretrained.hf_mps = "auth_token"  # type: ignore[attr-defined]
    reader.from_pretrained = classmethod(from_pretrained)


def _call(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if "use_auth_token" in kwargs:
        old = kwargs.pop("use_auth_token")
        if old is not None and kwargs.get("token") is not None:
            raise ValueError("use_auth_token= and token= are both given; token= is today's name, leave the other out")
        say("use_auth_token=…: token= takes its place")
        if old is not None:
            kwargs["token"] = old
    return stock(*args, **kwargs)
