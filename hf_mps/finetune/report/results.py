"""The record of a finished run, the dict that results.json holds, and README.md: a model card that the hub reads."""

from __future__ import annotations

import copy
import math
import platform
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib import metadata
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import yaml

from hf_mps.core.choice import Choice
from hf_mps.core.errors import brief
from hf_mps.core.files import plain
from hf_mps.core.text import duration, memory
from hf_mps.finetune.models.checkpoint import HUB_ID
from hf_mps.finetune.recipe.expect import Expectation
from hf_mps.finetune.recipe.schema import map_paths
from hf_mps.metrics import Baseline, available

if TYPE_CHECKING:
    from hf_mps.metal.kernels.coverage import Coverage


SCHEMA = 1
SPLIT = "validation"
"""The split that a run's metrics are taken on."""
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
    peak_memory: int
    """Bytes."""
    model: str
    """The checkpoint that was fine-tuned; the card's front matter names it only by a hub id."""
    baseline: Baseline | None = None
    greater_is_better: bool = True
    simulated: bool = False
    """Whether the CPU of a machine without Metal computed: time and memory are then no Mac's."""
    fallback: list[dict[str, Any]] = field(default_factory=list)
    unexpected_fallback: list[str] = field(default_factory=list)
    """The operators among them that the recipe does not name."""
    metal_kernels: Coverage | None = None
    """The share of a release's own Metal kernels (HF_MPS_KERNELS) in this process; None without that variable."""
    training_kernels: dict[str, dict[str, Any]] = field(default_factory=dict)
    """hf_mps' own kernels that this process asked for: whether each was used, and why (`training_kernels.trial`)."""
    guards: list[Any] = field(default_factory=list)
    sentinels: list[Any] = field(default_factory=list)
    world: dict[str, Any] | None = None
    """The processes that trained together, `record.of_all`; None for one alone."""
    # By a lambda, as the function is defined further down.
    versions: dict[str, str] = field(default_factory=lambda: versions())
    expectation: Expectation | None = None
    doubt: str | None = None
    """Why the run seems to have learnt nothing (`doubt`); None where all is well."""
    dataset: str | None = None
    """The data's hub id (`nyu-mll/glue`); None where it is the user's own or generated."""
    dataset_config: str | None = None
    dataset_name: str = ""
    """The data in words (`generated paraphrase pairs`); the hub id and configuration where empty."""
    pipeline_tag: str = ""
    """The hub's name of the task, as in huggingface.co/tasks."""
    auto_class: str = "AutoModelForSequenceClassification"
    """The class of transformers that loads the model, shown in the card's snippet."""
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
        """Return the model's name for people: its hub id, or the last part of its folder."""
        return self.model if is_hub_id(self.model) else PurePath(self.model).name

    @property
    def dataset_words(self) -> str:
        """Return the data's name for people; empty where it has none."""
        return self.dataset_name or " ".join(filter(None, (self.dataset, self.dataset_config)))


def is_hub_id(name: str) -> bool:
    """Return whether `name` has the form of a hub id (`owner/name`, formerly `name`) and is not a local path."""
    return bool(HUB_ID.fullmatch(name)) and not Path(name).exists()


def versions() -> dict[str, str]:
    """Return the versions of what ran by distribution name, without importing any; also `python` and `platform`."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name.replace("-", "_")] = metadata.version(name)
    return found | {"python": platform.python_version(), "platform": platform.platform()}


def results(record: RunRecord) -> dict[str, Any]:
    """Return the content of results.json, schema 1; a number that is not finite is null, and keys are only ever added.

    - `schema`: 1
    - `name`, `recipe`: the recipe's name, and all of its keys as they ran, local paths by their last part
    - `device`: {"value": "mps" | "cuda" | "cpu", "reason": str}
    - `simulated`: bool, whether that device was simulated; seconds, samples per second and bytes are then no Mac's
    - `choices`: {name: {"value": any, "reason": str}}
    - `metrics`: {name: number}; `main_metric`: its name; `greater_is_better`: bool; `split`: str
    - `baseline`: {"what": str, "metrics": {name: number}} or null
    - `expectation`: {"metric": str, "low": number | null, "high": number | null, "met": bool} or null
    - `doubt`: str or null, why the run seems to have learnt nothing, and what to try
    - `train_seconds`, `samples_per_second`: numbers; `peak_memory_bytes`: int
    - `fallback`: [object]; `unexpected_fallback`: [str]
    - `metal_kernels`: {"release": str, "launches": int, "kernels": int, "share": number, "missing": [{"operator": str,
      "reason": str, "launches": int}], "others": {str: int}} or null, of the process that ended the run
    - `training_kernels`: {name: {"on": bool, "reason": str}}, hf_mps' own, where the run asked for one
    - `predictions`: str or null; `pictures`: [str], files beside this one; `stream`: object or null
    - `guards`: [{"name": str, "times": int, "lines": [str], "issue": str}]
    - `sentinels`: [{"name": str, "times": int, "lines": [str]}], what they warned of
    - `world`: object or null, of a run of several processes (its keys: `finetune/run/record.py`)
    - `log_history`: [object], the Trainer's, one for each logging step or evaluation
    - `versions`: {name: str}
    """
    names = (
        *("name", "recipe", "device", "simulated", "choices", "metrics", "main_metric", "greater_is_better"),
        *("baseline", "expectation", "doubt", "train_seconds", "samples_per_second", "peak_memory", "fallback"),
        *("unexpected_fallback", "metal_kernels", "training_kernels", "predictions", "pictures", "stream", "world"),
        *("guards", "sentinels", "log_history", "versions"),
    )
    content = {"schema": SCHEMA, "split": SPLIT} | {name: getattr(record, name) for name in names}
    content["metal_kernels"] = record.metal_kernels and record.metal_kernels.record()
    content = {"peak_memory_bytes" if name == "peak_memory" else name: value for name, value in content.items()}
    return dict(plain(content))


KEPT = ("model", "log_history", "device", "metal_kernels")
"""Fields without paths, and the model, of which the files say its last part alone."""


def without_paths(record: RunRecord, folder: Path) -> RunRecord:
    """Return the record with base names in place of the recipe's paths and of the run's `folder`.

    The user's home elsewhere becomes `~`. Files of a run are published as they are; recipe.yaml, which stays on this
    machine, has the whole paths, and the run goes on with it.
    """
    names = {path: Path(path).name for said in _of_recipe(record.recipe, folder) for path in _ways(said)}
    paths = sorted(names, key=len, reverse=True)
    # (?!) is found nowhere, where a recipe names no path.
    found = re.compile("|".join(rf"(?<![\w./~-]){re.escape(path)}(?![\w-])" for path in paths) or r"(?!)")
    home = re.compile(rf"(?<![\w.-]){re.escape(str(Path.home()))}(?=/|$)")

    def change(text: str) -> str:
        return home.sub("~", found.sub(lambda match: names[match[0]], text))

    kept = {of.name: getattr(record, of.name) for of in fields(record) if of.name not in KEPT}
    return replace(record, **{name: _mapped(value, change) for name, value in kept.items()})


def _of_recipe(recipe: dict[str, Any], folder: Path) -> list[str]:
    """Return the recipe's paths, as the user said them, and the run's folder."""
    values, found = copy.deepcopy(recipe), [str(folder)]
    model, output = values.pop("model", None), values.get("output_dir")
    # The function keeps what it is asked for; `values` are a copy.
    map_paths(values, lambda said: found.append(said) or Path(said))  # type: ignore[func-returns-value]
    found += [model] if isinstance(model, str) and not is_hub_id(model) else []
    return [*found, output] if isinstance(output, str) else found


def _ways(said: str) -> set[str]:
    """Return the spellings of a path with more than one part."""
    whole = Path(said).expanduser()
    ways = {said, str(whole), str(whole.absolute()), str(whole.resolve())}
    return {way for way in ways if "/" in way.rstrip("/") and Path(way).name}


def _mapped(value: Any, change: Any) -> Any:
    """Return the value with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{of.name: _mapped(getattr(value, of.name), change) for of in fields(value)})
    return change(str(value)) if isinstance(value, Path) else value


LONGER = "next: more training.num_train_epochs, another training.learning_rate, or more rows"
HARDER = "next: validation rows that the baseline gets wrong"


def doubt(record: RunRecord, answer: str | None = None) -> str | None:
    """Return why a run seems to have learnt nothing, or lost what it had learnt, and what to try; None if all is well.

    `answer` is that of `only_answer`. A smoke run, whose scores do not count, raises no doubt.
    """
    if "smoke" in record.choices:
        return None
    name, greater = record.main_metric, record.greater_is_better
    rewards = _finite(entry.get("reward") for entry in record.log_history)
    if rewards and not any(rewards):
        return "every reward was 0; next: easier prompts, a larger model, or a reward that some answers get"
    if answer is not None:
        shown = repr(brief(answer)) if answer else "nothing"
        return f"all rows have one answer, {shown}: the model has learnt nothing; {LONGER}"
    came, base = record.metrics.get(name), record.baseline.metrics.get(name) if record.baseline else None
    if came is None or not math.isfinite(came):
        return None

    def above(one: float, other: float) -> bool:
        one, other = round(one, 4), round(other, 4)  # as they are shown: equal does not read as better
        return one > other if greater else one < other

    if base is not None and not above(came, base):
        what = record.baseline.what if record.baseline else ""
        # No more can be had of a share or a percentage: the rows do not tell the two apart.
        way_on = HARDER if greater and round(came, 4) in (1, 100) else LONGER
        return f"{name} {came:.4f} is no better than the baseline ({base:.4f}), which {what}; {way_on}"
    steps = [entry for entry in record.log_history if _finite([entry.get(f"eval_{name}")])]
    best = (max if greater else min)(steps, key=lambda entry: entry[f"eval_{name}"], default=None)
    if best is None or not above(best[f"eval_{name}"], came):
        return None
    earlier = f"{best[f'eval_{name}']:.4f} at step {best['step']}"
    return f"{name} was better before: {earlier}; next: training.load_best_model_at_end=true, or fewer epochs"


def closing_line(record: RunRecord) -> str | None:
    """Return the run's doubt, or that it beats its baseline; None where there is nothing to compare."""
    base, name = record.baseline.metrics if record.baseline else {}, record.main_metric
    compared = name in base and math.isfinite(record.metrics.get(name, math.nan)) and "smoke" not in record.choices
    return record.doubt or (f"{name} is better than the baseline's" if compared else None)


def _finite(values: Iterable[Any]) -> list[float]:
    return [value for value in values if isinstance(value, (int, float)) and math.isfinite(value)]


SIMULATED = "simulated: the CPU of a machine without Metal computed"


def card(record: RunRecord) -> str:
    """Return the model card: hub front matter, results, a snippet that loads the model, choices, recipe, versions."""
    curves = f"![Loss, {record.main_metric} and learning rate over the training steps](training.png)"
    captions = {name: name.rpartition(".")[0].replace("_", " ").capitalize() for name in record.pictures}
    answers = f"holds the model's answer to each row of the {SPLIT} split."
    parts = [
        f"---\n{front_matter(record)}\n---",
        f"# {record.name}",
        _opening(record),
        "## Results",
        _results(record),
        *([curves] if record.drawn else []),
        *[f"![{_cell(caption)}]({name})" for name, caption in captions.items()],
        *([f"[{record.predictions}]({record.predictions}) {answers}"] if record.predictions else []),
        "## Use",
        'In this folder, or with the model\'s hub id in place of `"."`:',
        _fenced("python", _snippet(record)),
        *_section("Choices", _choices(record)),
        *_section("Operators that ran on the CPU", _fallback(record)),
        *_section("Metal kernels", f"{record.metal_kernels}." if record.metal_kernels else ""),
        *_section("Guards that acted", _acted(record.guards, "guard", "what it did")),
        *_section("Signs of a fault", _acted(record.sentinels, "sentinel", "what it found")),
        "## Recipe",
        _fenced("yaml", yaml.safe_dump(plain(record.recipe), sort_keys=False, allow_unicode=True, width=120)),
        "## Versions",
        _table(("package", "version"), record.versions.items()),
    ]
    return "\n\n".join(parts) + "\n"


def front_matter(record: RunRecord) -> str:
    """Return the card's metadata as YAML, as huggingface_hub writes it, without numbers that are not finite."""
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type=record.pipeline_tag,
            dataset_type=record.dataset or "other",  # the hub needs an id, and the user's own data have none
            dataset_name=record.dataset_words or "the user's own data",
            dataset_config=record.dataset_config,
            dataset_split=SPLIT,
            metric_type=kind,
            metric_name=name,
            metric_value=float(value),
        )
        for name, value in record.metrics.items()
        if (kind := _hub_metric(name)) and math.isfinite(value)
    ]
    data = ModelCardData(
        library_name=record.library,
        tags=["hf-mps", "generated_from_trainer"],
        base_model=record.model if is_hub_id(record.model) else None,
        datasets=[record.dataset] if record.dataset else None,
        metrics=sorted({kind for name in record.metrics if (kind := _hub_metric(name))}) or None,
        pipeline_tag=record.pipeline_tag,
        model_name=record.name,
        eval_results=results or None,
    )
    return str(data.to_yaml()).strip()


def _hub_metric(name: str) -> str | None:
    """Return the id of evaluate's metric that a number belongs to (`f1` for `f1_macro`); None for a loss and the
    like.
    """
    known = {metric for metric in available() if "/" not in metric}
    kind = re.sub(r"_(macro|micro|weighted)$", "", name)
    return kind if kind in known else None


def _opening(record: RunRecord) -> str:
    base = f"`{_code(record.model_words)}`"
    if is_hub_id(record.model):
        base = f"[{record.model}](https://huggingface.co/{record.model})"
    data = f" on {_cell(record.dataset_words)}" if record.dataset_words else ""
    device, took = f"`{record.device.value}`", duration(record.train_seconds)
    where = f"the device {device} ({_cell(record.device.reason)})"
    cost = f"{took} ({record.samples_per_second:.1f} samples/s, {memory(record.peak_memory)} of memory at peak)"
    if record.simulated:  # the chip is that of a profile
        where = f"a simulated device {device}"
        cost = f"{took} on a CPU that simulated a Mac's GPU; a Mac's speed and memory differ"
    return f"Fine-tuned from {base}{data}, by hf_mps on {where}. Training took {cost}."


def _results(record: RunRecord) -> str:
    base = record.baseline.metrics if record.baseline else {}
    shown = {record.main_metric: f"**{record.main_metric}**"}
    rows = [(shown.get(name, name), _number(came), _number(base.get(name))) for name, came in record.metrics.items()]
    heads = (f"metric ({SPLIT})", "this model", "baseline")
    table = _table(heads, rows) if base else _table(heads[:2], [row[:2] for row in rows])
    notes = [f"The baseline {_cell(record.baseline.what)}."] if record.baseline and base else []
    notes += [f"Expected by the recipe: {record.expectation}."] if record.expectation else []
    notes += [f"**To look at:** {_cell(record.doubt)}."] if record.doubt else []
    return "\n\n".join([table, *notes])


def _snippet(record: RunRecord) -> str:
    return record.snippet or (
        f"from transformers import {record.auto_class}, AutoTokenizer\n"
        f'model = {record.auto_class}.from_pretrained(".")\n'
        'tokenizer = AutoTokenizer.from_pretrained(".")'
    )


def _choices(record: RunRecord) -> str:
    device = Choice(record.device.value, SIMULATED) if record.simulated else record.device
    choices = {"device": device, **record.choices}
    rows = ((name, f"`{_code(_words(choice.value))}`", choice.reason) for name, choice in choices.items())
    return _table(("what", "value", "why"), rows)


def _fallback(record: RunRecord) -> str:
    names = list(dict.fromkeys(name for entry in record.fallback for name in entry))
    rows = [[_words(entry.get(name, "")) for name in names] for entry in record.fallback]
    return _table(names, rows) if rows else ""


def _acted(found: Sequence[Any], kind: str, did: str) -> str:
    """Return the table of guards or sentinels that acted: name, lines, how often, and a guard's upstream issue."""
    with_issue = any(entry.get("issue") for entry in found)
    heads = (kind, did, "times", "reported in")
    rows = [
        (f"`{_code(entry['name'])}`", "; ".join(entry["lines"]), str(entry["times"]), entry.get("issue", ""))
        for entry in found
    ]
    return _table(heads[: 3 + with_issue], [row[: 3 + with_issue] for row in rows]) if rows else ""


def _section(title: str, content: str) -> list[str]:
    return [f"## {title}", content] if content else []


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in [heads, ["---"] * len(heads), *rows])


def _cell(text: str) -> str:
    """Escape text so that it stays in a table's cell and opens no tag; safe to apply twice."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(str(text).split())).replace("<", "&lt;")


def _code(text: str) -> str:
    return text.replace("`", "'")


def _fenced(language: str, text: str) -> str:
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`+", text))])
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items())
    return ", ".join(map(_words, value)) if isinstance(value, (list, tuple)) else str(value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if math.isfinite(value) else "not finite"
