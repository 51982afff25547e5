"""datasets.load_metric, which moved to the library evaluate (as `evaluate.load`) and left datasets with 3.0.

A name that hf_mps has a metric module of its own for is computed from that, without a network. Needless where datasets
has the function.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from hf_mps.integrations.patch import say


def apply(datasets: ModuleType) -> None:
    """Give `datasets` its load_metric back."""
    if not hasattr(datasets, "load_metric"):
        datasets.load_metric = load_metric  # type: ignore[attr-defined]


def load_metric(path: str, config_name: str | None = None, *args: Any, **kwargs: Any) -> Any:
    """Return the metric `path`, as `evaluate.load` does; raises what that raises for a name it cannot find."""
    import evaluate

    from hf_mps.finetune.metrics.catalogue import MODULES

    own = MODULES / path
    known = "/" not in path and own.is_dir()
    say(f"datasets.load_metric: evaluate.load takes its place{'; ' + path + ' is computed here' if known else ''}")
    for gone in ("script_version", "trust_remote_code", "use_auth_token"):
        kwargs.pop(gone, None)
    return evaluate.load(str(own) if known else path, config_name, *args, **kwargs)
