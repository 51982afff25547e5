"""torch.compile asks once whether Metal is there, and loads its compiler when a function of bitsandbytes is called.

What is known here is torch/_dynamo/variables/torch.py: `constant_fold_functions` holds the functions of torch that are
called while a graph is made. Without an entry there, those that the compiler knows by their names become operators of
the graph, which must not return a bool: stock torch breaks the graph at torch.backends.mps.is_available.

And of bitsandbytes, which transformers' Trainer imports through peft, that it calls torch.compile while it is imported:
torch imports Inductor there, a fifth of the time that importing Trainer takes.
"""

from __future__ import annotations

import functools
from typing import Any

from hf_mps.core.patching import OriginalCall, Patch, Put
from hf_mps.metal.device import availability

REASON = "torch.compile makes one graph of code that asks for Metal, and loads its compiler where bitsandbytes needs it"


def _with_ours(functions: dict[Any, Any]) -> dict[Any, Any]:
    """Add what hf_mps.metal.device.availability has put into torch, to the table itself."""
    functions.update(dict.fromkeys(availability.replacements))
    return functions


def _when_called(stock: OriginalCall, model: Any = None, **kwargs: Any) -> Any:
    """Compile a function of bitsandbytes at its first call; all others are compiled now."""
    if not str(getattr(model, "__module__", "")).startswith("bitsandbytes."):
        return stock(model, **kwargs)
    # Not by `stock`, which is this call's alone.
    compiled = functools.cache(functools.partial(stock.function, model, **kwargs))

    @functools.wraps(model)
    def called(*args: Any, **more: Any) -> Any:
        return compiled()(*args, **more)

    return called


MODULE = "torch._dynamo.variables.torch"
patches = {
    f"{MODULE}:constant_fold_functions": Put(_with_ours, after=MODULE),
    # The first of bitsandbytes' files, before those that compile.
    "torch:compile": Patch(_when_called, after="bitsandbytes._ops"),
}
