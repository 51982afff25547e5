"""cuda-optimizer: 8-bit and paged optimizers, whose kernels are for CUDA, are refused in one line."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType
from typing import Any

from hf_mps.choice import Choice
from hf_mps.errors import UserError
from hf_mps.guards.guard import Guard, around

KERNEL = "bitsandbytes::optimizer_update_8bit_blockwise"


class CudaOptimizer(Guard):
    """Looks at Trainer's `optim`, and at optimizers of bitsandbytes that any other loop makes."""

    name = "cuda-optimizer"
    what = "8-bit and paged optimizers need bitsandbytes, which has no kernels for them on mps"
    issue = "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/252"
    until = "bitsandbytes has its optimizers for mps"

    def applies(self) -> Choice[bool]:
        """Whether bitsandbytes, where it is installed, lacks a kernel of its 8-bit optimizers for mps."""
        import torch

        if find_spec("bitsandbytes") is None:
            return Choice(True, "bitsandbytes is not installed, and has no optimizer kernels for mps")
        import bitsandbytes  # type: ignore[import-not-found]  # noqa: F401

        if torch._C._dispatch_has_kernel_for_dispatch_key(KERNEL, "MPS"):
            return Choice(False, "the installed bitsandbytes has its optimizers for mps")
        return Choice(True, "the installed bitsandbytes has no optimizer kernels for mps")

    def install(self, module: ModuleType) -> None:
        """Put it around Trainer.__init__, the making of an optimizer and Accelerator.prepare_optimizer."""
        if module.__name__ == "torch":
            around(self, module.optim.Optimizer, "__init__", self._made)
        elif module.__name__ == "accelerate.accelerator":
            around(self, module.Accelerator, "prepare_optimizer", self._prepared)
        else:
            around(self, module.Trainer, "__init__", self._trainer)

    def _made(self, stock: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        stock(optimizer, *args, **kwargs)
        groups = optimizer.param_groups if _from_bitsandbytes(optimizer) else ()
        if any(parameter.device.type == "mps" for group in groups for parameter in group["params"]):
            self._refuse(type(optimizer).__name__, "torch.optim.AdamW")

    def _prepared(self, stock: Any, accelerator: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if _from_bitsandbytes(optimizer) and accelerator.device.type == "mps":
            self._refuse(type(optimizer).__name__, "torch.optim.AdamW")
        return stock(accelerator, optimizer, *args, **kwargs)

    def _trainer(self, stock: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        stock(trainer, *args, **kwargs)
        optim = str(getattr(trainer.args.optim, "value", trainer.args.optim))
        if trainer.args.device.type == "mps" and _bitsandbytes(optim):
            self._refuse(f"optim={optim}", "adamw_torch")

    def _refuse(self, what: str, instead: str) -> None:
        if self.needed:
            self.acted(f"{what} was refused")
            raise UserError(f"{what}: {self.verdict().reason}; next: {instead}, or Adafactor where memory is short")


def _from_bitsandbytes(optimizer: Any) -> bool:
    return type(optimizer).__module__.partition(".")[0] == "bitsandbytes"


def _bitsandbytes(optim: str) -> bool:
    """Whether an optimizer's name is one of bitsandbytes' (those with `torch` in it are torchao's)."""
    return any(word in optim for word in ("bnb", "8bit", "paged")) and "torch" not in optim


GUARD = CudaOptimizer()
