"""FSDP2: whether a model is divided over the ranks of a run, how, and what of a recipe does not go with it.

Accelerate and PyTorch divide it: weights, gradients and the state of the optimizer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, nearest
from hf_mps.core.notices import ignoring
from hf_mps.distributed.world import World

if TYPE_CHECKING:
    from hf_mps.finetune.recipe.schema import Recipe
    from hf_mps.finetune.tasks import Prepared

KEY = "sharding"
WITHOUT = "next: the same recipe without training.fsdp, which trains a whole model on each rank"
# Optimizers whose state PyTorch makes of the weights' parts; others look at a weight's rows and columns, or pack it.
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
ASKED = "ACCELERATE_USE_FSDP"
VERSION = "FSDP_VERSION"
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
BLOCKS = "FSDP_TRANSFORMER_CLS_TO_WRAP"


def choose(recipe: Recipe, training: Mapping[str, Any], prepared: Prepared, device: str) -> Choice[str] | None:
    """Return how the model is divided; None where nobody asks for it.

    Raises UserError for what cannot be divided: on this device, in one process, of this task.
    """
    asker = asked(training)
    if not asker:
        if training.get("fsdp_config"):
            raise UserError("training.fsdp_config says how FSDP divides a model; next: training.fsdp=true")
        return None
    # FSDP1, accelerate's default, has parameters of another kind.
    if asker == BY_FILE and (version := os.environ.get(VERSION, "1")) != "2":
        told = f"accelerate's configuration file asks for FSDP {version}"
        raise UserError(f"{told}; allowed: 2; next: fsdp_version: 2 in its fsdp_config")
    world = World.here()
    if device == "mps":
        told = "recipes have FSDP on CUDA and the CPU: on mps PyTorch cannot free a storage, and gathered weights"
        way_on = "next: LoRA, or training.gradient_checkpointing=true, which make room in one Mac"
        raise UserError(f"{told} would stay; {way_on}")
    if world.alone:
        told = f"FSDP ({asker}) divides a model over several processes, and this is one"
        way_on = "next: torchrun --nproc_per_node 2 -m hf_mps.finetune RECIPE"
        raise UserError(f"{told}; {way_on}; what each would hold: hf-mps plan RECIPE --ranks 2")
    why = f"of task {recipe.task}: {prepared.task.unsharded}" if prepared.task.unsharded else ""
    for key, value in (("step_in_backward", recipe.step_in_backward or False), ("weights", recipe.weights)):
        if value not in (False, "float32"):
            why = why or f"{key}={str(value).lower()} steps whole weights, and a rank has parts of them; leave it out"
    optimizer = str(training.get("optim", OPTIMIZERS[0]))
    if optimizer not in OPTIMIZERS:
        allowed = ", ".join(OPTIMIZERS)
        why = why or f"training.optim={optimizer} keeps no state that can be divided; allowed: {allowed}"
    if why:
        raise UserError(f"FSDP ({asker}): {why}; {WITHOUT}")
    names = " and ".join(blocks(prepared.model))
    gathered = f"each {names} is gathered while it computes" if names else "the whole model is gathered at once"
    told = f"{asker}; weights, gradients and the optimizer's state are divided and {gathered}"
    return Choice(f"FSDP2 over {world.size} ranks", told)


def arguments(training: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """TrainingArguments' keywords for a run under FSDP; accelerate reads its file's settings itself."""
    return {} if asked(training) == BY_FILE else {"fsdp": True, "fsdp_config": config(training, model)}


def asked(training: Mapping[str, Any]) -> str:
    """Return who asks for FSDP, in words: SAID, BY_FILE, or an empty string."""
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

    Without one that holds the word embedding, such as BertEmbeddings. Raises UserError for a model whose embeddings
    transformers does not find, for which accelerate 1.15 asks too (fsdp2_prepare_model).
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    named = set(getattr(inner, "_no_split_modules", None) or ())
    try:
        embedding = inner.get_input_embeddings() if hasattr(inner, "get_input_embeddings") else None
    except NotImplementedError as error:
        told = f"accelerate asks for the input embeddings of a {type(inner).__name__}, which has none"
        raise UserError(f"FSDP: {told}; {WITHOUT}") from error
    found = [module for module in inner.modules() if type(module).__name__ in named]
    # Accelerate 1.15 makes a group of the embedding too (fsdp2_prepare_model), and PyTorch refuses a weight of two
    # groups ("Cannot concatenate overlapping meshes").
    holding = {type(module).__name__ for module in found if any(part is embedding for part in module.modules())}
    return sorted({type(module).__name__ for module in found} - holding)


def plugin(training: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Accelerate's plugin's keyword arguments for a recipe's `training` section, as TrainingArguments makes them."""
    from transformers import TrainingArguments

    given = config(training, model)
    with patch.dict(os.environ):  # transformers writes there whether a model is still to be loaded
        # What the method reads of its object to make the plugin's arguments of `fsdp_config`.
        read = SimpleNamespace(fsdp=True, fsdp_config=dict(given))
        read.gradient_checkpointing = read.activation_checkpointing = False
        known: dict[str, Any] = TrainingArguments._process_fsdp_args(read)
    return known


def problem(key: str, value: Any) -> str:
    """Return why `training.fsdp` or `training.fsdp_config` cannot have this value, as a clause; empty where it can."""
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
            allowed = (str(each).lower() if isinstance(each, bool) else str(each) for each in KEYS[bare])
            return f"has {name} {given!r}; allowed: {', '.join(allowed)}"
    return ""


@contextmanager
def ready(model: Any, device: str) -> Iterator[None]:
    """Around the making of a Trainer under FSDP: its accelerator takes the plugin on a CPU too, and blocks that can be.

    Raises UserError where PyTorch would take a GPU beside the CPU.
    """
    if os.environ.get(ASKED) and (names := blocks(model)):
        os.environ.setdefault(BLOCKS, ",".join(names))
    if device != "cpu":
        yield
        return
    import torch
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    beside = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if beside is not None and beside.type != "cpu":
        raise UserError(f"FSDP would take the device {beside.type} beside the CPU that trains; next: without use_cpu")
    # Accelerate 1.15 takes FSDP on GPUs alone (state.py), and trains with DDP on a CPU without a word.
    stock = AcceleratorState.__init__

    def __init__(state: Any, *arguments: Any, **said: Any) -> None:
        stock(state, *arguments, **said)
        plugin = said.get("fsdp_plugin")
        if plugin is not None and state.distributed_type == DistributedType.MULTI_CPU:  # as on a GPU
            if state._mixed_precision != "no":
                plugin.set_mixed_precision(state._mixed_precision)
            state.fsdp_plugin = plugin
            state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    with patch.object(AcceleratorState, "__init__", __init__):
        yield


def quiet() -> AbstractContextManager[None]:
    """Suppress FSDP2's warning of a module that returns a view, which nobody changes: a deferred head does."""
    return ignoring(UserWarning, r"FSDP2-wrapped module .*DeferredHead.* returned a view tensor")
