"""The packages that compute some metrics and that hf_mps itself does not need."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple


class Needs(NamedTuple):
    """A package by its name on PyPI and for Python, and the extra of hf_mps that brings it."""

    package: str
    module: str
    extra: str

    @property
    def missing(self) -> bool:
        """Whether it is not installed."""
        return find_spec(self.module) is None


ROUGE = Needs("rouge-score", "rouge_score", "generation")
SACREBLEU = Needs("sacrebleu", "sacrebleu", "generation")
JIWER = Needs("jiwer", "jiwer", "audio")
