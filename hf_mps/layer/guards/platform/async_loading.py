"""async-loading: weights that change their dtype on their way to Metal are loaded by one thread."""

from __future__ import annotations

import os
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.introspect import names_in

VARIABLE = "HF_DEACTIVATE_ASYNC_LOAD"
"""What transformers itself reads at each load, before it makes its threads; who sets it has decided."""
_STORED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""safetensors' names of dtypes, as a slice of a file has them (`get_dtype`), and torch's."""


class AsyncLoading(Guard):
    """Converts such weights in the caller's thread, one after another, when the model needs each.

    transformers 5 reads a checkpoint in four threads, and each moves and converts its weights (`_materialize_copy`).
    Two threads that convert on Metal at the same time crash or hang the process. The report names four conditions: the
    file has another dtype than was asked for, the device is mps, threads are on, and the release has them. All other
    weights, and all other devices, are loaded by the threads as before.
    """

    name = "async-loading"
    what = "loading a bfloat16 checkpoint as float32 straight onto mps crashes or hangs: four threads convert at once"
    issue = "https://github.com/huggingface/transformers/issues/48029"
    until = "the oldest supported transformers converts for mps in one thread"
    patches = {"transformers.core_model_loading:spawn_materialize": "_spawn"}

    def applies(self) -> Choice[bool]:
        """Whether the loader of this transformers converts in its threads; read, because a race cannot be tried."""
        from transformers import core_model_loading

        known = names_in(core_model_loading.convert_and_load_state_dict_in_model)
        if "mps" in known or "ThreadPoolExecutor" not in known:
            return Choice(False, "this transformers loads for mps in one thread")
        if VARIABLE in os.environ:
            return Choice(False, f"{VARIABLE}={os.environ[VARIABLE]} is set")
        return Choice(True, "this transformers converts weights for mps in several threads")

    def _spawn(
        self, stock: Any, pool: Any, tensor: Any, device: Any = None, dtype: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if pool is not None and _on_metal(device) and _converts(tensor, dtype) and self.needed:
            self.acted("weights of another dtype are loaded onto mps in one thread", aloud=False)
            pool = None
        return stock(pool, tensor, device, dtype, *args, **kwargs)


def _on_metal(device: Any) -> bool:
    return str(device).partition(":")[0] == "mps"


def _converts(tensor: Any, dtype: Any) -> bool:
    """Whether `tensor`, or a slice of a file, comes in another dtype; where nobody knows its own, it may."""
    if dtype is None:
        return False
    stored = tensor.get_dtype() if hasattr(tensor, "get_dtype") else str(getattr(tensor, "dtype", ""))
    return _STORED.get(stored, stored.removeprefix("torch.")) != str(dtype).removeprefix("torch.")


GUARD = AsyncLoading()
