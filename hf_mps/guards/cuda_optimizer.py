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
    """Looks at `optim` before Trainer is made."""

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
        """Put it around Trainer.__init__."""
        around(self, module.Trainer, "__init__", self._trainer)

    def _trainer(self, stock: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        stock(trainer, *args, **kwargs)
        optim = str(getattr(trainer.args.optim, "value", trainer.args.optim))
        if trainer.args.device.type == "mps" and _bitsandbytes(optim) and self.needed:
            self.acted(f"optim={optim} was refused")
            raise UserError(
                f"optim={optim}: {self.verdict().reason}; next: adamw_torch, or adafactor where memory is short"
            )


def _bitsandbytes(optim: str) -> bool:
    """Whether an optimizer's name is one of bitsandbytes' (those with `torch` in it are torchao's)."""
    return any(word in optim for word in ("bnb", "8bit", "paged")) and "torch" not in optim


GUARD = CudaOptimizer()
