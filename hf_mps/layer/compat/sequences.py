"""dataset.features["objects"].feature, of a column of dictionaries of lists.

Until datasets 3 a Sequence of a dictionary was an object with `feature`; since 4.0 the column is a dictionary of lists
itself. Needless where the features are no plain dictionary: an older datasets.
"""

from __future__ import annotations

from typing import Any

from hf_mps.core.notices import asked_by_a_library, print_notice
from hf_mps.core.patching import Give


class Columns(dict[str, Any]):
    """Such a dictionary as a script reads it: it has `feature`, the features of the single rows."""

    @property
    def feature(self) -> dict[str, Any]:
        """Return what each list is of."""
        print_notice('features["…"].feature is gone from datasets 4; in its place: features["…"]["…"].feature')
        return {name: each.feature for name, each in self.items()}


def _item(features: Any, name: str) -> Any:
    found = dict.__getitem__(features, name)
    of_lists = type(found) is dict and found and all(hasattr(each, "feature") for each in found.values())
    return Columns(found) if of_lists and not asked_by_a_library() else found


# Features has only dict's own.
patches = {"datasets.features.features:Features.__getitem__": Give(_item, own=True)}
