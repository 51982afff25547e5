"""oom-text: the searches for a batch size that fits know Metal's two errors of too little memory."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.patching import in_lightning
from hf_mps.layer.guards.base import Guard
from hf_mps.metal.device import memory


class OomText(Guard):
    """Looks at the errors that auto_find_batch_size, find_executable_batch_size and Tuner.scale_batch_size look at."""

    name = "oom-text"
    what = "searches for a batch size that fits end at the first one that does not: Metal's errors have other words"
    issue = "https://github.com/huggingface/accelerate/issues/4226"
    until = "should_reduce_batch_size of the oldest supported accelerate and Lightning's is_oom_error know both texts"
    patches = {
        "accelerate.utils.memory:should_reduce_batch_size": "_ours_too",
        # is_oom_error itself is imported by name elsewhere, and asks the first of these wherever it is.
        **in_lightning(
            {
                "utilities.memory:is_cuda_out_of_memory": "_ours_too",
                "utilities.memory:garbage_collection_cuda": "_collect",
            }
        ),
    }

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[str, bool] = {}

    def applies(self) -> Choice[bool]:
        """Whether one of the installed libraries takes such an error for another; asks their own functions."""
        deaf = [library for library, knows in self._found.items() if not knows]
        if deaf:
            return Choice(True, f"tried: a text of Metal's is unknown to {' and '.join(deaf)}")
        return Choice(False, f"tried: Metal's texts are known to {' and '.join(self._found)}")

    def concerns(self, module: ModuleType) -> bool:
        """Whether the library's question does not know Metal's words."""
        in_lightning = hasattr(module, "is_oom_error")
        question = module.is_oom_error if in_lightning else module.should_reduce_batch_size
        library = "Lightning" if in_lightning else "accelerate"
        errors = [RuntimeError(f"{words}1 GB") for words in memory.REFUSALS]
        self._found[library] = all(map(inspect.unwrap(question), errors))
        self._verdict = None
        return not self._found[library]

    def _ours_too(self, stock: Any, error: BaseException) -> bool:
        if stock(error):
            return True
        if not memory.refused(error):
            return False
        self.acted("a batch that does not fit is followed by a smaller one, as on other devices", aloud=False)
        return True

    def _collect(self, stock: Any) -> None:
        import torch

        stock()
        if torch.backends.mps.is_available():
            torch.mps.empty_cache()


GUARD = OomText()
