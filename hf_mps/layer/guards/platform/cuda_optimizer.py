"""cuda-optimizer: paged optimizers, and 8-bit ones without a kernel that runs here, are refused in one line."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from hf_mps.core import extras
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.layer.guards.base import Guard
from hf_mps.metal.operators import dispatcher

UPDATES = {8: "bitsandbytes::optimizer_update_8bit_blockwise", 32: "bitsandbytes::optimizer_update_32bit"}
"""The operator of a step, by the bits of the optimizer's state; 0.50 has a kernel of the second for all devices."""
_OF_32_BITS = {"lion_32bit", "ademamix", "rmsprop_bnb", "rmsprop_bnb_32bit"}
"""Trainer's other names of bitsandbytes' optimizers (transformers, trainer_optimizer.py)."""

_LOOKED = "_hf_mps_looked"


class CudaOptimizer(Guard):
    """Looks at Trainer's `optim`, and at optimizers of bitsandbytes that any other loop makes.

    A kernel for the CPU alone, as 0.50 has one of the 8-bit step, counts for none: through the fallback every weight,
    gradient and moment would go there and back at each step.
    """

    name = "cuda-optimizer"
    what = "paged optimizers of bitsandbytes live in CUDA's memory, and its 8-bit ones have no kernels for mps"
    issue = "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/2069"
    until = "bitsandbytes has its paged and 8-bit optimizers for mps"
    patches = {
        "torch.optim:Optimizer.__init__": "_made",
        "accelerate.accelerator:Accelerator.prepare_optimizer": "_prepared",
        "transformers.trainer:Trainer.__init__": "_trainer",
    }

    def applies(self) -> Choice[bool]:
        """Whether there are optimizers of bitsandbytes that cannot run on mps, and which."""
        lacking = dict.fromkeys(_lacks(bits, paged=paged) for paged in (True, False) for bits in UPDATES)
        reason = "; ".join(filter(None, lacking))
        return Choice(bool(reason), reason or "the installed bitsandbytes has all of its optimizers for mps")

    def _made(self, stock: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        stock(optimizer, *args, **kwargs)
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
        if any(parameter.device.type == "mps" for group in optimizer.param_groups for parameter in group["params"]):
            self._refuse(type(optimizer).__name__, *_kind(optimizer), instead="torch.optim.AdamW")

    def _prepared(self, stock: Any, accelerator: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if _from_bitsandbytes(optimizer) and accelerator.device.type == "mps":
            self._refuse(type(optimizer).__name__, *_kind(optimizer), instead="torch.optim.AdamW")
        return stock(accelerator, optimizer, *args, **kwargs)

    def _trainer(self, stock: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        stock(trainer, *args, **kwargs)
        optim = str(getattr(trainer.args.optim, "value", trainer.args.optim))
        if trainer.args.device.type == "mps" and _bitsandbytes(optim):
            self._refuse(f"optim={optim}", *_named(optim), instead="adamw_torch")

    def _refuse(self, what: str, bits: int, paged: bool, *, instead: str) -> None:
        reason = _lacks(bits, paged=paged)
        if reason:
            self.acted(f"{what} was refused", aloud=False)
            raise UserError(f"{what}: {reason}; next: {instead}, or Adafactor where memory is short")


def reason_against(optim: str) -> str:
    """Why Trainer's `optim` of that name cannot train on mps, or an empty string."""
    if not _bitsandbytes(optim):
        return ""
    bits, paged = _named(optim)
    return _lacks(bits, paged=paged)


def _lacks(bits: int, *, paged: bool) -> str:
    """Why such an optimizer cannot step on mps itself, or an empty string."""
    if find_spec("bitsandbytes") is None:
        # For 32 bits transformers' own words are right: once installed, it trains.
        what = "paged" if paged else "8-bit"
        return f"bitsandbytes is not installed, and has no {what} optimizers for mps" if paged or bits == 8 else ""
    with extras.bitsandbytes_unheard():
        import bitsandbytes  # noqa: F401

    if paged and not _pages():
        return "paged optimizers of the installed bitsandbytes need CUDA's managed memory, which Metal does not have"
    try:
        if not dispatcher.is_missing(UPDATES[bits]) and not dispatcher.has_no_kernel(UPDATES[bits]):
            return ""
    except RuntimeError:  # an older bitsandbytes, whose step is no operator of torch's
        pass
    return f"the installed bitsandbytes has no kernel of {bits}-bit optimizers for mps"


def _pages() -> bool:
    """Whether bitsandbytes makes the state of a paged optimizer for a parameter on the device; the smallest it pages.

    From pull request #2069 on it is to be an ordinary tensor where there is no managed memory.
    """
    import torch
    from bitsandbytes.optim.optimizer import Optimizer8bit

    try:
        Optimizer8bit.get_state_buffer(SimpleNamespace(is_paged=True), torch.empty(100_000, device="mps"))
    except Exception:
        return False
    return True


def _from_bitsandbytes(optimizer: Any) -> bool:
    """Whether bitsandbytes made the class or one that it is built on, as galore_torch's 8-bit one is."""
    return any(each.__module__.partition(".")[0] == "bitsandbytes" for each in type(optimizer).__mro__)


def _kind(optimizer: Any) -> tuple[int, bool]:
    """The bits of an optimizer's state, and whether it is paged; by its name while it is being made."""
    name = type(optimizer).__name__.lower()
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", 8 if "8bit" in name else 32)
    return 8 if bits == 8 else 32, bool(getattr(optimizer, "is_paged", "paged" in name))


def _named(optim: str) -> tuple[int, bool]:
    """The bits of an optimizer's state, and whether it is paged, by Trainer's name of it."""
    return 8 if "8bit" in optim else 32, "paged" in optim


def _bitsandbytes(optim: str) -> bool:
    """Whether Trainer's name of an optimizer is one of bitsandbytes' (those with `torch` in it are torchao's)."""
    return optim in _OF_32_BITS or (("8bit" in optim or "paged" in optim) and "torch" not in optim)


GUARD = CudaOptimizer()
