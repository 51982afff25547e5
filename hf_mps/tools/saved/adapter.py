"""A checkpoint whose folder holds an adapter alone: peft's weights, for the model that they were trained on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_mps.core import extras
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.models import checkpoint
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.run.logging import errors_only

FILE = "adapter_config.json"


@dataclass(frozen=True)
class Adapter(Checkpoint):
    """peft's adapter in the folder `source`, and `base`, the checkpoint that it belongs to.

    Tokenizer and template are the adapter's own where its folder holds them, as a run's does.
    """

    base: Checkpoint = field(kw_only=True)

    def tokenizer(self, **settings: Any) -> Any:
        try:
            return super().tokenizer(**settings)
        except UserError:  # somebody else's adapter, without a tokenizer
            return self.base.tokenizer(**settings)

    def stored_config(self) -> dict[str, Any]:
        return self.base.stored_config()

    def config(self) -> Any:
        return self.base.config()

    def model(self, auto_class: Any, **settings: Any) -> tuple[Any, Choice[str]]:
        """Load the base model, and the adapter onto it. Raises UserError as `Checkpoint.model`, and without peft."""
        try:
            from peft import PeftModel
        except ImportError as error:
            install = extras.install("lora")
            raise UserError(f"model {self.name} is an adapter, and peft is not installed; next: {install}") from error
        model, loaded = self.base.model(auto_class, **settings)
        with errors_only():
            adapted = self._load("adapter", lambda source: PeftModel.from_pretrained(model, source))
        return adapted, Choice(self.name, f"an adapter of {loaded.value}: {loaded.reason}")


def read(where: str, folder: Path, base: str | None = None, dtype: str = "float32") -> Adapter:
    """Return the adapter in `folder`, which a person called `where`; `base` names its model where the file does not do.

    Raises UserError for a file that cannot be read, and for a base model that is not there.
    """
    try:
        stored = json.loads((folder / FILE).read_text(encoding="utf-8"))
        named = base or str(stored["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{where}: its {FILE} cannot be read: {error}; next: save the adapter again") from error
    try:
        source = checkpoint.resolve(named)
    except UserError as error:
        raise UserError(f"{where} is an adapter, and its base model is not there: {error}") from error
    inner = Checkpoint(source.name, source.source, source.local, dtype=dtype)
    return Adapter(where, str(folder), True, dtype=dtype, base=inner)
