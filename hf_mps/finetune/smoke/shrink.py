"""The configuration of a tiny model of any architecture: as many of its sizes made small as fit together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from hf_mps.core.errors import UserError
from hf_mps.core.text import summary

IMAGE = 32
# The sizes are data: sizes.yaml says why they are as they are.
SIZES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("sizes.yaml").read_text(encoding="utf-8"))
DEPTHS, HEADS, WIDTHS = (
    {name: size for size, names in SIZES[kind].items() for name in names} for kind in ("depths", "heads", "widths")
)
# Pictures of several stages are halved at each: these leave something for the last one.
STAGES, STAGED = ("depths", "hidden_sizes"), {"image_size": 2 * IMAGE, "patch_size": 4}
# Parameters of a model that is still made with numbers: a gigabyte of weights, gradients and moments.
MOST = 60_000_000


def smallest(
    name: str, checkpoint_config: Mapping[str, Any], token_ids: Mapping[str, Any], make: Callable[[Any], Any]
) -> tuple[Any, str | None]:
    """Return the configuration of a tiny `name` and None, or the last one tried and why it does not work.

    `checkpoint_config` is a checkpoint's configuration (empty: the architecture's defaults), `token_ids` what the
    tokenizer determines; `make` builds a model from a configuration. The first configuration wins whose model can be
    built and takes one short input on the device meta. Raises UserError where the installed transformers lacks the
    architecture.
    """
    problem: str | None = "no combination of small sizes that was tried fits together"
    config = None
    for config in candidates(name, checkpoint_config, token_ids):
        problem = problem_with(config, make)
        if problem is None:
            break
    return config, problem


def candidates(name: str, checkpoint_config: Mapping[str, Any], token_ids: Mapping[str, Any]) -> Iterator[Any]:
    """Yield configurations of architecture `name`, smallest first, without those that its own class refuses."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        defaults = AutoConfig.for_model(name).to_dict()
    except ValueError as error:
        raise UserError(f"--smoke: the installed transformers has no architecture '{name}'") from error
    for sizes in (DEPTHS | HEADS | WIDTHS, DEPTHS | WIDTHS, DEPTHS):
        small = _small(defaults, checkpoint_config, sizes)
        for key, value in SIZES["own"].get(name, {}).items():  # what this architecture alone needs
            small[key] = small[key] | value if _is_config(small.get(key)) else value
        known = {key: value for key, value in token_ids.items() if key in defaults or key == "decoder_start_token_id"}
        try:
            yield AutoConfig.for_model(name, **_with_words(small, defaults, token_ids) | known)
        except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError):
            continue


def problem_with(config: Any, make: Callable[[Any], Any]) -> str | None:
    """Return why no model can be made of `config`, or None; it is built on meta and given one short input.

    A forward pass that reads values fails on meta and says nothing about the configuration.
    """
    import torch

    from hf_mps.finetune.smoke.fake import FakeScalars, needs_numbers

    try:
        with torch.device("meta"):
            model = make(config).eval()
        count = sum(parameter.numel() for parameter in model.parameters())
        if count > MOST:
            return f"with few layers it still has {count / 1e6:,.0f} M parameters"
        with torch.no_grad(), FakeScalars():
            model(**inputs(model))
    except Exception as error:
        if not needs_numbers(error):
            return summary(error)
    return None


def inputs(model: Any) -> dict[str, Any]:
    """Return one short row of what `model` reads, on the device meta."""
    import torch

    config, name = model.config, model.main_input_name
    with torch.device("meta"):
        if name == "pixel_values":
            main_input = torch.zeros(1, getattr(config, "num_channels", 3), *picture(config))
        elif name == "input_features" and hasattr(config, "max_source_positions"):  # Whisper takes no other length
            main_input = torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions)
        elif name in ("input_values", "input_features"):
            width: Any = getattr(config, "num_mel_bins", None) or getattr(config, "feat_extract_input_dim", 80)
            main_input = torch.zeros(1, 4000) if name == "input_values" else torch.zeros(1, 64, width)
        else:
            main_input = torch.zeros(1, 8, dtype=torch.long)
        batch = {name: main_input}
        if config.is_encoder_decoder:
            batch["decoder_input_ids"] = torch.zeros(1, 8, dtype=torch.long)
    return batch


def picture(config: Any, default: int = IMAGE) -> tuple[int, int]:
    """Return the height and width in pixels that a configuration names, or `default` where it names none."""
    vision = getattr(config, "vision_config", None)
    size = getattr(config, "image_size", None) or getattr(vision, "image_size", None) or default
    return (int(size), int(size)) if isinstance(size, (int, float)) else (int(size[0]), int(size[1]))


def _small(defaults: Mapping[str, Any], stored: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with `sizes` in place of its own, also in the configurations inside it."""
    left_out = (*SIZES["derived"], "architectures", "dtype", "model_type")
    small = {key: value for key, value in stored.items() if key not in left_out and not _is_config(value)}
    for key, value in defaults.items():
        if _is_config(value):
            inner = _small(value, stored.get(key) or {}, sizes)
            small[key] = {"model_type": value["model_type"], **{k: v for k, v in inner.items() if v is not None}}
        elif key in sizes and value is not None:
            current = stored.get(key, value)
            small[key] = [sizes[key]] * len(current) if isinstance(current, (list, tuple)) else sizes[key]
    if any(isinstance(defaults.get(key), (list, tuple)) for key in STAGES):
        small |= {key: size for key, size in STAGED.items() if isinstance(small.get(key), int) and key in sizes}
    return small


def _with_words(small: Mapping[str, Any], defaults: Mapping[str, Any], token_ids: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the tokenizer's ids in the part of it that has a vocabulary (a text tower)."""
    known = {
        key: {name: one for name, one in token_ids.items() if name in defaults[key]}
        for key, value in small.items()
        if _is_config(value) and "vocab_size" in defaults.get(key, {})
    }
    return {key: {**value, **known[key]} if key in known else value for key, value in small.items()}


def _is_config(value: Any) -> bool:
    """Whether a value is the configuration of a part, such as the image or the text tower."""
    return isinstance(value, dict) and "model_type" in value
