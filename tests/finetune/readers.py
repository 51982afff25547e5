"""The rows of a recipe's `data`, read as a run reads them, with columns of a test's own."""

from __future__ import annotations

from typing import Any

import sklearn  # noqa: F401  sets KMP_ variables when it is first imported, which no single test is to answer for
from pydantic import create_model

from hf_mps.core.errors import UserError
from hf_mps.finetune.data import load
from hf_mps.finetune.recipe.schema import Columns, Data


def loaded(said: dict[str, Any], columns: dict[str, str]) -> dict[str, load.Rows]:
    """The splits of the `data` that says this, its `columns` {role: name}."""
    named = create_model("Named", __base__=Columns, **{role: (str, column) for role, column in columns.items()})
    made = Data.model_validate(said).model_copy(update={"columns": named()})
    load.check(made)
    return load.load(made, seed=1)


def both(name: str) -> dict[str, dict[str, str]]:
    """One file for both splits."""
    return {"files": {"train": name, "validation": name}}


def refusal(said: dict[str, Any], columns: dict[str, str]) -> str:
    """The line that refuses the data; fails the test where they are read."""
    try:
        loaded(said, columns)
    except UserError as error:
        return str(error)
    raise AssertionError("the data were read")
