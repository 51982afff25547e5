"""README.md of a run: a model card that the hub reads, with the choices and their reasons, and the recipe."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from hf_mps.core.choice import Choice
from hf_mps.core.files import plain
from hf_mps.core.text import duration, memory
from hf_mps.finetune.report.results import SPLIT, RunRecord, is_hub_id
from hf_mps.metrics import available

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
