"""Functions and classes that moved or went, under the names that older scripts import.

`_TABLE` says what took the place of each. Needless, name by name, where the module still has it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from hf_mps.integrations.patch import say


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _never(*args: Any, **kwargs: Any) -> bool:
    return False


class Repository:
    """huggingface_hub.Repository, a git clone, can be imported and not made. Replaced by HfApi.upload_folder."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "huggingface_hub.Repository is gone with huggingface_hub 1.0; in its place: "
            "HfApi().upload_folder(repo_id=…, folder_path=…), or leave --push_to_hub out"
        )


# Module -> name -> what takes its place in words, and the thing itself: an object or "module:name".
_TABLE: dict[str, dict[str, tuple[str, Any]]] = {
    "huggingface_hub": {"Repository": ("", Repository)},
    "transformers": {
        "is_tf_available": ("is False, there is only PyTorch", _never),
        "is_flax_available": ("is False, there is only PyTorch", _never),
        "is_torch_tpu_available": (
            "is_torch_xla_available takes its place",
            "transformers.utils:is_torch_xla_available",
        ),
    },
    "transformers.trainer_utils": {
        "EvaluationStrategy": ("", "transformers.trainer_utils:IntervalStrategy"),
    },
    "transformers.utils": {
        "send_example_telemetry": ("does nothing, examples report no use", _nothing),
        "get_full_repo_name": (
            "huggingface_hub.get_full_repo_name takes its place",
            "huggingface_hub:get_full_repo_name",
        ),
        "is_offline_mode": ("huggingface_hub.is_offline_mode takes its place", "huggingface_hub:is_offline_mode"),
    },
}


def apply(module: ModuleType) -> None:
    """Give `module` the names of the table that it lacks."""
    for name, (instead, thing) in _TABLE[module.__name__].items():
        if hasattr(module, name):
            continue
        found = _told(f"{module.__name__}.{name}", instead, thing) if instead else _resolve(thing)
        setattr(module, name, found)


def _resolve(thing: Any) -> Any:
    if not isinstance(thing, str):
        return thing
    module, _, name = thing.partition(":")
    return getattr(import_module(module), name)


def _told(name: str, instead: str, thing: Any) -> Callable[..., Any]:
    """The function that takes the place of `name`, saying so in one line when it is first called."""

    @functools.wraps(_nothing)
    def call(*args: Any, **kwargs: Any) -> Any:
        say(f"{name}: {instead}")
        return _resolve(thing)(*args, **kwargs)

    call.__name__ = call.__qualname__ = name.rpartition(".")[2]
    return call
