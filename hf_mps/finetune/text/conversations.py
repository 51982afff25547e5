"""Columns of conversations in the shapes that data sets use: a list of messages, or Alpaca's three columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.text import counted
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.text import chat
from hf_mps.finetune.text.padding import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset

    from hf_mps.finetune.data.load import Rows

ALPACA = ("instruction", "input", "output", "system")


class Columns(schema.Columns):
    """Either `messages`, or `instruction` and `output` with, where the data has them, `input` and `system`."""

    messages: str | None = None
    """The column of conversations."""
    instruction: str | None = None
    """The column of the instruction."""
    input: str | None = None
    """The column of the instruction's input."""
    output: str | None = None
    """The column of the answer."""
    system: str | None = None
    """The column of the system's words."""

    @model_validator(mode="after")
    def _one_shape(self) -> Columns:
        alpaca = [role for role in ALPACA if getattr(self, role)]
        if self.messages and alpaca:
            raise ValueError(f"has messages beside {', '.join(alpaca)}; give one or the other")
        if alpaca and not (self.instruction and self.output):
            raise ValueError(f"has {', '.join(alpaca)}; give instruction and output, or messages")
        return self

    def roles(self) -> dict[str, str]:
        """Return {role: column} of what is read; the column `messages` where the recipe names none."""
        said = {role: name for role in ("messages", *ALPACA) if (name := getattr(self, role))}
        return said or {"messages": "messages"}


def conversation(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the conversation in one row's columns. Raises chat.ConversationError for a row that holds none."""
    if "messages" in row:
        return chat.messages(row["messages"])
    for role in ("instruction", "output"):
        if not isinstance(row[role], str):
            raise chat.ConversationError(f"has no {role}; allowed: a text in every row")
    # Alpaca's input comes after an empty line.
    asked = f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]
    first = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return [*first, {"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]


@contextmanager
def of_row(rows: Rows, index: int) -> Iterator[None]:
    """Turn ConversationError into UserError, which names the row."""
    try:
        yield
    except chat.ConversationError as error:
        raise UserError(f"{rows.place(index)} {error}") from error


def learned(rows: Mapping[str, Rows], features: Mapping[str, Dataset]) -> Choice[str]:
    """Describe how much of the conversations is learned (labels that are not IGNORED), and what was dropped."""
    import numpy

    labels = numpy.concatenate([numpy.asarray(row) for row in features["train"].with_format("numpy")["labels"]])
    share = float((labels != IGNORED).mean())
    out = left_out(rows, features, "their prompt alone is max_length or longer")
    told = f"{share:.0%} of the training tokens; the others are read, not learned{f'; {out}' if out else ''}"
    return Choice("the assistant's words", told)


def left_out(rows: Mapping[str, Rows], features: Mapping[str, Any], why: str) -> str:
    """Say how many rows of each split were left out because they are `why`; empty where none was."""
    left = {split: len(rows[split].dataset) - len(features[split]) for split in features}
    told = ", ".join(counted(count, f"{split} row") for split, count in left.items() if count)
    return f"left out, {why}: {told}" if told else ""


def smoke_row(columns: Columns, question: str, answer: str) -> dict[str, Any]:
    """Return a row under the recipe's own columns."""
    if "messages" in (roles := columns.roles()):
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return {roles["messages"]: said}
    values = {"instruction": question, "input": "", "output": answer, "system": ""}
    return {column: values[role] for role, column in roles.items()}
