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

from hf_mps.core.notices import print_notice
from hf_mps.core.patching import MISSING, Put

# The classes whose from_pretrained reads the hub.
_READERS = (
    "transformers.configuration_utils:PreTrainedConfig",
    "transformers.feature_extraction_utils:FeatureExtractionMixin",
    "transformers.generation.configuration_utils:GenerationConfig",
    "transformers.image_processing_base:ImageProcessingMixin",
    "transformers.modeling_utils:PreTrainedModel",
    "transformers.models.auto.auto_factory:_BaseAutoModelClass",
    "transformers.models.auto.configuration_auto:AutoConfig",
    "transformers.models.auto.feature_extraction_auto:AutoFeatureExtractor",
    "transformers.models.auto.image_processing_auto:AutoImageProcessor",
    "transformers.models.auto.processing_auto:AutoProcessor",
    "transformers.models.auto.tokenization_auto:AutoTokenizer",
    "transformers.processing_utils:ProcessorMixin",
    "transformers.tokenization_utils_base:PreTrainedTokenizerBase",
)


def around(who: str, method: Any, call: Callable[..., Any]) -> Any:
    """Return a class method with `call(stock, *arguments)` around it, unless `who` has put it there before."""
    stock = method.__func__
    names = getattr(stock, "hf_mps_patches", ())
    if who in names:
        return method

    @functools.wraps(stock)
    def called(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return call(functools.partial(stock, cls), *args, **kwargs)

    called.hf_mps_patches = (*names, who)  # type: ignore[attr-defined]
    return classmethod(called)


def _take(method: Any) -> Any:
    known = method is MISSING or "use_auth_token" in inspect.signature(method.__func__).parameters
    return method if known else around("auth_token", method, _call)


def _call(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if "use_auth_token" in kwargs:
        old = kwargs.pop("use_auth_token")
        if old is not None and kwargs.get("token") is not None:
            raise ValueError("use_auth_token= and token= are both given; token= is today's name, leave the other out")
        print_notice("use_auth_token=…: token= takes its place")
        if old is not None:
            kwargs["token"] = old
    return stock(*args, **kwargs)


def concerns(module: ModuleType) -> bool:
    """Return whether a datasets of its own still takes the argument; of transformers' classes each is asked."""
    builder = getattr(module, "load_dataset_builder", None)
    return builder is None or "use_auth_token" not in inspect.signature(builder).parameters


patches = {
    # load_dataset looks this one up when it is called: a script may have imported load_dataset already.
    "datasets.load:load_dataset_builder": _call,
    **{f"{reader}.from_pretrained": Put(_take, own=True, optional=True) for reader in _READERS},
}
