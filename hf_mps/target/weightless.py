"""A model without weights: its configuration in real size, its parameters fake tensors on the device."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_mps.choice import Choice
from hf_mps.finetune.models.checkpoint import Checkpoint

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


@dataclass(frozen=True)
class Weightless(Checkpoint):
    """A checkpoint whose architecture is `size`, a configuration; `place` is a tiny one with its tokenizer.

    On the device `meta` a tensor has a shape and no memory; on `cpu` the model has random weights.
    """

    size: Any = None
    device: str = "meta"

    def config(self) -> Any:
        """A configuration of its own for each caller, who may change it."""
        return copy.deepcopy(self.size)

    def tokenizer(self, **settings: Any) -> Any:
        """The tiny model's tokenizer, which takes rows as long as the real model's."""
        found = super().tokenizer(**settings)
        found.model_max_length = int(getattr(self.size, "max_position_embeddings", None) or 2**30)
        return found

    def model(self, auto_class: Any, **settings: Any) -> tuple[Any, Choice[str]]:
        """The architecture in float32 (or `dtype`)."""
        import torch

        config = settings.get("config") or self.config()
        dtype = settings.get("dtype", torch.float32)
        with torch.device(self.device):
            model = auto_class.from_config(config, dtype=dtype)
        count = sum(parameter.numel() for parameter in model.parameters())
        return model, Choice(
            self.said, f"{type(model).__name__}, {count / 1e6:.1f} M parameters, without their weights"
        )

    def sentence_transformer(self, device: str) -> Any:
        """sentence-transformers' model around the architecture, with the tiny one's tokenizer and pooling."""
        from transformers import AutoModel

        found = super().sentence_transformer("cpu")
        found[0].model = self.model(AutoModel)[0]
        return found


def stay(models: Iterable[Any]) -> None:
    """Let `models` take every `.to()` as done: there is nothing to move.

    Of a model on meta PyTorch could copy nothing, and a fake parameter it cannot exchange in place
    (torch.utils.swap_tensors, "has weakref associated with it").
    """
    for model in models:
        object.__setattr__(model, "to", lambda *args, whole=model, **kwargs: whole)


def place(models: Iterable[Any], mode: FakeTensorMode, device: str) -> None:
    """Put the parameters and buffers of `models` on `device` as fake tensors of `mode`; shared ones stay shared."""
    import torch

    made: dict[int, tuple[Any, Any]] = {}  # with the former tensor, so that its id is not given away

    def fake(tensor: Any) -> Any:
        if id(tensor) not in made:
            with mode:
                new: Any = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, torch.nn.Parameter):
                new = torch.nn.Parameter(new, tensor.requires_grad)
            made[id(tensor)] = (new, tensor)
        return made[id(tensor)][0]

    for model in models:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                tensors.update({name: tensor if tensor is None else fake(tensor) for name, tensor in tensors.items()})
