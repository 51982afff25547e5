"""attention: a model that asks for flash or flex attention, which cannot train on Metal, takes sdpa instead."""

from __future__ import annotations

import inspect
import re
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.layer.guards.base import Guard

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
        from hf_mps.metal.device.choice import metal

        asked = _ASKED.fullmatch(attn_implementation) if isinstance(attn_implementation, str) else None
        if asked and metal().value and not (asked[2] == "flex_attention" and _flex_trains()):
            instead = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
            self.acted(f"attn_implementation={attn_implementation} cannot train on Metal: {instead} takes its place")
            attn_implementation = instead
        return stock(model, attn_implementation, *args, **kwargs)


def _flex_trains() -> bool:
    """Whether torch no longer refuses flex_attention a gradient on mps; read from its source, as a trial compiles."""
    from torch.nn.attention import flex_attention

    return "does not support backward on MPS" not in inspect.getsource(flex_attention)


GUARD = Attention()
