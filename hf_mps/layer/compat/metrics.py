"""datasets.load_metric, which left datasets with 3.0, and evaluate.load where the hub cannot be reached.

Replaced by evaluate.load, which downloads a metric's code from the hub. Those of `as_evaluate.names` are computed here,
with the same interface and no network: for load_metric always, for evaluate.load where it finds nothing itself.
Needless where datasets has the function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hf_mps.core.notices import print_notice
from hf_mps.core.patching import Give
from hf_mps.core.text import first_line

SHARED = ("process_id", "num_process", "cache_dir", "experiment_id", "keep_in_memory")
"""What datasets.load_metric, evaluate.load and as_evaluate.load all take."""


def load_metric(path: str, config_name: str | None = None, *more: Any, **keywords: Any) -> Any:
    """Return the metric `path`, an evaluate.Metric; the arguments are those of datasets 1 and 2.

    Raises FileNotFoundError for a name that neither hf_mps nor evaluate.load has.
    """
    from hf_mps.metrics import as_evaluate

    keywords |= dict(zip((*SHARED, "download_config", "download_mode", "revision"), more, strict=False))
    if path in as_evaluate.names():
        print_notice(f"datasets.load_metric: {path} is computed here, with evaluate's interface")
        return as_evaluate.load(path, config_name, **_shared(keywords))
    import evaluate

    for gone in ("script_version", "trust_remote_code", "use_auth_token"):
        keywords.pop(gone, None)
    print_notice(f"datasets.load_metric: evaluate.load takes its place for {path}")
    try:
        return evaluate.load(path, config_name, **keywords)
    except (FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"load_metric: {path} is a metric of the hub, and evaluate.load did not get it ({first_line(error)}); "
            f"without a network there are {', '.join(as_evaluate.names())}"
        ) from error


def _shared(keywords: dict[str, Any]) -> dict[str, Any]:
    return {name: keywords[name] for name in SHARED if name in keywords}


def _load(
    stock: Callable[..., Any], path: str, config_name: Any = None, module_type: Any = None, *more: Any, **keywords: Any
) -> Any:
    try:
        return stock(path, config_name, module_type, *more, **keywords)
    except (FileNotFoundError, ConnectionError):
        from hf_mps.metrics import as_evaluate

        if path not in as_evaluate.names() or module_type not in (None, "metric"):
            raise
    # Outside the handler: an error of the metric's own does not come with the hub's.
    print_notice(f"evaluate.load: {path} is neither cached nor to be had from the hub; it is computed here")
    return as_evaluate.load(path, config_name, **dict(zip(SHARED, more, strict=False)), **_shared(keywords))


def concerns(module: ModuleType) -> bool:
    """Whether it is the library: a script's own datasets.py or evaluate.py, of the same names, are left alone."""
    if module.__name__ == "datasets":
        return hasattr(module, "load_dataset")
    return hasattr(sys.modules.get("evaluate.loading"), "evaluation_module_factory")


patches = {"datasets:load_metric": Give(load_metric), "evaluate.loading:load": _load, "evaluate:load": _load}
