"""torch.compile asks once whether Metal is there, and keeps the answer, where code that it compiles asks.

What is known here is torch/_dynamo/variables/torch.py: `constant_fold_functions` holds the functions of torch that are
called while a graph is made. Without an entry there, those that the compiler knows by their names become operators of
the graph, which must not return a bool: stock torch breaks the graph at torch.backends.mps.is_available.
"""

from __future__ import annotations

from typing import Any

from hf_mps.core.patching import Put
from hf_mps.metal.device import availability

REASON = "torch.compile makes one graph of code that asks whether Metal is there"


def _with_ours(functions: dict[Any, Any]) -> dict[Any, Any]:
    """Add what hf_mps.metal.device.availability has put into torch, to the table itself."""
    functions.update(dict.fromkeys(availability.replacements))
    return functions


MODULE = "torch._dynamo.variables.torch"
patches = {f"{MODULE}:constant_fold_functions": Put(_with_ours, after=MODULE)}
