"""load_dataset(task=…), which gave the columns of a dataset the names that a task expects.

Removed from datasets with 3.0; renaming the columns takes its place. Source: the templates of datasets 2.18
(src/datasets/tasks). Needless where load_dataset takes `task`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hf_mps.core.notices import print_notice

# Task -> the column as datasets have it -> the name that the task gives it; the others are dropped.
TASKS: dict[str, dict[str, str]] = {
    "audio-classification": {"audio": "audio", "label": "labels"},
    "automatic-speech-recognition": {"audio": "audio", "transcription": "transcription"},
    "image-classification": {"image": "image", "label": "labels"},
    "language-modeling": {"text": "text"},
    "question-answering-extractive": {"question": "question", "context": "context", "answers": "answers"},
    "summarization": {"text": "text", "summary": "summary"},
    "text-classification": {"text": "text", "label": "labels"},
}


def _builder(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if "task" not in kwargs:
        return stock(*args, **kwargs)
    task = kwargs.pop("task")
    builder = stock(*args, **kwargs)
    if task is None:
        return builder
    if task not in TASKS:
        raise ValueError(f"load_dataset(task={task!r}): allowed: {', '.join(TASKS)}")
    columns = TASKS[task]
    print_notice(f"load_dataset(task={task!r}): its columns become {', '.join(columns.values())}, others are dropped")
    for name in ("as_dataset", "as_streaming_dataset"):
        setattr(builder, name, _renaming(getattr(builder, name), columns))
    return builder


def _renaming(stock: Callable[..., Any], columns: dict[str, str]) -> Callable[..., Any]:
    def renamed(*args: Any, **kwargs: Any) -> Any:
        found = stock(*args, **kwargs)
        if not isinstance(found, dict):
            return _rename(found, columns)
        for split in found:
            found[split] = _rename(found[split], columns)
        return found

    return renamed


def _rename(rows: Any, columns: dict[str, str]) -> Any:
    """Return the rows with the task's columns alone. Raises ValueError where one is missing."""
    there = list(rows.column_names)
    missing = [old for old, new in columns.items() if old not in there and new not in there]
    if missing:
        raise ValueError(f"load_dataset(task=…) needs the column {missing[0]}; there: {', '.join(there)}")
    rows = rows.rename_columns({old: new for old, new in columns.items() if old != new and new not in there})
    return rows.select_columns([name for name in rows.column_names if name in columns.values()])


def concerns(module: ModuleType) -> bool:
    """Return whether load_dataset lacks the argument."""
    return "task" not in inspect.signature(module.load_dataset).parameters


patches = {"datasets.load:load_dataset_builder": _builder}
