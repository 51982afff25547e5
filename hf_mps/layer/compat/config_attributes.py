"""model.config.tokenizer_class, .decoder_start_token_id, .max_length …: attributes that every configuration had.

Removed in transformers 5, where an unset one is an AttributeError; those of generation are the generation
configuration's. `name_table.CONFIG` has what an unset one read as. Needless for each name that a configuration has; an
installed library that asks whether one is there gets stock's answer.
"""

from __future__ import annotations

from typing import Any

from hf_mps.core.notices import asked_by_a_library, print_notice
from hf_mps.core.patching import Give
from hf_mps.layer.compat.name_table import CONFIG


class Unset:
    """An attribute that a configuration may lack; no data descriptor, so one that was set is its own."""

    def __init__(self, name: str, unset: object) -> None:
        self._name, self._unset = name, unset

    def __get__(self, config: Any, owner: type | None = None) -> Any:
        # A dataclass looks for a field's default on its class: there must be none.
        if config is None or asked_by_a_library():
            raise AttributeError(f"{type(config or owner).__name__!r} object has no attribute {self._name!r}")
        print_notice(f"config.{self._name} is unset and gone from transformers 5: read as {self._unset!r}")
        return self._unset


_CLASS = "transformers.configuration_utils:PreTrainedConfig"
patches = {
    f"{_CLASS}.{name}": Give(Unset(name, unset), formerly=f"PretrainedConfig.{name}") for name, unset in CONFIG.items()
}
