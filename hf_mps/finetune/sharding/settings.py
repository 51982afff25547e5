"""What a recipe and accelerate's file say about FSDP: which of them does, and the settings that the engines get."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hf_mps.core.errors import UserError, nearest

ASKED = "ACCELERATE_USE_FSDP"
VERSION = "FSDP_VERSION"
LOADING = "FSDP_CPU_RAM_EFFICIENT_LOADING"
BY_BLOCKS = "TRANSFORMER_BASED_WRAP"
SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"
SAID, BY_FILE = "training.fsdp in the recipe", "accelerate's configuration file"
# Settings of accelerate's plugin that FSDP2 reads, by TrainingArguments' names (transformers, _process_fsdp_args), and
# what each takes.
KEYS: Mapping[str, tuple[Any, ...]] = {
    "version": (2,),
    "reshard_after_forward": (True, False),
    "state_dict_type": (SHARDED, FULL),
    "auto_wrap_policy": (BY_BLOCKS, "SIZE_BASED_WRAP", "NO_WRAP"),
    "transformer_layer_cls_to_wrap": (),
    "min_num_params": (),
    "activation_checkpointing": (True, False),
    "cpu_offload": (True, False),
    "cpu_ram_efficient_loading": (True, False),
}
OF_FSDP1 = ("forward_prefetch", "backward_prefetch", "use_orig_params", "sync_module_states", "limit_all_gathers")


def asked(training: Mapping[str, Any]) -> str:
    """Who asks for FSDP, in words: SAID, BY_FILE, or an empty string."""
    if training.get("fsdp"):
        return SAID
    by_file = os.environ.get(ASKED, "").lower() in ("true", "1") and "fsdp" not in training
    return BY_FILE if by_file else ""


def config(training: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """TrainingArguments' `fsdp_config`: the recipe's, with each rank's own part in a checkpoint where it says nothing.

    Parts are written at once by all ranks, and read by another number of them too.
    """
    said = {key.removeprefix("fsdp_"): value for key, value in (training.get("fsdp_config") or {}).items()}
    if said.get("auto_wrap_policy", BY_BLOCKS) == BY_BLOCKS and (names := blocks(model)):
        said.setdefault("transformer_layer_cls_to_wrap", names)
    return {"version": 2, "state_dict_type": SHARDED, **said}


def blocks(model: Any) -> list[str]:
    """The classes of `model` whose weights are gathered as one: those that transformers says are not to be split.

    Without one that holds the word embedding, such as BertEmbeddings: accelerate 1.15 makes a group of the embedding
    too (fsdp2_prepare_model), and PyTorch refuses a weight of two groups ("Cannot concatenate overlapping meshes").
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    named = set(getattr(inner, "_no_split_modules", None) or ())
    embedding = inner.get_input_embeddings() if hasattr(inner, "get_input_embeddings") else None
    found = [module for module in inner.modules() if type(module).__name__ in named]
    holding = {type(module).__name__ for module in found if any(part is embedding for part in module.modules())}
    return sorted({type(module).__name__ for module in found} - holding)


def plugin(training: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Accelerate's plugin's keyword arguments for a recipe's `training` section, as TrainingArguments makes them."""
    from transformers import TrainingArguments

    given = config(training, model)
    with nothing_written():
        known: dict[str, Any] = TrainingArguments._process_fsdp_args(_Arguments(given))
    return known


@contextmanager
def nothing_written() -> Iterator[None]:
    """Leave the variable as it was in which transformers and accelerate tell a model that is still to be loaded."""
    before = os.environ.get(LOADING)
    try:
        yield
    finally:
        os.environ.pop(LOADING, None)
        if before is not None:
            os.environ[LOADING] = before


class _Arguments:
    """What TrainingArguments reads of itself to make the plugin's arguments of `fsdp_config`."""

    fsdp: Any = True
    gradient_checkpointing = activation_checkpointing = False

    def __init__(self, given: dict[str, Any]) -> None:
        self.fsdp_config = dict(given)


def problem(key: str, value: Any) -> str:
    """Why `training.fsdp` or `training.fsdp_config` cannot have this value, as a clause; empty where it can."""
    if value is None:
        return ""
    if key == "fsdp":
        more = "; fsdp_config says how" if isinstance(value, str | list) else ""
        return "" if isinstance(value, bool) else f"is {value!r}; allowed: true or false{more}"
    if not isinstance(value, dict):
        return f"is {value!r}; allowed: a section of keys: {', '.join(KEYS)}"
    for name, given in value.items():
        bare = str(name).removeprefix("fsdp_")
        if bare in OF_FSDP1:
            return f"has {name}, which belongs to FSDP1; leave it out"
        if bare not in KEYS:
            return f"has {name}; allowed: {', '.join(KEYS)}{nearest(bare, KEYS)}"
        if KEYS[bare] and given not in KEYS[bare]:
            return f"has {name} {given!r}; allowed: {', '.join(_word(each) for each in KEYS[bare])}"
    return ""


def refuse_fsdp1() -> None:
    """Raise UserError where accelerate's file asks for FSDP1, its default, whose parameters are of another kind."""
    if os.environ.get(VERSION, "1") != "2":
        raise UserError(
            f"accelerate's configuration file asks for FSDP {os.environ.get(VERSION, '1')}; allowed: 2; next:"
            " fsdp_version: 2 in its fsdp_config"
        )


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
