"""Guards of scripts that were written for CUDA.

cuda-words: autocast switched off in CUDA's name is off on Metal; where a script gets none, a line says so.
cuda-graphs: torch.compile's modes go without CUDA graphs.
cuda-optimizer: 8-bit optimizers step by our kernel, paged ones are refused in one line.
compile: torch.compile on Metal leaves layouts as they are, and runs as it is what it cannot compile.
"""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from hf_mps.core import extras, notices
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.layer.guards.base import Guard, first, then
from hf_mps.metal.device.choice import metal
from hf_mps.metal.operators import dispatcher

ASKED = 'torch.autocast("cuda") does nothing on mps, and this computes in the dtype of its inputs'
SCALED = 'GradScaler("cuda") scales nothing on mps'


class CudaWords(Guard):
    """Handles autocast, `custom_fwd`, `custom_bwd` and GradScaler in a script that names CUDA where there is none.

    Calls that limit autocast are applied to the script's autocast on mps, as they would be on CUDA: `enabled=False`,
    the dtypes of `custom_fwd`, the state that `custom_bwd` restores. Without autocast on mps they change nothing.

    Calls that would enable mixed precision are reported, in place of PyTorch's warning, but not applied. Such a script
    trains correctly in float32 today; float16 would change its numbers and need a working GradScaler. A GradScaler for
    CUDA stays disabled, as PyTorch makes it: float32 gradients need none, and a scaler waits for the device at every
    step. With float16 autocast on mps they do need one, which the notice says.

    `torch.is_autocast_enabled()` keeps answering for CUDA, because libraries that ask it go on to use CUDA's dtype.
    """

    name = "cuda-words"
    what = (
        'autocast("cuda") and GradScaler("cuda") do nothing on mps, and autocast("cuda", enabled=False) leaves an'
        " autocast for mps on: what a model computes in float32 on purpose is in half precision"
    )
    issue = "https://github.com/Stability-AI/stable-audio-3/pull/68"
    until = "PyTorch refuses autocast for a device that is not there"
    patches = {
        "torch.amp.autocast_mode:autocast.__init__": "_made",
        "torch.amp:custom_fwd": "_decorates",
        "torch.amp:custom_bwd": "_decorates",
        "torch.amp:GradScaler.__init__": "_scaler",
    }

    def applies(self) -> Choice[bool]:
        """Return whether there is no CUDA."""
        there = torch.cuda.is_available()
        return Choice(
            not there, "there is CUDA" if there else "there is no CUDA: what is asked of its autocast does nothing"
        )

    def _made(
        self, stock: Any, mode: Any, device_type: Any, dtype: Any = None, enabled: Any = True, *args: Any, **kwargs: Any
    ) -> None:
        arguments = (device_type, dtype, enabled, *args)
        if device_type != "cuda" or torch.cuda.is_available():
            stock(mode, *arguments, **kwargs)
        elif enabled:
            asked = f"torch.{str(dtype).removeprefix('torch.')}" if dtype is not None else "torch.bfloat16"
            line = f'{ASKED}; next: torch.autocast("mps", dtype={asked}), or device.type in place of "cuda"'
            self._tell(line, stock, mode, *arguments, **kwargs)
        else:
            self.acted('autocast("cuda", enabled=False) switches off the one for mps', aloud=False)
            stock(mode, "mps", *arguments[1:], **kwargs)

    def _decorates(self, stock: Any, function: Any = None, *, device_type: Any, **kwargs: Any) -> Any:
        # Asks nothing of the device: modules do this when they are imported.
        if device_type == "cuda" and not torch.cuda.is_available():
            self.acted("custom_fwd and custom_bwd of CUDA go by the autocast for mps", aloud=False)
            device_type = "mps"
        return stock(function, device_type=device_type, **kwargs)

    def _scaler(self, stock: Any, scaler: Any, device: Any = "cuda", *args: Any, **kwargs: Any) -> None:
        asked = kwargs.get("enabled", args[4] if len(args) > 4 else True)
        if device != "cuda" or not asked or torch.cuda.is_available():
            stock(scaler, device, *args, **kwargs)
        else:
            line = f'{SCALED}; next: torch.amp.GradScaler("mps") where autocast on mps is float16, else none'
            self._tell(line, stock, scaler, device, *args, **kwargs)

    def _tell(self, line: str, stock: Any, *args: Any, **kwargs: Any) -> None:
        """Say it in place of PyTorch's warning, which would name a line of this package; on the CPU that stays."""
        if not metal().value:
            stock(*args, **kwargs)
            return
        with notices.ignoring(UserWarning, "CUDA is not available|torch.cuda.amp.GradScaler is enabled"):
            stock(*args, **kwargs)
        self.acted(line)


SWITCH = "triton.cudagraphs"
"""The one option by which reduce-overhead differs from the default, and max-autotune from its no-cudagraphs form."""


class CudaGraphs(Guard):
    """Leaves that option out where a graph for Metal is compiled; what else a mode or a program sets stays."""

    name = "cuda-graphs"
    what = "torch.compile's modes reduce-overhead and max-autotune end the process (SIGSEGV) on deep float16 models"
    until = "the oldest supported torch leaves CUDA graphs out on mps by itself"
    # A trial would end the process, and the option that is left out is worth nothing on Metal.
    always = "Metal has no CUDA graphs, and asking for them has ended processes in torch 2.13"
    patches = {"torch:_TorchCompileInductorWrapper.__call__": "_compiles"}

    def concerns(self, module: ModuleType) -> bool:
        """Always: it is reported of 2.13, and that the thread is closed names no release without it."""
        return True

    def _compiles(self, stock: Any, backend: Any, graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        import torch._inductor.config as inductor

        asked = backend.config.get(SWITCH, inductor.triton.cudagraphs)
        if not on_metal(inputs) or not asked or not self.needed:
            return stock(backend, graph, inputs, *args, **kwargs)
        self.acted("torch.compile leaves out the CUDA graphs of mode reduce-overhead or max-autotune; Metal has none")
        with patch.object(backend, "config", {**backend.config, SWITCH: False}):
            return stock(backend, graph, inputs, *args, **kwargs)


UPDATES = {8: "bitsandbytes::optimizer_update_8bit_blockwise", 32: "bitsandbytes::optimizer_update_32bit"}
"""The operator of a step, by the bits of the optimizer's state; 0.50 has a kernel of the second for all devices."""
_OF_32_BITS = {"lion_32bit", "ademamix", "rmsprop_bnb", "rmsprop_bnb_32bit"}
"""Trainer's other names of bitsandbytes' optimizers (transformers, trainer_optimizer.py)."""

PAGED = 100_000
"""Elements from which on bitsandbytes pages the state of a parameter (get_state_buffer); adapters are often smaller."""

_LOOKED = "_hf_mps_looked"


class CudaOptimizer(Guard):
    """Looks at Trainer's `optim`, and at optimizers of bitsandbytes that any other loop makes.

    The step of 8-bit optimizers has kernels for the CPU and CUDA alone in 0.50: through the fallback every weight,
    gradient and moment would go there and back at each step. `hf_mps.metal.training_kernels.adam_8bit` has one for mps.
    """

    name = "cuda-optimizer"
    what = "bitsandbytes' paged optimizers live in CUDA's memory, and its 8-bit ones have no kernels for mps"
    issue = "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/2069"
    until = "bitsandbytes has its paged and 8-bit optimizers for mps"
    patches = {
        "torch.optim:Optimizer.__init__": then("_made"),
        "accelerate.accelerator:Accelerator.prepare_optimizer": first("_prepared"),
        "transformers.trainer:Trainer.__init__": then("_trainer"),
    }

    def applies(self) -> Choice[bool]:
        """Return whether there are optimizers of bitsandbytes that cannot run on mps, and which."""
        lacking = dict.fromkeys(_lacks(bits, paged=paged) for paged in (True, False) for bits in UPDATES)
        reason = "; ".join(filter(None, lacking))
        return Choice(bool(reason), reason or "the installed bitsandbytes has all of its optimizers for mps")

    def _made(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if _from_bitsandbytes(optimizer):
            self._look(optimizer)
            # optim_bits=8 and is_paged=True stand in the optimizer once all of its __init__ has run. The hook stays: no
            # checkpoint holds it.
            optimizer.register_step_pre_hook(self._first_step)

    def _first_step(self, optimizer: Any, *_: Any) -> None:
        if _LOOKED not in optimizer.__dict__:
            self.safely(self._look, optimizer)
            optimizer.__dict__[_LOOKED] = True

    def _look(self, optimizer: Any) -> None:
        parameters = _parameters(optimizer)
        if any(parameter.device.type == "mps" for parameter in parameters):
            self._refuse(type(optimizer).__name__, parameters, optimizer)

    def _prepared(self, accelerator: Any, optimizer: Any, *_: Any, **__: Any) -> None:
        if _from_bitsandbytes(optimizer) and accelerator.device.type == "mps":
            self._refuse(type(optimizer).__name__, _parameters(optimizer), optimizer)

    def _trainer(self, trainer: Any, *_: Any, **__: Any) -> None:
        optim = str(getattr(trainer.args.optim, "value", trainer.args.optim))
        if trainer.args.device.type == "mps" and _bitsandbytes(optim):
            trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
            self._refuse(optim, trained, asked="optim=")

    def _refuse(self, name: str, parameters: list[Any], optimizer: Any = None, *, asked: str = "") -> None:
        bits, paged = _kind(name, optimizer)
        large = any(parameter.numel() >= PAGED for parameter in parameters)
        if reason := _lacks(bits, paged=paged and large):
            self.acted(f"{asked}{name} was refused", aloud=False)
            usual = "adamw_torch" if asked else "torch.optim.AdamW"
            instead = unpaged(name) or f"{usual}, or Adafactor where memory is short"
            raise UserError(f"{asked}{name}: {reason}; next: {instead}")
        if bits == 8 and _given:
            self.acted("8-bit optimizers step by a kernel of hf_mps, as bitsandbytes has none for mps", aloud=False)


def reason_against(optim: str) -> str:
    """Return why Trainer's `optim` of that name cannot train on mps, or an empty string."""
    return _lacks(*_kind(optim)) if _bitsandbytes(optim) else ""


def unpaged(name: str) -> str:
    """Return the name of the same 8-bit optimizer without pages where that trains on mps, or an empty string."""
    without = name.replace("paged_", "").replace("Paged", "")
    return without if without != name and "8bit" in name and not _lacks(8, paged=False) else ""


def _lacks(bits: int, paged: bool) -> str:
    """Return why such an optimizer cannot step on mps itself, or an empty string."""
    if find_spec("bitsandbytes") is None:
        # For 32 bits transformers' own words are right: once installed, it trains.
        what = "paged" if paged else "8-bit"
        return f"bitsandbytes is not installed, and has no {what} optimizers for mps" if paged or bits == 8 else ""
    with extras.unheard("bitsandbytes"):
        import bitsandbytes  # noqa: F401

    if paged and not _pages():
        return "paged optimizers of the installed bitsandbytes need CUDA's managed memory, which Metal does not have"
    without = f"the installed bitsandbytes has no kernel of {bits}-bit optimizers for mps"
    try:
        lacks = dispatcher.is_missing(UPDATES[bits]) or dispatcher.has_no_kernel(UPDATES[bits])
    except RuntimeError:  # an older bitsandbytes, whose step is no operator of torch's
        return without
    if lacks and bits == 8:
        _give()
    return without if lacks and bits != 8 else ""


_given: list[Any] = []


def _give() -> None:
    """Register the step of 8-bit optimizers on mps, and that of the small weights, which have moments of 32 bits."""
    from hf_mps.metal.training_kernels import adam_8bit  # whose trial asks for the layer

    # Not torch._C._dispatch_library: the fallback watches torch.library's, and gives its place up.
    library: Any = torch.library.Library("bitsandbytes", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(adam_8bit.OPERATOR, adam_8bit.update, "MPS")
    # bitsandbytes has its own function compiled anew for each size, until torch.compile gives up with warnings; the
    # same runs as it is.
    small = UPDATES[32].partition("::")[2]
    library.impl(small, functools.partial(adam_8bit.by_operators, small), "MPS")
    # A kernel lives as long as the library object that it was registered with.
    _given.append(library)


def _pages() -> bool:
    """Whether bitsandbytes makes the state of a paged optimizer for a parameter on the device.

    From pull request #2069 on it is to be an ordinary tensor where there is no managed memory.
    """
    from bitsandbytes.optim.optimizer import Optimizer8bit

    try:
        Optimizer8bit.get_state_buffer(SimpleNamespace(is_paged=True), torch.empty(PAGED, device="mps"))
    except Exception:
        return False
    return True


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _from_bitsandbytes(optimizer: Any) -> bool:
    """Return whether bitsandbytes made the class or one that it is built on, as galore_torch's 8-bit one is."""
    return any(each.__module__.partition(".")[0] == "bitsandbytes" for each in type(optimizer).__mro__)


def _kind(name: str, optimizer: Any = None) -> tuple[int, bool]:
    """Return the bits of an optimizer's state, and whether it is paged; by its name, as long as it does not say."""
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", 8 if "8bit" in name.lower() else 32)
    return 8 if bits == 8 else 32, bool(getattr(optimizer, "is_paged", "paged" in name.lower()))


def _bitsandbytes(optim: str) -> bool:
    """Whether Trainer's name of an optimizer is one of bitsandbytes' (those with `torch` in it are torchao's)."""
    return optim in _OF_32_BITS or (("8bit" in optim or "paged" in optim) and "torch" not in optim)


LAYOUT = "TORCHINDUCTOR_LAYOUT_OPTIMIZATION"
ERRORS = "TORCHDYNAMO_SUPPRESS_ERRORS"


class Compile(Guard):
    """Sets two switches of torch's own when Accelerate, and so Trainer's torch_compile, is about to compile a model.

    Where a program calls torch.compile itself it is the one for layouts alone: what cannot be compiled stays its error.
    """

    name = "compile"
    what = "a model compiled for Metal can train four times slower than before, or end where a graph cannot be compiled"
    until = "pytorch#150121 is closed and the oldest supported torch leaves layouts as they are on mps"
    patches = {
        # What hands a graph to torch's compiler, and the preparing of a model.
        "torch:_TorchCompileInductorWrapper.__call__": first("_compiles"),
        "accelerate.accelerator:Accelerator.prepare_model": first("_prepare"),
    }

    def applies(self) -> Choice[bool]:
        """Return whether torch's compiler changes layouts, as it does by default up to 2.13."""
        import torch._inductor.config

        if torch._inductor.config.layout_optimization:
            return Choice(True, "torch's compiler forces channels_last on convolutions by default")
        return Choice(True, "layouts stay as they are already; a graph that cannot be compiled still ends the run")

    def _compiles(self, backend: Any, graph: Any, inputs: Any, *_: Any, **__: Any) -> None:
        if on_metal(inputs):
            self._switch((LAYOUT,))

    def _prepare(self, accelerator: Any, *_: Any, **__: Any) -> None:
        backend = getattr(accelerator.state.dynamo_plugin.backend, "value", "NO")
        if backend.upper() == "INDUCTOR" and accelerator.device.type == "mps":
            self._switch((LAYOUT, ERRORS))

    def _switch(self, variables: tuple[str, ...]) -> None:
        """Set the switches behind those variables that the user has not, and say so where that changes something."""
        import torch._dynamo.config
        import torch._inductor.config

        done = []
        for variable, owner, name, value, words in (
            (LAYOUT, torch._inductor.config, "layout_optimization", False, "leaves layouts as they are"),
            (ERRORS, torch._dynamo.config, "suppress_errors", True, "runs as it is what it cannot compile"),
        ):
            if variable in variables and variable not in os.environ and getattr(owner, name) is not value:
                # It stays, as torch reads it at the first call of each graph, whenever that is.
                setattr(owner, name, value)
                done.append(words)
        if done:
            self.acted(f"torch.compile {' and '.join(done)}; on Metal it is young: compare a few steps without")


def on_metal(inputs: Any) -> bool:
    """Whether a graph is for Metal: its parameters are inputs too, one that makes all tensors itself holds no model."""
    return any(getattr(getattr(each, "device", None), "type", "") == "mps" for each in inputs)
