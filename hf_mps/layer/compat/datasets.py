"""load_dataset(task=…), and labels of text that a script's `map` turns into numbers.

The task gave the columns of a dataset the names that it expects. Removed from datasets with 3.0; renaming the columns
takes its place. Source: the templates of datasets 2.18 (src/datasets/tasks). Needless where load_dataset takes `task`.

Numbers stay numbers where pandas 3 reads texts as large strings: datasets keeps a column's type where the new values
fit it, and texts are excepted: numbers do not become texts (https://github.com/huggingface/datasets/issues/6805). Its
test knows `string` alone; csv files read with pandas 3 have `large_string`, so run_glue.py with labels of text in a csv
trains on "0" and "1". Needless where datasets refuses the cast for both.
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


def _cast(stock: Callable[..., Any], array: Any, pa_type: Any, *args: Any, **kwargs: Any) -> Any:
    import pyarrow as pa

    allowed = args[0] if args else kwargs.get("allow_primitive_to_str", True)
    if not allowed and pa.types.is_large_string(pa_type) and pa.types.is_primitive(array.type):
        print_notice(f"map: numbers in place of a column's texts stay {array.type}; datasets would keep them as texts")
        # datasets' own error for `string`, upon which its writer keeps the type of the new values.
        raise TypeError(f"Couldn't cast array of type {array.type} to {pa_type}: numbers do not become texts")
    return stock(array, pa_type, *args, **kwargs)


def concerns(module: ModuleType) -> bool:
    """Whether load_dataset lacks the argument; whether array_cast makes texts of numbers for large strings.

    Raises AttributeError without the function.
    """
    if hasattr(module, "load_dataset"):
        return "task" not in inspect.signature(module.load_dataset).parameters
    import pyarrow as pa

    try:
        module.array_cast(pa.array([1]), pa.large_string(), allow_primitive_to_str=False)
    except TypeError:
        return False
    return True


patches = {"datasets.load:load_dataset_builder": _builder, "datasets.table:array_cast": _cast}
