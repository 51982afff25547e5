"""The tasks, a class each: `text_classification.py` holds `TextClassification`, the task `text-classification`.

`Task` says what a task has and does: its capabilities, and the features, model, collator and metrics that it hands to
the runner (`Prepared`). Code that several tasks need is beside this package (`text`, `media`, `models`, `loss`) or in a
base class here (`_text.py`, `_language.py`, `image_classification.py`, `speech_recognition.py`).

Finding a task imports its file, which must not import torch: a recipe is validated without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, get_args

import yaml

from hf_mps.core.choice import Choice
from hf_mps.metrics.selection import Chosen, choose

if TYPE_CHECKING:
    from datasets import Dataset as Dataset  # which tasks import from here

    from hf_mps.finetune.data.load import Rows
    from hf_mps.finetune.data.synthetic import MadeUp
    from hf_mps.finetune.models.checkpoint import Checkpoint
    from hf_mps.finetune.recipe import schema
    from hf_mps.finetune.stream.loader import Streamed
    from hf_mps.metrics import Baseline
else:
    Dataset = Any  # a recipe is validated without the library

# The name of each task in a recipe, its file and its class.
TASKS = {
    "causal-lm": "language_modeling.CausalLM",
    "distill": "sft.Distill",
    "dpo": "preferences.DPO",
    "grpo": "grpo.GRPO",
    "image-classification": "image_classification.ImageClassification",
    "image-generation": "image_generation.ImageGeneration",
    "image-segmentation": "image_segmentation.ImageSegmentation",
    "image-text": "image_text.ImageText",
    "kto": "preferences.KTO",
    "masked-lm": "language_modeling.MaskedLM",
    "multiple-choice": "multiple_choice.MultipleChoice",
    "object-detection": "object_detection.ObjectDetection",
    "orpo": "preferences.ORPO",
    "question-answering": "question_answering.QuestionAnswering",
    "rerank": "rerank.Rerank",
    "sentence-embeddings": "embeddings.SentenceEmbeddings",
    "sft": "sft.SFT",
    "sparse-embeddings": "embeddings.SparseEmbeddings",
    "speech-recognition": "speech_recognition.SpeechRecognition",
    "speech-seq2seq": "speech_seq2seq.SpeechSeq2Seq",
    "summarization": "seq2seq.Summarization",
    "text-classification": "text_classification.TextClassification",
    "token-classification": "token_classification.TokenClassification",
    "translation": "seq2seq.Translation",
}
NAMES = {kind: name for name, kind in TASKS.items()}

# Why some tasks cannot be sharded.
GENERATES = "answers are generated between steps, token by token, and ranks would wait for each other's weights"
CALLS_PARTS = "sentence-transformers' trainer calls the parts of a model by themselves"
SENTENCE_TRANSFORMERS = "sentence-transformers"


OWN: tuple[str, ...] = ("model", "processing_class", "collator", "choices", "trainer", "arguments")
OWN += ("arguments_defaults", "trainer_settings", "snippet")
"""The attributes of a task that are those of what it prepares, too."""
Shape = Literal["decoder", "encoder", "seq2seq", "choices", "image", "sound"]
Input = Literal["text", "image", "sound", "image and text", "image and mask", "image and boxes"]
Words = Literal["wordpiece", "sentence", "bytes", "chat", "pieces", ""]
"""How a tokenizer makes words; empty where the model reads none."""
R = TypeVar("R", bound=Any)
"""The class that validates a task's recipes."""


class Task(Generic[R]):
    """A kind of training. A subclass, of `Task[Recipe]`, declares what it can do, and makes and answers rows.

    An instance belongs to one recipe, its checkpoint and a device: either `prepare` makes it ready to train, or `open`
    makes a saved model ready to answer.
    """

    name: ClassVar[str] = ""
    """Its name in a recipe, as TASKS has it; a class that tasks share, such as TextTask, has none."""
    recipe_class: ClassVar[type[schema.Recipe]]
    """The class that validates its recipes: the keys, and the columns of the data by their roles."""
    auto_class: ClassVar[str]
    """The class that loads its models; by default transformers' auto class for the first of `architectures`."""
    pipeline_tag: ClassVar[str] = ""
    """The hub's name of the task, as in huggingface.co/tasks; by default its own name."""
    library: ClassVar[str] = "transformers"
    """The library that loads its models, by its name on the hub."""
    metrics: ClassVar[tuple[str, ...] | None] = None
    """The metrics that a recipe may ask for, where they do not depend on its rows."""

    truth: ClassVar[tuple[str, ...]] = ()
    """The roles that only rows with labels have."""
    optional: ClassVar[tuple[str, ...]] = ()
    """The roles that rows to be answered may lack beside those in `truth`."""
    asked: ClassVar[Mapping[str, str]] = {}
    """Columns by their roles that rows to be answered may have although the recipe names none."""
    default_columns: ClassVar[Mapping[str, str]] = {}
    """The columns of rows for a model without a recipe, where `recipe_class` has no defaults."""
    at_a_time: ClassVar[int] = 1000
    """Rows that are read and answered at a time: enough for batches of like lengths, few enough to be held."""
    batch: ClassVar[int | None] = None
    """Rows that a saved model answers at once, where it is not as many as in a run's evaluations."""
    has_probabilities = False
    """Whether answers can have the probability of every class."""

    architectures: ClassVar[tuple[str, ...]] = ()
    """How the class names in a config.json end that mean this task; the longest end of all tasks decides."""
    needs_template: ClassVar[bool] = False
    """Whether `architectures` mean this task only where the tokenizer has a chat template."""
    chats: ClassVar[bool] = False
    """Whether its models answer conversations (`hf-mps chat`)."""
    shape: ClassVar[Shape | None] = None
    """What an export gives the model to read; None where no format holds such a model."""
    outputs: ClassVar[tuple[str, ...]] = ("logits",)
    """What an export reads of the model's outputs."""

    arguments_source: ClassVar[tuple[str, str] | None] = None
    """Its subclass of TrainingArguments, where it has one: the file's path inside site-packages, and the class."""
    settled: ClassVar[Mapping[str, str]] = {}
    """Fields of these arguments that the task sets itself, each with where the recipe says it, or why not at all."""
    unsharded: ClassVar[str | None] = None
    """Why FSDP cannot divide its model, where it cannot."""
    in_groups: ClassVar[bool] = False
    """Whether all batches of a step together hold groups of `num_generations` completions."""
    shows: ClassVar[Literal["pictures", "texts", ""]] = ""
    """What its answers to a few rows are to look at, where each evaluation of a training shows them."""
    family: ClassVar[tuple[str, Input]] = ("bert", "text")
    """The usual architecture of its models, and what they read."""
    words: ClassVar[Words] = "bytes"
    """How a smoke run's tokenizer makes words, where the architecture does not tell."""
    smoke_arguments: ClassVar[Mapping[str, Any]] = {}
    """Further fields of the arguments that make a smoke run small."""

    keep: ClassVar[Any] = None
    """Trainer's `preprocess_logits_for_metrics`: what is kept of the outputs for metrics and answers."""

    recipe: R
    trainer_settings: dict[str, Any]
    trainer: Any = None
    arguments: type[Any] | None = None
    collator: Callable[[list[Any]], Any] | None = None
    processing_class: Any = None
    model: Any = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for kind in get_args(vars(cls).get("__orig_bases__", (None,))[0]):
            if isinstance(kind, type):
                cls.recipe_class = kind
        cls.name = NAMES.get(f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}", "")
        if cls.name:
            cls.pipeline_tag = cls.pipeline_tag or cls.name
            if not hasattr(cls, "auto_class"):
                cls.auto_class = f"AutoModel{cls.architectures[0]}"

    def __init__(self, recipe: R, checkpoint: Checkpoint, device: str = "cpu") -> None:
        self.recipe, self.checkpoint, self.device = recipe, checkpoint, device
        self.snippet = snippets().get(self.name)
        self.choices: dict[str, Choice[Any]] = {}
        self.trainer_settings = {} if self.keep is None else {"preprocess_logits_for_metrics": self.keep}
        self.arguments_defaults: dict[str, Any] = {}

    @classmethod
    def smoke_rows(cls, recipe: Any, folder: Path) -> dict[str, list[dict[str, Any]]]:
        """Return a few generated rows of each split under the names of the recipe's columns, as JSON holds them.

        Files that rows name (images, sound) are written into `folder`.
        """
        from hf_mps.finetune.data import synthetic  # whose recipes name tasks

        return synthetic.rows(recipe, folder, cls.smoke_row)

    @staticmethod
    def smoke_row(recipe: Any, made: MadeUp) -> dict[str, Any]:
        """Return the values of one row of `smoke_rows` by their roles, from what `made` draws for it."""
        raise NotImplementedError

    @classmethod
    def size(cls, recipe: Any) -> tuple[Any, Choice[str]]:
        """Return the configuration of the recipe's model in its real size, and where it comes from."""
        from hf_mps.finetune.models import checkpoint

        return checkpoint.of_name(recipe.model, recipe.model_type)

    @classmethod
    def smoke_model(cls, recipe: Any, folder: Path) -> bool:
        """Write a tiny model with random weights into `folder`, and return True; False where transformers' will do."""
        return False

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        """Make features, model, collator and metrics. Raises UserError for what cannot be used."""
        raise NotImplementedError

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        """Open a saved model to answer rows.

        `chosen` are the values of its run's choices by the names of `Prepared.choices`; they are empty for a model
        that comes without a run. Raises UserError for what cannot be used.
        """
        raise NotImplementedError

    def inputs(self, rows: Rows) -> Any:
        """Return what the model reads of `rows`, with or without their truth. Raises UserError for unusable rows."""
        raise NotImplementedError

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Iterable[Mapping[str, Any]]:
        """Return the rows of predictions.csv, with the truth where `rows` have one; `inputs` are those of `rows`.

        With `every` each has the probability of every class by its name (`probabilities`). The rows of a file come
        `at_a_time`, so what is learned of some must not depend on others.
        """
        raise NotImplementedError

    def reference(self) -> Any:
        """Return the model that a saved one is measured against: the one that it was trained from, or None."""
        return None

    def measures(self) -> Chosen:
        """Return the metrics that the recipe asks for, or all. Raises UserError for one that the task does not have."""
        return choose(self.recipe.metrics, self.metrics or (), self.name)

    def load(self, config: Any) -> None:
        """Load the model with `config`."""
        self.model, self.choices["model"] = self.checkpoint.model(self.auto_class, config=config)

    def made(self, predicted: tuple[Rows, Any] | None = None, **parts: Any) -> Prepared:
        """Return what trains or answers: the task's own attributes, and `parts` beside them or in their place.

        `predicted` are the rows of predictions.csv with their `inputs`.
        """
        given = {name: getattr(self, name) for name in OWN}
        if predicted is not None:
            given["predict"] = lambda trainer: self.answers(trainer, *predicted)
        return Prepared(task=self, **(given | parts))


@cache
def snippets() -> dict[str, str]:
    """Return the lines of Python that load the model of a task, by its name."""
    return dict(yaml.safe_load(Path(__file__).with_name("snippets.yaml").read_text(encoding="utf-8")))


class Picture(bytes):
    """An answer that is an image: its PNG, which gets a file beside the others where they go to a file."""


@dataclass
class Prepared:
    """A task ready for Trainer, with the rows of a run or, for a saved model, without any.

    `splits` are `train`, `validation` and any further one by name; they hold the model's columns alone, as Python
    numbers.
    """

    task: Task[Any]
    model: Any
    processing_class: Any
    collator: Callable[[list[Any]], Any] | None
    choices: dict[str, Choice[Any]]
    splits: Mapping[str, Any] = field(default_factory=dict)
    metrics: Chosen = None  # type: ignore[assignment]  # a saved model that answers measures nothing
    compute_metrics: Callable[[Any], dict[str, float]] | None = None
    # A function is called after the training: a plan and a first step need not wait for scikit-learn's import.
    baseline: Baseline | Callable[[], Baseline] | None = None

    trainer: Any = None
    """A subclass of transformers' Trainer; None is Trainer itself."""
    callbacks: Sequence[Any] = ()
    """Callbacks that the trainer needs."""
    arguments: type[Any] | None = None
    """A subclass of TrainingArguments; None is TrainingArguments itself. `Task.arguments_source` names the same one."""
    arguments_defaults: dict[str, Any] = field(default_factory=dict)
    """Arguments that the task wants where the recipe's `training` does not say otherwise."""
    trainer_settings: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the trainer."""
    before_training: Callable[[], None] | None = None
    """Calls code that the recipe names, to find its faults early: for a run, and never for a plan or an audit."""
    token_counts: Sequence[int] | None = None
    """The length in tokens of each training row, for the plan; None where rows have no tokens."""
    epoch: Callable[[Mapping[str, Any]], Choice[int]] | None = None
    """Given the training arguments: how many rows an epoch has, where the trainer does not draw each row once."""
    dryrun_batch: Callable[[list[Any]], Mapping[str, Any]] | None = None
    """Makes a whole batch of rows for a step that is only looked at, where the trainer itself generates a part."""
    predict: Callable[[Any], Iterable[Mapping[str, Any]]] | None = None
    """Given the trainer after training: the rows of predictions.csv, the validation split in its order."""
    shown: Callable[[Any], Iterable[Mapping[str, Any]]] | None = None
    """The same in an evaluation, of its first rows, where `predict` does not begin with what is to be shown."""
    figures: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, bytes]] | None = None
    """Given those rows: further pictures as {file name: PNG}, a confusion matrix for instance."""
    save: Callable[[Any, Path], None] | None = None
    """Given the trainer and a folder: how the model is saved, where `trainer.save_model` is not enough."""
    snippet: str | None = None
    """Three lines of Python that load the model from `"."`; None is the auto class with its tokenizer."""

    def answers(self, trainer: Any, rows: Rows, every: bool = False) -> Iterable[Mapping[str, Any]]:
        """Return `Task.answers` to rows that need no truth."""
        return self.task.answers(trainer, rows, self.task.inputs(rows), every)

    @property
    def parts(self) -> dict[str, Any]:
        """What its trainer is made of, with rows or without."""
        ours = {"model": self.model, "data_collator": self.collator, "processing_class": self.processing_class}
        return ours | self.trainer_settings

    @property
    def train(self) -> Any:
        """The rows that are trained on."""
        return self.splits["train"]

    @property
    def stream(self) -> Streamed | None:
        """The rows that are trained on where they are streamed."""
        return self.train if getattr(self.train, "streams", False) else None

    @property
    def sample(self) -> Any:
        """The rows that are trained on, or of streamed ones the first: for a step that is tried or looked at."""
        return self.train if self.stream is None else self.stream.sample

    @property
    def validation(self) -> Any:
        """The rows that are evaluated during training and predicted after it."""
        return self.splits["validation"]

    @property
    def further(self) -> dict[str, Any]:
        """The splits beside these two: measured once after training, as `NAME_metric`."""
        from hf_mps.finetune.data.load import SPLITS  # whose recipes name tasks

        return {name: rows for name, rows in self.splits.items() if name not in SPLITS}

    @property
    def reported(self) -> tuple[str, ...]:
        """Every number that a run reports, by the name that `expect` takes: `f1`, and `test_f1` for a further split."""
        own = self.metrics.reported
        return (*own, *(f"{split}_{number}" for split in self.further for number in own))


def names() -> list[str]:
    """Return the names of all tasks, as a recipe has them."""
    return list(TASKS)


def find(name: str) -> type[Task[Any]]:
    """Return the class of the task `name`, one of `names()`."""
    module, _, kind = TASKS[name].partition(".")
    found: type[Task[Any]] = getattr(import_module(f"{__name__}.{module}"), kind)
    return found


def every() -> list[type[Task[Any]]]:
    """Return the classes of all tasks."""
    return [find(name) for name in TASKS]
