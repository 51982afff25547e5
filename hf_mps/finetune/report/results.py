"""What a run leaves for later: one dataclass, and the dict that results.json holds."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.files import plain
from hf_mps.finetune.recipe.expect import Expectation
from hf_mps.metrics import Baseline

if TYPE_CHECKING:
    from hf_mps.metal.kernels.coverage import Coverage

SCHEMA = 1
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
PACKAGES = ("hf-mps", "torch", "transformers", "accelerate", "datasets")


@dataclass
class RunRecord:
    """Everything about a finished run that its files report.

    Units: seconds, bytes, training samples per second (epochs x rows / seconds of training). `recipe` is what ran, with
    the user's own words for paths, which the files name by their last part; `log_history` is the Trainer's; metric
    names carry no `eval_` prefix.
    """

    name: str
    """The recipe's name, `glue/mrpc`, or the stem of the user's YAML file."""
    recipe: dict[str, Any]
    device: Choice[str]
    """The device type that trained, and why; `simulated` says whether it was a simulated one."""
    choices: dict[str, Choice[Any]]
    metrics: dict[str, float]
    main_metric: str
    log_history: list[dict[str, Any]]
    train_seconds: float
    samples_per_second: float
    baseline: Baseline | None = None
    greater_is_better: bool = True
    simulated: bool = False
    """Whether the CPU of a machine without Metal computed: time and memory are then no Mac's."""
    peak_memory: int | None = None
    """Bytes; None where the device cannot tell."""
    fallback: list[dict[str, Any]] = field(default_factory=list)
    unexpected_fallback: list[str] = field(default_factory=list)
    """The operators among them that the recipe does not name."""
    metal_kernels: Coverage | None = None
    """What ran with a release's own Metal kernels (HF_MPS_KERNELS), in this process; None where none were asked for."""
    guards: list[Any] = field(default_factory=list)
    sentinels: list[Any] = field(default_factory=list)
    world: dict[str, Any] | None = None
    """The processes that trained together, `ranks_record.of_all`; None for one alone."""
    versions: dict[str, str] = field(default_factory=lambda: versions())
    expectation: Expectation | None = None
    model: str | None = None
    """The checkpoint that was fine-tuned; what is no hub id (a folder) stays out of the card's front matter."""
    dataset: str | None = None
    """The data's hub id (`nyu-mll/glue`); None where it is the user's own or generated."""
    dataset_config: str | None = None
    dataset_name: str = ""
    """The data in words (`generated paraphrase pairs`); the hub id and configuration where empty."""
    split: str = "validation"
    """The split that `metrics` were taken on."""
    pipeline_tag: str = ""
    """The hub's name of the task, as in huggingface.co/tasks."""
    auto_class: str = "AutoModelForSequenceClassification"
    """The class of transformers that loads the model, shown in the card's snippet."""
    language: str | None = None
    snippet: str | None = None
    """Three lines that load the model from `"."`; None is the auto class with its tokenizer."""
    library: str = "transformers"
    """The library that loads the model, by its name on the hub."""
    predictions: str | None = None
    """The name of the file of predictions, and of the task's pictures."""
    pictures: list[str] = field(default_factory=list)
    stream: dict[str, Any] | None = None
    """What the run got of streamed rows (`run.record.stream_figures`); None where the rows were loaded whole."""
    drawn: bool = True
    """Whether training.png is there for the card to show."""

    @property
    def model_words(self) -> str:
        """The model's name for people: its hub id, or the last part of its folder; empty where it has none."""
        return "" if self.model is None else self.model if is_hub_id(self.model) else PurePath(self.model).name

    @property
    def dataset_words(self) -> str:
        """The data's name for people; empty where it has none."""
        return self.dataset_name or " ".join(filter(None, (self.dataset, self.dataset_config)))


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a hub id, `owner/name` or an old `name`, and is no local folder or file."""
    return bool(HUB_ID.fullmatch(name)) and not Path(name).exists()


def versions() -> dict[str, str]:
    """Return the versions of what ran by distribution name, without importing any; also `python` and `platform`."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name.replace("-", "_")] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found | {"python": platform.python_version(), "platform": platform.platform()}


def results(record: RunRecord) -> dict[str, Any]:
    """The content of results.json, schema 1; a number that is not finite is null, and keys are only ever added.

    - `schema`: 1
    - `name`, `recipe`: the recipe's name, and all of its keys as they ran, local paths by their last part
    - `device`: {"value": "mps" | "cuda" | "cpu", "reason": str}
    - `simulated`: bool, whether that device was simulated; seconds, samples per second and bytes are then no Mac's
    - `choices`: {name: {"value": any, "reason": str}}
    - `metrics`: {name: number}; `main_metric`: its name; `greater_is_better`: bool; `split`: str
    - `baseline`: {"what": str, "metrics": {name: number}} or null
    - `expectation`: {"metric": str, "low": number | null, "high": number | null, "met": bool} or null
    - `train_seconds`, `samples_per_second`: numbers; `peak_memory_bytes`: int or null
    - `fallback`: [object]; `unexpected_fallback`: [str]
    - `metal_kernels`: {"release": str, "launches": int, "kernels": int, "share": number, "missing": [{"operator": str,
      "reason": str, "launches": int}], "others": {str: int}} or null, of the process that ended the run
    - `predictions`: str or null; `pictures`: [str], files beside this one; `stream`: object or null
    - `guards`: [{"name": str, "times": int, "lines": [str], "issue": str}]
    - `sentinels`: [{"name": str, "times": int, "lines": [str]}], what they warned of
    - `world`: object or null, of a run of several processes (its keys: `finetune/run/ranks_record.py`)
    - `log_history`: [object], the Trainer's, one for each logging step or evaluation
    - `versions`: {name: str}
    """
    content: Mapping[str, Any] = {
        "schema": SCHEMA,
        "name": record.name,
        "recipe": record.recipe,
        "device": record.device,
        "simulated": record.simulated,
        "choices": record.choices,
        "metrics": record.metrics,
        "main_metric": record.main_metric,
        "greater_is_better": record.greater_is_better,
        "split": record.split,
        "baseline": record.baseline,
        "expectation": record.expectation,
        "train_seconds": record.train_seconds,
        "samples_per_second": record.samples_per_second,
        "peak_memory_bytes": record.peak_memory,
        "fallback": record.fallback,
        "unexpected_fallback": record.unexpected_fallback,
        "metal_kernels": record.metal_kernels and record.metal_kernels.record(),
        "predictions": record.predictions,
        **{"pictures": record.pictures, "stream": record.stream, "world": record.world},
        "guards": record.guards,
        "sentinels": record.sentinels,
        "log_history": record.log_history,
        "versions": record.versions,
    }
    written = plain(content)
    assert isinstance(written, dict)
    return written
