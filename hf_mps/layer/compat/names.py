"""Names that moved or went, as the example scripts of transformers 4 import them, and what takes the place of each.

Needless, name by name, where the module still has it: the names are found when they are asked for and stock's own way
has none, so that nothing is imported or listed before. Source: the names that the examples of transformers 4.15.0,
4.20.1, 4.30.2 and 4.46.3 import and that 5.23, huggingface_hub 2.4 and accelerate 1.15 lack.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

import torch  # loaded already: the layer is switched on from there

from hf_mps.core.notices import asked_by_a_library, print_notice
from hf_mps.core.patching import MISSING, Give, Patcher, Put


@dataclass(frozen=True)
class Old:
    """A name that `places` (modules) had. `thing` is "module:name"; `instead` is the notice, none where it is empty.

    `called` says that the notice comes when the name is called, not when it is imported.
    """

    name: str
    places: tuple[str, ...]
    thing: str
    instead: str = ""
    called: bool = False


_TOP = "transformers"
_UTILS = ("transformers.utils", "transformers.file_utils")
_AUTO = (_TOP, "transformers.models.auto", "transformers.models.auto.modeling_auto")
_TPU = ("transformers.trainer_pt_utils", "transformers.trainer_utils", "transformers.integrations")


def _moved(thing: str, *places: str, called: bool = False, name: str = "") -> Old:
    module, _, new = thing.partition(":")
    return Old(name or new, places, thing, f"{module}.{new} takes its place", called)


def _ours(name: str, instead: str, *places: str, file: str = "names", thing: str = "", called: bool = False) -> Old:
    return Old(name, places or (_TOP,), f"hf_mps.layer.compat.{file}:{thing or name}", instead, called)


FEATURE_EXTRACTORS = {"ViTFeatureExtractor": "ViTImageProcessor"}
"""Feature extractors of images that became image processors (4.25)."""
_LM = "AutoModelForCausalLM, AutoModelForMaskedLM and AutoModelForSeq2SeqLM take its place"
_MAPPINGS = "the mappings of the three AutoModelFor…LM take its place"
_MASK = "DataCollatorForLanguageModeling(whole_word_mask=True) takes its place"
_XLA = "is_torch_xla_available takes its place"
_NO_REPORT = "does nothing, examples report no use"
NAMES: tuple[Old, ...] = (
    _ours("Repository", "", "huggingface_hub"),
    _ours("is_torch_tpu_available", _XLA, _TOP, "transformers.file_utils", *_TPU, called=True),
    _ours("send_example_telemetry", _NO_REPORT, *_UTILS, "transformers.utils.hub", thing="nothing", called=True),
    _moved("huggingface_hub:get_full_repo_name", *_UTILS, "transformers.utils.hub", called=True),
    _moved("huggingface_hub:is_offline_mode", *_UTILS, called=True),
    _ours("AutoModelWithLMHead", _LM, *_AUTO, file="old_classes"),
    _ours("MODEL_WITH_LM_HEAD_MAPPING", _MAPPINGS, *_AUTO, file="old_classes"),
    *(
        _ours(name, "datasets.load_dataset takes its place", file="old_classes")
        for name in ("TextDataset", "LineByLineTextDataset", "LineByLineWithRefDataset")
    ),
    _ours("DataCollatorForWholeWordMask", _MASK, _TOP, "transformers.data.data_collator", file="old_classes"),
    _moved("transformers:PreTrainedTokenizerFast", _TOP, name="BloomTokenizerFast"),
    *(_ours(name, "") for name in ("TransfoXLLMHeadModel", "TransfoXLTokenizer")),
    *(
        _ours(name, f"transformers.{processor} takes its place", file="feature_extractors")
        for name, processor in FEATURE_EXTRACTORS.items()
    ),
)

# Attributes that example scripts read of a configuration, which no longer has them unset: as None in transformers 4.46.
CONFIG = ("decoder_start_token_id", "tokenizer_class")


def nothing(*args: Any, **kwargs: Any) -> None:
    """Take anything and do nothing."""


def is_torch_tpu_available(check_device: bool = True) -> bool:
    """Return whether torch_xla is there; `check_device` (4.21 to 4.40) asked for a device besides."""
    from transformers.utils import is_torch_xla_available

    found: bool = is_torch_xla_available()
    return found


class _Gone:
    """A class that is gone: an import or a table of models can name it, nobody can make one."""

    words = "transformers.{0.__name__} is gone with transformers 5; in its place: transformers 4.56 or another model"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(self.words.format(type(self)))

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError, which names the release that has the model."""
        return cls()


class Repository(_Gone):
    """huggingface_hub.Repository, a git clone. Replaced by HfApi.upload_folder."""

    words = (
        "huggingface_hub.Repository is gone with huggingface_hub 1.0; in its place: "
        "HfApi().upload_folder(repo_id=…, folder_path=…), or leave --push_to_hub out"
    )


class TransfoXLLMHeadModel(_Gone):
    """A model of Transformer-XL, which transformers removed."""


class TransfoXLTokenizer(_Gone):
    """Its tokenizer."""


@functools.cache
def places() -> dict[str, dict[str, Old]]:
    """Return the old names of each module."""
    found: dict[str, dict[str, Old]] = {}
    for old in NAMES:
        for place in old.places:
            found.setdefault(place, {})[old.name] = old
    return found


class Finder(Put):
    """A module finds the names of the table that it lacks."""

    def put(self, owner: Patcher, place: ModuleType, name: str, stock: Any) -> None:
        """Give it a `__getattr__` around its own, if it has one."""
        if "names" not in getattr(stock, "hf_mps_patches", ()):
            setattr(place, name, _finder(place, stock))


def _finder(module: ModuleType, stock: Any) -> Callable[[str], Any]:
    gone = places()[module.__name__]

    def missing(module: ModuleType, name: str) -> NoReturn:
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    if stock is MISSING:  # a lazy module of transformers finds its names by its class, and may have one of the table
        stock = functools.partial(getattr(type(module), "__getattr__", missing), module)

    def __getattr__(name: str) -> Any:
        try:
            return stock(name)
        except AttributeError:
            if name not in gone:
                raise
        old, full = gone[name], f"{module.__name__}.{name}"
        if old.called:
            return _told(full, old.instead, old.thing)
        if old.instead and not asked_by_a_library():
            print_notice(f"{full}: {old.instead}")
        return _resolve(old.thing)

    __getattr__.hf_mps_patches = ("names",)  # type: ignore[attr-defined]
    return __getattr__


def _resolve(thing: str) -> Any:
    module, _, name = thing.partition(":")
    return getattr(import_module(module), name)


@functools.cache
def _told(name: str, instead: str, thing: str) -> Callable[..., Any]:
    """The function that takes the place of `name`, saying so in one line when it is first called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        print_notice(f"{name}: {instead}")
        return _resolve(thing)(*args, **kwargs)

    call.__name__ = call.__qualname__ = name.rpartition(".")[2]
    return call


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW with the arguments and defaults of transformers.AdamW."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        no_deprecation_warning: bool = False,
    ) -> None:
        without = "" if correct_bias else "; correct_bias=False is dropped, it always corrects"
        print_notice(f"transformers.AdamW: torch.optim.AdamW takes its place{without}")
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


# direct_transformers_import (transformers/utils/import_utils.py, 5.0 to 5.23) puts a second module object in the place
# of `transformers` when processing_utils is imported: that one needs the names too.
_AGAIN = {"transformers": ("transformers", "transformers.processing_utils")}
patches = {
    **{
        f"{module}:__getattr__": Finder("__getattr__", own=True, optional=True, after=_AGAIN.get(module, module))
        for module in places()
    },
    # Needless where the module has the class, which went with transformers 4.50. The shim keeps that class's defaults.
    **{
        f"{module}:AdamW": Give(AdamW, optional=True, after=_AGAIN.get(module, module))
        for module in ("transformers", "transformers.optimization")
    },
}
