"""transformers' list of attention implementations has one more name: `attn_implementation="blockwise"`.

Nothing changes for a model that does not ask for it. What is known here is that both lists are tables to which
`register` adds (transformers' modeling_utils.py and masking_utils.py, "attention interface" in its documentation).
"""

from __future__ import annotations

from typing import Any

from hf_mps.core.patching import Register
from hf_mps.layer.fused_step.attention import NAME

REASON = f'attn_implementation="{NAME}" is an attention that keeps no scores; no model has it unasked'


patches = {
    "transformers.modeling_utils:AttentionInterface.register": Register("_attention", under=NAME),
    "transformers.masking_utils:AttentionMaskInterface.register": Register(
        "_mask", under=NAME, after="transformers.modeling_utils"
    ),
}


def _attention(*arguments: Any, **named: Any) -> Any:
    # Here, as it imports torch's autograd machinery with its blocks.
    from hf_mps.layer.fused_step.attention import interface

    return interface.forward(*arguments, **named)


def _mask(*arguments: Any, **named: Any) -> Any:
    from hf_mps.layer.fused_step.attention import interface

    return interface.mask(*arguments, **named)
