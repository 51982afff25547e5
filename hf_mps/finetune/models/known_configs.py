"""Which architecture a hub model is, and its real size, for machines that cannot reach the hub. No weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.models import checkpoint

FACTS = Path(__file__).with_suffix(".json")
"""The model_type in each model's config.json, and the values there that differ from the defaults of its class."""


STORED = json.loads(FACTS.read_text(encoding="utf-8")).items()
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {name: (one["model_type"], one["config"]) for name, one in STORED}
# Architectures whose classes have defaults that fit no model: an image's numbers are not as wide as a word's.
STAND_IN = {kind: name for name, (kind, _) in KNOWN.items() if kind.endswith("_vl")}

# The error for each model that the hub did not give: without a network the hub's client tries for 23 s, and a plan asks
# often.
_OUT_OF_REACH: dict[str, str] = {}


def model_type(named: str, kind: str | None, stored: Mapping[str, Any]) -> str | None:
    """Return a model's architecture: `kind`, what its `stored` config.json or KNOWN says of it, or None."""
    return kind or stored.get("model_type") or KNOWN.get(named, (None,))[0]


def of_name(named: str, kind: str | None = None) -> tuple[Any, Choice[str]]:
    """Return the configuration of a hub's model in its real size, and where it comes from. Imports transformers.

    `kind` is its architecture where somebody knows it. Raises UserError where the model cannot be had and nothing tells
    which architecture it is.
    """
    from transformers import AutoConfig

    source = checkpoint.resolve(named)
    try:
        if named in _OUT_OF_REACH:
            raise UserError(_OUT_OF_REACH[named])
        loaded = _started(source.config())
        return loaded, Choice(named, f"{type(loaded).__name__} of the model itself, without its weights")
    except UserError as error:
        if source.local:
            raise
        _OUT_OF_REACH[named] = str(error)
        architecture = model_type(named, kind, source.stored_config())
        if architecture is None:
            raise UserError(f"{error}, or its architecture with model_type=NAME") from error
    shape = named if KNOWN.get(named, (None,))[0] == architecture else STAND_IN.get(architecture)
    made = _started(AutoConfig.for_model(architecture, **(KNOWN[shape][1] if shape else {})))
    if shape is None:
        size = "in the size that transformers gives it by default"
    else:
        size = "in this model's size" if shape == named else f"in the size of {shape}"
    return made, Choice(named, f"the hub is out of reach: {type(made).__name__} {size}, without weights")


def _started(config: Any) -> Any:
    """Give a configuration the token that answers begin with: T5's class leaves it to each model's file."""
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None)
    return config
