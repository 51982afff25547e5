"""What every task declares, and that nothing outside `tasks` knows a task by its name."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import hf_mps
from hf_mps.finetune import tasks
from hf_mps.finetune.tasks import Task

PACKAGE = Path(hf_mps.__file__).parent
# `rerank` is a metric too, and datasets names its own tasks (`load_dataset(…, task=…)`).
OTHERS = {"metrics/table.py", "metrics/selection.py", "finetune/models/reranking.py", "layer/compat/datasets.py"}


def test_no_file_outside_tasks_names_a_task() -> None:
    names, found = set(tasks.names()), []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith("finetune/tasks/") or name in OTHERS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and node.value in names:
                found.append(f"{name}:{node.lineno}: {node.value}")
    assert found == []


@pytest.mark.parametrize("name", tasks.names())
def test_a_task_is_a_class_that_trains_and_answers(name: str) -> None:
    task = tasks.find(name)
    assert task.name == name
    assert task.recipe_class.model_fields["task"].annotation is not None
    assert task.auto_class
    assert task.pipeline_tag
    for method in ("prepare", "open", "inputs"):
        assert getattr(task, method) is not getattr(Task, method), method
    ways = ("smoke_row", "smoke_rows")
    assert any(inspect.getattr_static(task, way) is not inspect.getattr_static(Task, way) for way in ways)
    roles = task.recipe_class.model_fields["data"].annotation.model_fields["columns"].annotation.model_fields  # type: ignore[union-attr]
    assert {role for role in task.truth if role not in roles} <= {"messages"}


def test_no_two_tasks_mean_the_same_class_of_a_model() -> None:
    ends = [(end, task.needs_template) for task in tasks.every() for end in task.architectures]
    assert len(ends) == len(set(ends))
    assert len({task.auto_class for task in tasks.every() if task.library != "transformers"}) == 4
