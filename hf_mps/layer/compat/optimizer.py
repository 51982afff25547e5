"""transformers.AdamW, which torch.optim.AdamW replaced (removed from transformers with 4.50).

Needless where the module has the class. Its own defaults are kept: no weight decay, eps 1e-6.
"""

from __future__ import annotations

from typing import Any

from hf_mps.core.notices import print_notice
from hf_mps.core.patching import MISSING, Put


def _adamw(stock: Any) -> Any:
    if stock is not MISSING:
        return stock
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
            print_notice(f"transformers.AdamW: torch.optim.AdamW takes its place{without}")
            super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    return AdamW


patches = {f"{module}:AdamW": Put(_adamw, optional=True) for module in ("transformers", "transformers.optimization")}
