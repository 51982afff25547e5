"""node-weights: `save_on_each_node` stores the weights on every host, not on that of rank 0 alone."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.patching import Patch
from hf_mps.distributed.world import World
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.introspect import names_in


class NodeWeights(Guard):
    """Lets the first process of each host write the weights that it is told to write, once arguments ask for that.

    transformers 5.23 asks in `save_pretrained` whether its process is rank 0, whatever Trainer says; 5.12 did not.
    """

    name = "node-weights"
    what = (
        "save_on_each_node leaves the weights out on every host but the first, so that a run cannot resume there and"
        " load_best_model_at_end keeps other weights"
    )
    issue = "transformers/distributed/mixin.py should_save_on_this_rank (transformers#12421 added save_on_each_node)"
    until = "transformers' should_save_on_this_rank goes by what Trainer says"
    patches = {
        "transformers.training_args:TrainingArguments.__post_init__": "_made",
        "transformers.distributed.mixin:DistributedMixin.should_save_on_this_rank": Patch("_saves", optional=True),
    }

    def __init__(self) -> None:
        super().__init__()
        self._by_rank = False
        self._each_node = False

    def applies(self) -> Choice[bool]:
        """Whether the installed transformers writes weights by the number of the rank."""
        if self._by_rank:
            return Choice(True, "this transformers writes weights on rank 0 alone")
        return Choice(False, "this transformers writes weights where Trainer says so")

    def forget(self) -> None:
        """Forget what earlier arguments asked for as well."""
        super().forget()
        self._each_node = False

    def concerns(self, module: ModuleType) -> bool:
        """Whether the module looks at the rank, or holds the arguments."""
        if not hasattr(module, "DistributedMixin"):
            return True
        asked = getattr(module.DistributedMixin, "should_save_on_this_rank", None)
        self._by_rank = asked is not None and "_get_torch_distributed_rank" in names_in(asked)
        self._verdict = None
        return self._by_rank

    def _made(self, stock: Callable[..., None], arguments: Any) -> None:
        stock(arguments)
        self._each_node = self._each_node or bool(arguments.save_on_each_node)

    def _saves(self, stock: Callable[..., bool], model: Any, is_main_process: bool) -> bool:
        if stock(model, is_main_process):
            return True
        if not (is_main_process and self._each_node and World.here().local_main):
            return False
        self.acted("each host has the weights in its checkpoints", aloud=False)
        return True


GUARD = NodeWeights()
