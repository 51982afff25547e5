"""Feature extractors of images: ViTFeatureExtractor and its kin, and AutoFeatureExtractor for an image model.

Replaced by image processors (4.25), removed in transformers 5. A script of that time reads `feature_extractor.size` as
a number of pixels, one of 4.25 to 4.57 as a dictionary: it is both. Needless where transformers has the classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from hf_mps.core.notices import asked_by_a_library, print_notice
from hf_mps.core.patching import Patch
from hf_mps.layer.compat.names import FEATURE_EXTRACTORS


class Size(int, Mapping[str, int]):
    """The side of a square, or the shortest edge, in pixels; also read as {"height": …} or {"shortest_edge": …}."""

    sides: dict[str, int]

    def __getitem__(self, name: str) -> int:
        return self.sides[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sides)

    def __len__(self) -> int:
        return len(self.sides)


def _size(stock: Any) -> Any:
    """`stock` as a Size; itself where it is no one number."""
    sides = {name: side for name, side in dict(stock or {}).items() if side is not None}
    if len(set(sides.values())) != 1:
        return stock
    found = Size(next(iter(sides.values())))
    found.sides = sides
    return found


class _Sizes:
    """An attribute that the library reads as its own and a script as a Size."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, extractor: Any, owner: Any = None) -> Any:
        if extractor is None or self._name not in vars(extractor):
            theirs = (each for each in owner.__mro__[1:] if "hf_mps" not in each.__module__)
            return next(vars(each)[self._name] for each in theirs if self._name in vars(each))
        stock = vars(extractor)[self._name]
        return stock if asked_by_a_library() else _size(stock)

    def __set__(self, extractor: Any, value: Any) -> None:
        vars(extractor)[self._name] = value


def as_feature_extractor(processor: type, name: str = "") -> type:
    """Return the class of an image processor as a feature extractor; saved, it is the image processor that it is."""
    if issubclass(processor, _FeatureExtractor):  # read by the name of one, from a checkpoint of that time
        return processor
    names = {each: _Sizes(each) for each in ("size", "crop_size") if hasattr(processor, each)}
    return type(name or processor.__name__, (_FeatureExtractor, processor), {**names, "_stock": processor})


class _FeatureExtractor:
    _stock: type

    def to_dict(self) -> dict[str, Any]:
        """Return stock's dictionary, under stock's own class name."""
        found: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        return found | {"image_processor_type": self._stock.__name__.removesuffix("Pil")}  # as stock writes it


@functools.cache
def __getattr__(name: str) -> type:
    import transformers

    if name not in FEATURE_EXTRACTORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return as_feature_extractor(getattr(transformers, FEATURE_EXTRACTORS[name]), name)


def _read(stock: Callable[..., Any], cls: Any, name: Any, **kwargs: Any) -> Any:
    try:
        return stock(cls, name, **kwargs)
    except (ValueError, OSError, AttributeError, TypeError, KeyError):
        processor = None
        if not asked_by_a_library():
            from transformers import AutoImageProcessor

            with suppress(Exception):  # stock's own error about the feature extractor is the one to show
                processor = AutoImageProcessor.from_pretrained(name, **kwargs)
        if processor is None:
            raise
    print_notice("AutoFeatureExtractor of an image model: AutoImageProcessor takes its place")
    processor.__class__ = as_feature_extractor(type(processor), type(processor).__name__)
    return processor


patches = {
    "transformers.models.auto.feature_extraction_auto:AutoFeatureExtractor.from_pretrained": Patch(_read, own=True)
}
