"""What a run left, opened again: its folder, a folder that `save_pretrained` wrote, or a name on the hub.

`on_device` chooses its device and the type of its weights, with which predict, evaluate and chat begin. `trainer_of` is
a trainer that trains nothing: it measures and answers as the trainer of a run does.
"""

from __future__ import annotations

import copy
import io
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_mps.core import extras, settings, status
from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError, UserError, nearest, neighbour, user_path
from hf_mps.finetune import tasks
from hf_mps.finetune.features import attention
from hf_mps.finetune.features.machine import expected_operators, precision_of
from hf_mps.finetune.models.checkpoint import PYPI, TOKENIZER, Checkpoint, resolve
from hf_mps.finetune.recipe import overrides
from hf_mps.finetune.recipe.overrides import Document, read_yaml
from hf_mps.finetune.recipe.resolve import validate
from hf_mps.finetune.recipe.schema import Recipe, map_paths
from hf_mps.finetune.recipe.training_section import DEFAULT_BATCH
from hf_mps.finetune.run import checks, failures
from hf_mps.finetune.run.failures import RESULTS
from hf_mps.finetune.run.logging import errors_only, no_bars
from hf_mps.finetune.run.run_dir import MODEL_FILES, RECIPE, checkpoints
from hf_mps.finetune.run.stages import choose_device, one_gpu, refusals_told
from hf_mps.finetune.run.trainer import recipe_trainer
from hf_mps.finetune.smoke import KEPT
from hf_mps.finetune.tasks import Prepared
from hf_mps.layer.activation import activate
from hf_mps.metal.device import precision

ADAPTER = "adapter_config.json"
# The rows of a model without a run: `predict` brings its own, `evaluate` asks for them.
NOWHERE = "no-rows"
# Keys that change a model before its training, at the values that leave a saved model as it is.
TRAINED: dict[str, Any] = {"lora": None, "packing": False, "model_type": None, "chat_template": None}
TRAINED |= {"config_overrides": {}}


@dataclass(frozen=True)
class Adapter(Checkpoint):
    """peft's adapter in the folder `source`, and `base`, the checkpoint that it belongs to.

    Tokenizer and template are the adapter's own where its folder holds them, as a run's does.
    """

    base: Checkpoint = field(kw_only=True)

    def tokenizer(self, **settings: Any) -> Any:
        try:
            return super().tokenizer(**settings)
        except UserError:  # somebody else's adapter, without a tokenizer
            return self.base.tokenizer(**settings)

    def stored_config(self) -> dict[str, Any]:
        return self.base.stored_config()

    def config(self) -> Any:
        return self.base.config()

    def model(self, auto_class: str, **settings: Any) -> tuple[Any, Choice[str]]:
        """Load the base model, and the adapter onto it. Raises UserError as `Checkpoint.model`, and without peft."""
        return self._adapted(*self.base.model(auto_class, **settings))

    def encoders(self) -> Any:
        return self.base.encoders()

    def denoiser(self) -> tuple[Any, Choice[str]]:
        return self._adapted(*self.base.denoiser())

    def _adapted(self, model: Any, loaded: Choice[str]) -> tuple[Any, Choice[str]]:
        """Return a base model with the adapter. Raises UserError without peft."""
        try:
            from peft import PeftModel
        except ImportError as error:
            install = extras.install("lora")
            raise UserError(f"model {self.name} is an adapter, and peft is not installed; next: {install}") from error
        with errors_only():
            adapted = self._load("adapter", lambda source: PeftModel.from_pretrained(model, source))
        return adapted, Choice(self.name, f"an adapter of {loaded.value}: {loaded.reason}")


@dataclass(frozen=True)
class SavedRun:
    """A saved model and all that is known of it.

    `where` is the user's word; `recipe` is the run's own, or the task's defaults for a model without a run, whose
    `results` are None. `checkpoint` opens the saved model, `base` is what it was trained from.
    """

    where: str
    task: Choice[str]
    recipe: Recipe
    document: Document
    checkpoint: Checkpoint
    base: Checkpoint | None
    results: Mapping[str, Any] | None = None

    @property
    def chosen(self) -> dict[str, Any]:
        """The values of the run's choices by their names; empty for a model without a run."""
        choices = (self.results or {}).get("choices", {})
        return {name: choice["value"] for name, choice in choices.items()}

    @property
    def to_use(self) -> Recipe:
        """The recipe without the keys that change a model before training: a saved model has those changes."""
        said = {key: value for key, value in TRAINED.items() if key in type(self.recipe).model_fields}
        return self.recipe.model_copy(update=said)

    @property
    def task_class(self) -> type[tasks.Task[Any]]:
        """The class of its task."""
        return tasks.find(self.task.value)

    def with_words(self, words: Sequence[str]) -> SavedRun:
        """Return the same with the recipe's keys that `words` (KEY=VALUE) change. Raises UserError."""
        if not words:
            return self
        document = overrides.lay(self.document, self.parsed(words))
        return replace(self, document=document, recipe=validate(document))

    def parsed(self, words: Sequence[str]) -> overrides.Overrides:
        """Return `words` as overrides. Raises UserError, for what only training reads as well."""
        parsed = overrides.parse(words, self.task.value)
        arguments = (key.removeprefix("training.") for key in parsed if key.startswith("training."))
        if ignored := next((name for name in arguments if name.startswith(OF_TRAINING)), None):
            raise UserError(f"training.{ignored} changes only a training; leave it out")
        return parsed

    def in_dtype(self, dtype: str) -> SavedRun:
        """Return the same with weights of another type in memory: float32, bfloat16, float16."""
        source = replace(self.checkpoint, dtype=dtype)
        if isinstance(source, Adapter):
            source = replace(source, base=replace(source.base, dtype=dtype))
        return replace(self, checkpoint=source)


def open_run(where: str, task: str | None = None) -> SavedRun:
    """Return what is saved at `where`: a run's folder or a checkpoint in it, any folder of from_pretrained, a hub name.

    `task` overrides what the configuration of a model without a run tells. No weights are loaded, and torch is not
    imported. Raises UserError for a folder that holds no model, and for what cannot be read.
    """
    path = user_path(where)
    home = path.resolve()
    if home.name.startswith("checkpoint-") and _is_run(home.parent):
        home = home.parent
    if where.startswith(PYPI) or not path.is_dir():
        if path.is_file() or (where.startswith((".", "/", "~")) or where.count("/") > 1):
            problem = "is a file" if path.is_file() else f"there is no such folder{neighbour(path)}"
            allowed = "a run's folder, one that save_pretrained wrote, a model's name on the hub"
            raise UserError(f"{where}: {problem}; allowed: {allowed}")
        source = resolve(where)
        try:
            source.refuse_absent()
        except UserError as error:
            # A misspelt folder has the form of a hub's name.
            if path.parent.is_dir() and (near := neighbour(path)):
                raise UserError(f"{where}: there is no such folder{near}") from error
            raise
        saved = _without_run(where, source, task)
    elif _is_run(home):
        saved = _of_run(where, path, home, task)
    else:
        saved = _without_run(where, _model_in(where, path), task)
    labels = saved.checkpoint.stored_config().get("id2label")
    if isinstance(labels, dict) and {str(number) for number in labels} != {str(n) for n in range(len(labels))}:
        numbers = ", ".join(map(str, labels))
        raise UserError(f"{where}: id2label in its config.json has {numbers}; allowed: 0 to {len(labels) - 1}")
    return saved


def _is_run(folder: Path) -> bool:
    return (folder / RECIPE).is_file() or (folder / RESULTS).is_file()


def _of_run(where: str, path: Path, home: Path, task: str | None) -> SavedRun:
    """Return the run in `home`, with the model in `path`: its own folder or a checkpoint. Raises UserError."""
    results: Any = None
    if (home / RESULTS).is_file():
        try:
            found = json.loads((home / RESULTS).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{where}: its {RESULTS} cannot be read: {error}; next: train the recipe again") from error
        results = found if isinstance(found, dict) else None
    if not any((path / name).is_file() for name in MODEL_FILES):
        whole = checkpoints(home)
        way_on = f"{whole[-1]} in its place" if whole else f"hf-mps finetune {home / RECIPE} output_dir={where}"
        raise UserError(f"{where} holds a run that has not ended and no model yet; next: {way_on}")
    stored = (home / RECIPE).is_file()
    given = copy.deepcopy((results or {}).get("recipe"))
    document = read_yaml(home / RECIPE) if stored else Document(given if isinstance(given, dict) else {})
    if not stored and (home / KEPT).is_dir():
        map_paths(document.values, lambda name: kept if (kept := home / KEPT / name).exists() else Path(name))
    recipe = validate(document)
    if task not in (None, recipe.task):
        raise UserError(f"--task {task}: {where} is a run of {recipe.task}; leave --task out")
    source = _model_in(where, path, base=recipe.model, dtype=recipe.weights)
    # The saved model is whole without it: `chat --base` alone asks for it.
    try:
        base = replace(resolve(recipe.model), dtype=recipe.weights)
    except UserError:  # it is not there any more
        base = None
    said = Choice(recipe.task, f"its {RECIPE if stored else RESULTS}")
    return SavedRun(where, said, recipe, document, source, base, results)


def _without_run(where: str, source: Checkpoint, task: str | None) -> SavedRun:
    """Return a model that comes without a run: the task's defaults, for rows that are given later."""
    said = infer_task(source, task)
    data: dict[str, Any] = {"files": {"train": NOWHERE, "validation": NOWHERE}}
    if columns := tasks.find(said.value).default_columns:
        data["columns"] = dict(columns)
    document = Document({"task": said.value, "model": where, "data": data})
    return SavedRun(where, said, validate(document), document, source, getattr(source, "base", None))


def _model_in(where: str, folder: Path, base: str | None = None, dtype: str = "float32") -> Checkpoint:
    """Return the checkpoint, or the adapter, in a folder. Raises UserError where it holds neither."""
    if (folder / ADAPTER).is_file():
        return read_adapter(where, folder, base, dtype)
    if not any((folder / name).is_file() for name in MODEL_FILES):
        allowed = "a run's folder, or one that save_pretrained wrote"
        raise UserError(f"{where}: the folder holds no model; allowed: {allowed}")
    return Checkpoint(where, str(folder), True, dtype=dtype)


def read_adapter(where: str, folder: Path, base: str | None = None, dtype: str = "float32") -> Adapter:
    """Return the adapter in `folder`, which a person called `where`; `base` names its model where the file does not do.

    Raises UserError for a file that cannot be read, and for a base model that is not there.
    """
    try:
        stored = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
        named = base or str(stored["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{where}: its {ADAPTER} cannot be read: {error}; next: save the adapter again") from error
    try:
        source = resolve(named)
    except UserError as error:
        raise UserError(f"{where} is an adapter, and its base model is missing: {error}") from error
    inner = Checkpoint(source.name, source.source, source.local, dtype=dtype)
    return Adapter(where, str(folder), True, dtype=dtype, base=inner)


# The files of sentence-transformers' models: their modules, and since release 5 the kind of model (`model_type`).
SENTENCES, SAVED = "modules.json", "config_sentence_transformers.json"
# Their module that makes weights of words, where the kind is not stored.
SPARSE = "SpladePooling"
# What a cross-encoder's own configuration has where it was saved by their release 4, and by older ones.
SCORING = ("sentence_transformers", "sbert_ce_default_activation_function")
TEMPLATE = "chat_template.jinja"


def infer_task(checkpoint: Checkpoint, asked: str | None = None) -> Choice[str]:
    """Return the task of a saved model, with the reason; `asked` is the user's word for it.

    Raises UserError for an unknown task, and for a configuration without the class of a task.
    """
    names = tasks.names()
    if asked is not None:
        if asked not in names:
            raise UserError(f"--task {asked} is not a task; allowed: {', '.join(names)}{nearest(asked, names)}")
        return Choice(asked, "--task")
    folder = checkpoint.folder()
    if folder is not None and (folder / SENTENCES).is_file():
        return _of_sentence_transformers(checkpoint, folder)
    stored = checkpoint.stored_config()
    if (said := next((key for key in SCORING if stored.get(key)), None)) and len(stored.get("id2label") or ()) == 1:
        reason = f"its configuration has one score and {said}, as sentence-transformers' CrossEncoder"
        return Choice(str(_loaded_by("CrossEncoder")), reason)
    classes = stored.get("architectures") or []
    # Its configuration is not here yet, and is fetched.
    if not classes and not checkpoint.local:
        classes = list(getattr(checkpoint.config(), "architectures", None) or ())
    template = folder and ((folder / TEMPLATE).is_file() or checkpoint.stored(TOKENIZER).get("chat_template"))
    for name in map(str, classes):
        ends = [
            (len(end), task.needs_template, task.name)
            for task in tasks.every()
            for end in task.architectures
            if name.endswith(end) and (template or not task.needs_template)
        ]
        # The longest end is the most special; of equal ones that which a chat template makes likely.
        if ends:
            _, by_template, task = max(ends)
            too = ", and its tokenizer has a chat template" if by_template else ""
            return Choice(task, f"its configuration names {name}{too}")
    named = ", ".join(map(str, classes)) or "no class"
    raise UserError(f"{checkpoint.name}: its configuration names {named}, which fits no task; next: --task TASK")


def _loaded_by(name: str) -> str | None:
    """Return the task whose models the class `name` loads."""
    return next((task.name for task in tasks.every() if task.auto_class == name), None)


def _of_sentence_transformers(checkpoint: Checkpoint, folder: Path) -> Choice[str]:
    """Return the task of a model that sentence-transformers saved. Raises UserError for a kind without one."""
    if kind := checkpoint.stored(SAVED).get("model_type"):
        if task := _loaded_by(kind):
            return Choice(task, f"its {SAVED} names {kind}")
        raise UserError(f"{checkpoint.name}: its {SAVED} names {kind}, which fits no task; next: --task TASK")
    sparse = SPARSE in (folder / SENTENCES).read_text(encoding="utf-8", errors="replace")
    too = f" and names {SPARSE}" if sparse else ""
    task = _loaded_by("SparseEncoder" if sparse else "SentenceTransformer")
    return Choice(str(task), f"its {SENTENCES} is sentence-transformers'{too}")


def answer_in_utf8() -> None:
    """Let standard output write answers as files have them, whatever the locale."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")


# Types of weights as configurations name them.
HALVES = {"float16": "float16", "bfloat16": "bfloat16", "torch.float16": "float16", "torch.bfloat16": "bfloat16"}


@contextmanager
def on_device(run: SavedRun) -> Iterator[tuple[SavedRun, Choice[str], Path, dict[str, Choice[str]]]]:
    """Choose the device of `run` and the type of its weights, and yield both with a temporary folder.

    It turns off the libraries' bars, and turns a failure of the machine into one line (RunError).
    """
    settings.refuse_unknown()
    with status.shown("loading PyTorch …"), no_bars(), tempfile.TemporaryDirectory(prefix="hf-mps-saved-") as folder:
        activate.activate()
        device = choose_device(run.recipe)
        weights = weights_of(run, device.value)
        run = run.in_dtype(weights.value)
        shown = {"weights": weights} if weights.value != "float32" else {}
        with expected_operators(run.recipe.fallback):
            try:
                yield run, device, Path(folder), shown
            except RunError:
                raise
            except Exception as error:
                if (words := failures.describe(error)) is None:
                    raise
                way_on = "; next: a smaller --batch" if words.startswith("out of memory") else ""
                raise RunError(f"{words}{way_on}") from error


def weights_of(run: SavedRun, device: str) -> Choice[str]:
    """Return the type of the weights in memory: that of the run, or of the files where `device` computes in it."""
    if run.results is not None:
        return Choice(run.recipe.weights, "weights in the recipe of its run")
    config = (run.checkpoint.base if isinstance(run.checkpoint, Adapter) else run.checkpoint).stored_config()
    if (stored := HALVES.get(str(config.get("dtype") or config.get("torch_dtype")))) is None:
        return Choice("float32", "as its files have them")
    usable = precision.dtypes(device)[stored]
    if device == "cpu" or not usable.value:
        why = "the CPU's own precision" if device == "cpu" else usable.reason
        return Choice("float32", f"its files have {stored}; {why}")
    return Choice(stored, f"as its files have them; {usable.reason}")


def say(run: SavedRun, device: Choice[str], choices: Mapping[str, Choice[Any]]) -> None:
    """Print the task, the device and what else was chosen, each with its reason, on stderr."""
    shown = {"task": run.task, "device": device, **choices}
    words = "; ".join(f"{name} {choice}" for name, choice in shown.items())
    print(f"hf-mps: {run.where}: {words}", file=sys.stderr, flush=True)


# Beginnings of arguments that say how weights change and what is kept of them: nothing here does either.
OF_TRAINING = (
    *("max_steps", "num_train", "warmup", "lr_scheduler", "optim", "learning_rate", "weight_decay", "adam_"),
    *("max_grad", "gradient_", "activation_checkpointing", "neftune", "fsdp", "torch_compile", "auto_find"),
    *("save_", "load_best", "metric_for_best", "greater_is_better", "resume_from", "restore_callback", "logging_"),
    *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "report_to", "run_name", "train_sampling"),
    *("dataloader_drop_last", "dataloader_persistent", "dataloader_num_workers", "batch_sampler", "use_cpu"),
)
EVALUATED = "per_device_eval_batch_size"


def trainer_of(
    made: Prepared, recipe: Recipe, device: Choice[str], folder: Path, chosen: Mapping[str, Any], batch: int | None
) -> tuple[Any, dict[str, Choice[Any]]]:
    """Return the task's trainer for `made` on `device`, and what was chosen for it: precision and batch.

    `chosen` are the values of the run's own choices; batches are as large as those of its evaluations, so that the
    answers are equal to the last bit. Nothing is written but an empty `folder`. Raises UserError for arguments that
    transformers refuses and a precision that the device lacks.
    """
    from transformers import PrinterCallback, TrainingArguments

    parts = made.parts
    if made.splits:
        parts |= {"train_dataset": made.sample, "eval_dataset": made.validation}
        # The sparse encoder's trainer asks for a list of callbacks.
        parts |= {"compute_metrics": made.compute_metrics, "callbacks": []}
    left_out = OF_TRAINING if device.value == "cuda" else (*OF_TRAINING, *checks.CUDA_ALONE)
    said = {k: value for k, value in recipe.training.items() if value is not None and not k.startswith(left_out)}
    precision, mixed = precision_of(said, device.value)
    own = None if made.splits else made.task.batch  # rows with labels are measured as a run measures them
    trained = chosen.get("batch")
    why = "as in the evaluations of its run" if trained else "the size of a run's evaluations"
    size = Choice(max(trained if isinstance(trained, int) else 0, DEFAULT_BATCH), why)
    if batch is not None:
        size = Choice(batch, "--batch")
    elif own is not None:
        size = Choice(own, "the task's own")
    elif EVALUATED in said:
        size = Choice(said[EVALUATED], f"training.{EVALUATED} in the recipe")
    defaults = {key: value for key, value in made.arguments_defaults.items() if not key.startswith(OF_TRAINING)}
    ours = {
        **{"output_dir": str(folder), "report_to": "none", "disable_tqdm": True, "seed": recipe.seed},
        **{"eval_strategy": "no", "save_strategy": "no", "use_cpu": device.value == "cpu"},
        EVALUATED: size.value,
    }
    attention.give(made, attention.choose(recipe.attention, made))
    with refusals_told():
        pinned = {"dataloader_pin_memory": device.value == "cuda"}
        arguments = (made.arguments or TrainingArguments)(**(pinned | defaults | mixed | said | ours))
        # A task may name a function that makes its trainer: sentence-transformers' cannot be made without a loss.
        named = made.trainer
        kind = recipe_trainer(named) if named is None or isinstance(named, type) else named
        built = kind(args=one_gpu(arguments), **parts)
    # What embeddings.apart returns is no trainer.
    if hasattr(built, "remove_callback"):
        built.remove_callback(PrinterCallback)
    return built, {"precision": precision, "batch": size}


def forget_rows(trainer: Any) -> None:
    """Let go of the rows that `trainer` has answered: accelerate keeps every data loader that it has prepared."""
    if (accelerator := getattr(trainer, "accelerator", None)) is not None:
        accelerator._dataloaders.clear()
