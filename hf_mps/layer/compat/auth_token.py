"""from_pretrained(use_auth_token=…) and load_dataset(use_auth_token=…).

Replaced by `token` (transformers 4.32, removed in 5; datasets 2.14, removed in 3). Today the word would end up in a
model's arguments or in a saved tokenizer. Needless where the function's own arguments name it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from hf_mps.core.notices import print_notice
from hf_mps.core.patching import Patch

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


def _call(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if "use_auth_token" in kwargs and "use_auth_token" not in inspect.signature(stock).parameters:
        old = kwargs.pop("use_auth_token")
        if old is not None and kwargs.get("token") is not None:
            raise ValueError("use_auth_token= and token= are both given; token= is today's name, leave the other out")
        print_notice("use_auth_token=…: token= takes its place")
        if old is not None:
            kwargs["token"] = old
    return stock(*args, **kwargs)


patches = {
    # load_dataset looks this one up when it is called: a script may have imported load_dataset already.
    "datasets.load:load_dataset_builder": _call,
    **{f"{reader}.from_pretrained": Patch(_call, own=True, optional=True) for reader in _READERS},
}
