"""torch.compile asks once whether Metal is there, and keeps the answer, where code that it compiles asks.

What is known here is torch/_dynamo/variables/torch.py: `constant_fold_functions` holds the functions of torch that are
called while a graph is made. Without an entry there, those that the compiler knows by their names become operators of
the graph, which must not return a bool: stock torch breaks the graph at torch.backends.mps.is_available.
"""

from __future__ import annotations

from types import ModuleType

from hf_mps.device import availability

REASON = "torch.compile makes one graph of code that asks whether Metal is there"


def apply(module: ModuleType) -> None:
    """Add what hf_mps.device.availability has put into torch. Raises AttributeError where there is no such table."""
    module.constant_fold_functions.update(dict.fromkeys(availability.replacements))
