"""Guards of settings that Metal has no answer to.

one-device: several processes that would each take the one Metal device are refused.
half-precision: bf16 or fp16 is refused in a sentence that names the version.
attention: a model that asks for flash or flex attention takes sdpa.
async-loading: weights that change their dtype are loaded by one thread.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.patching import CONNECTORS, in_lightning
from hf_mps.distributed.metal.claim import claim
from hf_mps.distributed.world import World
from hf_mps.layer.guards.base import Guard, first, names_in
from hf_mps.metal.device.choice import metal


class OneDevice(Guard):
    """Looks before a library waits for other processes: Accelerate's state, which Trainer has, chooses a device later.

    Lightning's connectors have chosen theirs.
    """

    name = "one-device"
    what = (
        "under torchrun or --multi_gpu each process takes mps as if it were alone: many whole runs into one output_dir"
    )
    issue = "https://github.com/huggingface/accelerate/blob/main/src/accelerate/state.py (PartialState)"
    until = "Accelerate refuses it"
    patches = {
        # notebook_launcher starts processes itself.
        "accelerate.launchers:notebook_launcher": first("_launch"),
        "accelerate.accelerator:PartialState.__init__": first("_state_made"),
        **{f"{connector}._lazy_init_strategy": first("_lightning_starts") for connector in CONNECTORS},
    }

    def applies(self) -> Choice[bool]:
        """Return whether this process is one of several, which may be on one host."""
        world = _world()
        if world.local_size > 1:
            return Choice(True, f"{world.local_size} processes were started on this host")
        if not world.alone:
            return Choice(True, f"{world.size} processes were started, and each has to be on its own host")
        return Choice(False, "this process is alone")

    def _launch(self, function: Any, args: Any = (), num_processes: int | None = None, *_: Any, **__: Any) -> None:
        if (num_processes or 1) > 1 and _takes_metal():
            self.acted("several processes on one Metal device were refused", aloud=False)
            raise UserError(
                f"notebook_launcher(num_processes={num_processes}): there is one Metal device, and every process would "
                f"train the whole model on it; next: num_processes=1, and gradient_accumulation_steps="
                f"{num_processes} for the same batch"
            )

    def _state_made(self, state: Any, cpu: bool = False, **_: Any) -> None:
        world = _world()
        if not world.alone and not cpu and not state._shared_state and _takes_metal():
            self._refuse_others(world)

    def _lightning_starts(self, connector: Any) -> None:
        if type(connector.accelerator).__name__ == "MPSAccelerator":
            world, hosts = _world(), int(connector._num_nodes_flag)
            if world.alone and hosts > 1:  # started by hand on each host, with Lightning's own NODE_RANK
                number = connector.cluster_environment.node_rank()
                world = World(rank=number, size=hosts, node=number)
            self._refuse_others(world)

    def _refuse_others(self, world: World) -> None:
        """Raise UserError where another process of `world` has this host's Metal device, or would have it."""
        several = world.local_size
        try:
            if several > 1:
                script = "hf-mps" if Path(sys.argv[0]).name == "hf-mps" else f"python {sys.argv[0]}"
                alone = f"{script} {shlex.join(sys.argv[1:])}".rstrip() + ", without torchrun"
                hosts = f"torchrun --nnodes {world.hosts} --nproc_per_node 1 on each host" if world.hosts > 1 else alone
                raise UserError(
                    f"{several} processes were started on this host and there is one Metal device: each would train the"
                    f" whole run into the same output_dir; next: {hosts}, "
                    f"or HF_MPS_DEVICE=cpu for {several} processes on the CPU"
                )
            claim(world)
        except UserError:
            self.acted("several processes on one Metal device were refused", aloud=False)
            raise


def _takes_metal() -> bool:
    return os.environ.get("ACCELERATE_TORCH_DEVICE", "mps").partition(":")[0] == "mps" and metal().value


def _world() -> World:
    try:
        return World.here()
    except UserError:  # a launcher's variable without a number: the library that reads it says so
        return World()


HALVES = ("bf16", "fp16")


class HalfPrecision(Guard):
    """Looks at what TrainingArguments, Accelerate and Lightning were asked for, before they say less or nothing."""

    name = "half-precision"
    what = "bf16 and fp16 that this accelerate cannot do end in an error that does not say what is missing"
    issue = "https://github.com/huggingface/accelerate/issues/3064"
    until = "the oldest supported accelerate does both, and Lightning 2.6 is the oldest supported"
    patches = {
        "transformers.training_args:TrainingArguments.__post_init__": "_arguments_made",
        "accelerate.accelerator:AcceleratorState.__init__": "_state_made",
        **in_lightning(
            {"trainer.connectors.accelerator_connector:_AcceleratorConnector._check_and_init_precision": "_plugin"}
        ),
    }

    # Whether accelerate has each on mps (1.10 has neither); empty before accelerate is there.
    _in_accelerate: Mapping[str, Callable[[], bool]] = {}

    def applies(self) -> Choice[bool]:
        """Return whether one of the two cannot be used here."""
        lacking = [reason for reason in map(self._refusal, HALVES) if reason]
        return Choice(bool(lacking), "; ".join(lacking) or "bf16 and fp16 can both be used here")

    def concerns(self, module: ModuleType) -> bool:
        """Always; what accelerate can do is known once it is there."""
        if module.__name__ == "accelerate.accelerator":
            # Whether the devices that a function takes, listed in a constant of its code, have mps among them.
            code = inspect.unwrap(module.Accelerator.__init__).__code__
            lists = [
                each for each in code.co_consts if isinstance(each, tuple | frozenset) and {"cuda", "xpu"} <= set(each)
            ]
            has_fp16 = not lists or any("mps" in each for each in lists)
            self._in_accelerate = {"fp16": lambda: has_fp16, "bf16": lambda: bool(module.is_bf16_available(True))}
            self._verdict = None
        return True

    def _refusal(self, name: str) -> str:
        """Return why `name` cannot be used on the device, or an empty string."""
        if name in self._in_accelerate and not self._in_accelerate[name]():
            return f"{name} cannot be used on mps: it needs accelerate 1.11 or newer; this is {version('accelerate')}"
        return ""

    def _refuse(self, names: list[str], said: str) -> None:
        """Raise UserError for the first of `names` that cannot be used."""
        for name in names:
            reason = self._refusal(name)
            if reason:
                self.acted(f"{said} was refused", aloud=False)
                other = next((each for each in HALVES if each != name and not self._refusal(each)), "")
                choices = f"{other}, or fp32 without either" if other else "fp32, with neither bf16 nor fp16"
                raise UserError(f"{said}: {reason}; next: {choices}")

    def _arguments_made(self, stock: Callable[..., None], arguments: Any, *args: Any, **kwargs: Any) -> None:
        asked = [name for name in HALVES if getattr(arguments, name) or getattr(arguments, f"{name}_full_eval")]
        try:
            # It may move the training to the CPU, and may refuse in words that say less.
            stock(arguments, *args, **kwargs)
        finally:
            if asked and not arguments.use_cpu and metal().value:
                self._refuse(asked, f"{asked[0]}=True")

    def _state_made(self, stock: Callable[..., None], state: Any, *args: Any, **kwargs: Any) -> None:
        known = bool(state._shared_state)
        stock(state, *args, **kwargs)
        if not known and state.device.type == "mps" and state.mixed_precision in HALVES:
            name = state.mixed_precision
            try:
                self._refuse([name], f"mixed_precision={name}")
            except UserError:
                # Or the next Accelerator of a notebook would find this one.
                type(state)._reset_state()
                raise

    def _plugin(self, stock: Callable[..., Any], connector: Any) -> Any:
        flag, on_metal = str(connector._precision_flag), connector._accelerator_flag == "mps"
        plugin = stock(connector)
        # A plugin that the user handed in as an object stays as it is.
        made_here = plugin is not getattr(connector, "_precision_plugin_flag", None)
        if on_metal and made_here and getattr(plugin, "device", None) == "cuda":
            # Lightning before 2.6 (Lightning#20497): autocast for CUDA, which does nothing here.
            plugin.device = "mps"
            if plugin.scaler is not None:
                plugin.scaler = torch.amp.GradScaler("mps")
            line = f"precision={flag} is autocast on mps; this Lightning would ask CUDA for it, and train in fp32"
            self.acted(line, aloud=False)
        return plugin


_ASKED = re.compile(r"(paged\|)?(flash_attention_\d|flex_attention)")
"""transformers' names for the two; kernels of the hub (`owner/name`) are the user's own choice."""


class Attention(Guard):
    """Looks at what a model asks for when it is made, or told to change, before transformers looks."""

    name = "attention"
    what = "flash attention has no kernels for Metal and flex_attention no gradient: a model that asks for one ends"
    issue = "https://github.com/Dao-AILab/flash-attention/issues/977"
    until = "flash-attn has kernels for Metal, and flex_attention of the oldest supported torch a gradient on mps"
    patches = {
        # The one method through which every request goes.
        "transformers.modeling_utils:PreTrainedModel._check_and_adjust_attn_implementation": "_adjust",
    }

    def applies(self) -> Choice[bool]:
        """Always: flash-attn is for CUDA and ROCm. The reason also says what torch does about flex_attention."""
        flex = "flex_attention of this torch can" if _flex_trains() else "nor can flex_attention of this torch"
        return Choice(True, f"flash-attn cannot train on Metal, {flex}")

    def _adjust(self, stock: Any, model: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        asked = _ASKED.fullmatch(attn_implementation) if isinstance(attn_implementation, str) else None
        if not asked or not metal().value or (asked[2] == "flex_attention" and _flex_trains()):
            return stock(model, attn_implementation, *args, **kwargs)
        # None is the model's default: sdpa, or eager where it has no sdpa.
        instead = stock(model, None, *args, **kwargs)
        self.acted(f"attn_implementation={attn_implementation} cannot train on Metal: {instead} takes its place")
        return instead


def _flex_trains() -> bool:
    """Return whether torch no longer refuses flex_attention a gradient on mps."""
    from torch.nn.attention import flex_attention

    # Read and not tried: a trial would compile.
    return "does not support backward on MPS" not in inspect.getsource(flex_attention)


VARIABLE = "HF_DEACTIVATE_ASYNC_LOAD"
"""What transformers itself reads at each load, before it makes its threads; who sets it has decided."""
_STORED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""safetensors' names of dtypes, as a slice of a file has them (`get_dtype`), and torch's."""


class AsyncLoading(Guard):
    """Converts such weights in the caller's thread, one after another, when the model needs each.

    transformers 5 reads a checkpoint in four threads, and each moves and converts its weights (`_materialize_copy`).
    Two threads that convert on Metal at the same time crash or hang the process. The report names four conditions: the
    file has another dtype than was asked for, the device is mps, threads are on, and the release has them. All other
    weights, and all other devices, are loaded by the threads as before.
    """

    name = "async-loading"
    what = "loading a bfloat16 checkpoint as float32 straight onto mps crashes or hangs: four threads convert at once"
    issue = "https://github.com/huggingface/transformers/issues/48029"
    until = "the oldest supported transformers converts for mps in one thread"
    patches = {"transformers.core_model_loading:spawn_materialize": "_spawn"}

    def applies(self) -> Choice[bool]:
        """Whether the loader of this transformers converts in its threads; read, because a race cannot be tried."""
        from transformers import core_model_loading

        known = names_in(core_model_loading.convert_and_load_state_dict_in_model)
        if "mps" in known or "ThreadPoolExecutor" not in known:
            return Choice(False, "this transformers loads for mps in one thread")
        if VARIABLE in os.environ:
            return Choice(False, f"{VARIABLE}={os.environ[VARIABLE]} is set")
        return Choice(True, "this transformers converts weights for mps in several threads")

    def _spawn(
        self, stock: Any, pool: Any, tensor: Any, device: Any = None, dtype: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if pool is not None and str(device).partition(":")[0] == "mps" and _converts(tensor, dtype) and self.needed:
            self.acted("weights of another dtype are loaded onto mps in one thread", aloud=False)
            pool = None
        return stock(pool, tensor, device, dtype, *args, **kwargs)


def _converts(tensor: Any, dtype: Any) -> bool:
    """Return whether `tensor`, or a slice of a file, comes in another dtype; where nobody knows its own, it may."""
    if dtype is None:
        return False
    stored = tensor.get_dtype() if hasattr(tensor, "get_dtype") else str(getattr(tensor, "dtype", ""))
    return _STORED.get(stored, stored.removeprefix("torch.")) != str(dtype).removeprefix("torch.")
