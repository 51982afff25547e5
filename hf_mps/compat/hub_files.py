"""hf_hub_download("datasets/OWNER/NAME", …), as the segmentation scripts of 4.16 to 4.22 ask for their labels.

Replaced by repo_type="dataset"; today's check of names refuses the prefix (HFValidationError). A library that takes it
says the same with both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_mps.core.notices import tell

KINDS = {"datasets": "dataset", "spaces": "space"}


def _download(stock: Callable[..., Any], repo_id: str, *args: Any, **kwargs: Any) -> Any:
    kind, _, name = str(repo_id).partition("/")
    if kind in KINDS and "/" in name and kwargs.get("repo_type") is None:
        tell(f"hf_hub_download({repo_id!r}): repo_type={KINDS[kind]!r} takes the place of {kind}/")
        return stock(name, *args, **{**kwargs, "repo_type": KINDS[kind]})
    return stock(repo_id, *args, **kwargs)


patches = {"huggingface_hub.file_download:hf_hub_download": _download}
