"""transformers.AdamW, which torch.optim.AdamW replaced (removed from transformers with 4.50).

Needless where the module has the class. Its own defaults are kept: no weight decay, eps 1e-6.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from hf_mps.integrations.patch import say


def apply(module: ModuleType) -> None:
    """Give `module` its AdamW back."""
    if not hasattr(module, "AdamW"):
        module.AdamW = _adamw()  # type: ignore[attr-defined]


def _adamw() -> type:
    import torch  # loaded already: the layer is switched on from there

    class AdamW(torch.optim.AdamW):
        """torch.optim.AdamW with the arguments and defaults of transformers.AdamW."""

        def __init__(
            self,
            params: Any,
            lr: float = 1e-3,
            betas: tuple[float, float] = (0.9, 0.999),
            eps: float = 1e-6,
            weight_decay: float = 0.0,
            correct_bias: bool = True,
            no_deprecation_warning: bool = False,
        ) -> None:
            without = "" if correct_bias else "; correct_bias=False is dropped, it always corrects"
            say(f"transformers.AdamW: torch.optim.AdamW takes its place{without}")
            super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    return AdamW
