"""AutoModelWithLMHead, which chose between a causal, a masked and a sequence-to-sequence language model.

Replaced by the three AutoModelFor…LM (4.0), removed in transformers 5. The order of the three is that of its mapping in
4.46: a model that has two is the seq2seq one before the masked one, and the masked one before the causal one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
)


class _WithLMHead(Mapping[type, Any]):
    """Configuration class -> model class; a model's file is imported when its class is asked for."""

    _three = (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)

    def __getitem__(self, config: type) -> Any:
        for mapping in self._three:
            if config in mapping:
                found = mapping[config]
                return found[0] if isinstance(found, tuple | list) else found
        raise KeyError(config)

    def __contains__(self, config: object) -> bool:
        return any(config in mapping for mapping in self._three)

    def __iter__(self) -> Iterator[type]:
        return iter(dict.fromkeys(config for mapping in self._three for config in mapping.keys()))  # noqa: SIM118

    def __len__(self) -> int:
        return len(list(iter(self)))


MODEL_WITH_LM_HEAD_MAPPING = _WithLMHead()


class AutoModelWithLMHead:
    """A language model of whichever kind the configuration has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise OSError("AutoModelWithLMHead is made by from_pretrained(name) or from_config(config)")

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        """Return a model with random weights. Raises ValueError for a configuration without a language model."""
        return _class_of(config)._from_config(config, **kwargs)

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the model `name`. Raises what its class's from_pretrained raises, and ValueError as from_config."""
        hub = {key: kwargs[key] for key in ("cache_dir", "revision", "token", "use_auth_token") if key in kwargs}
        config = kwargs.get("config") or AutoConfig.from_pretrained(name, **hub)
        return _class_of(config).from_pretrained(name, *args, **kwargs)


def _class_of(config: Any) -> Any:
    try:
        return MODEL_WITH_LM_HEAD_MAPPING[type(config)]
    except KeyError:
        raise ValueError(f"{type(config).__name__} has no language model; next: AutoModel.from_pretrained") from None
