"""model.freeze_feature_extractor() of speech models.

Replaced by freeze_feature_encoder (4.16, removed in 5). Needless for each model that has the method.
"""

from __future__ import annotations

from typing import Any

from hf_mps.core.notices import asked_by_a_library, print_notice
from hf_mps.core.patching import Give


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


patches = {"transformers.modeling_utils:PreTrainedModel.freeze_feature_extractor": Give(FreezeFeatureExtractor())}
