"""What a run left, opened again: its folder, a folder that `save_pretrained` wrote, or a name on the hub."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, nearest, neighbour
from hf_mps.finetune import tasks
from hf_mps.finetune.models import checkpoint
from hf_mps.finetune.models.checkpoint import TOKENIZER, Checkpoint
from hf_mps.finetune.recipe import overrides
from hf_mps.finetune.recipe.resolve import validate
from hf_mps.finetune.recipe.schema import Recipe
from hf_mps.finetune.recipe.yaml import Document, read_yaml
from hf_mps.finetune.run.failures import RESULTS
from hf_mps.finetune.run.run_dir import MODEL_FILES, RECIPE, checkpoints
from hf_mps.tools.saved import adapter

# The rows of a model without a run: `predict` brings its own, `evaluate` asks for them.
NOWHERE = "no-rows"
# What a recipe says of its training alone, at the values that leave a saved model as it is.
TRAINED: dict[str, Any] = {"lora": None, "packing": False, "model_type": None, "chat_template": None}
TRAINED |= {"config_overrides": {}}


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
        """The recipe without what changes a model before it is trained: the saved one has it."""
        fields = type(self.recipe).model_fields
        said = {key: value for key, value in TRAINED.items() if key in fields}
        return self.recipe.model_copy(update=said)

    @property
    def module(self) -> Any:
        """The task's module."""
        return tasks.module(self.task.value)

    def with_words(self, words: Sequence[str]) -> SavedRun:
        """Return the same with the recipe's keys that `words` (KEY=VALUE) change. Raises UserError."""
        if not words:
            return self
        document = overrides.lay(self.document, overrides.parse(words, self.task.value))
        return replace(self, document=document, recipe=validate(document))

    def in_dtype(self, dtype: str) -> SavedRun:
        """Return the same with weights of another type in memory: float32, bfloat16, float16."""
        return replace(self, checkpoint=_in_dtype(self.checkpoint, dtype))


def open_run(where: str, task: str | None = None) -> SavedRun:
    """Return what is saved at `where`: a run's folder or a checkpoint in it, any folder of from_pretrained, a hub name.

    `task` overrides what the configuration of a model without a run tells. No weights are loaded, and torch is not
    imported. Raises UserError for a folder that holds no model, and for what cannot be read.
    """
    path = Path(where).expanduser()
    if where.startswith(checkpoint.PYPI) or not path.is_dir():
        if path.is_file() or (where.startswith((".", "/", "~")) or where.count("/") > 1):
            problem = "is a file" if path.is_file() else f"there is no such folder{neighbour(path)}"
            raise UserError(f"{where}: {problem}; allowed: a run's folder, one that save_pretrained wrote, a hub name")
        return _without_run(where, checkpoint.resolve(where), None, task)
    home = path.resolve()
    if home.name.startswith("checkpoint-") and _is_run(home.parent):
        home = home.parent
    if _is_run(home):
        return _of_run(where, path, home, task)
    return _without_run(where, *_model_in(where, path), task)


def _is_run(folder: Path) -> bool:
    return (folder / RECIPE).is_file() or (folder / RESULTS).is_file()


def _of_run(where: str, path: Path, home: Path, task: str | None) -> SavedRun:
    """Return the run in `home`, with the model in `path`: its own folder or a checkpoint. Raises UserError."""
    results = _results(where, home / RESULTS)
    if not any((path / name).is_file() for name in MODEL_FILES):
        whole = checkpoints(home)
        way_on = f"{whole[-1]}, its newest checkpoint" if whole else "the command of its recipe.yaml, which goes on"
        raise UserError(f"{where} holds a run that has not ended and no model yet; next: {way_on}")
    stored = (home / RECIPE).is_file()
    document = read_yaml(home / RECIPE) if stored else Document(_given(results or {}))
    recipe = validate(document)
    if task not in (None, recipe.task):
        raise UserError(f"--task {task}: {where} is a run of {recipe.task}; leave --task out")
    source, _ = _model_in(where, path, base=recipe.model, dtype=recipe.weights)
    base = _base(recipe.model, recipe.weights)
    said = Choice(recipe.task, f"its {RECIPE if stored else RESULTS}")
    return SavedRun(where, said, recipe, document, source, base, results)


def _given(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe in a results.json, as plain values."""
    recipe = copy.deepcopy(results.get("recipe"))
    return recipe if isinstance(recipe, dict) else {}


def _base(model: str, dtype: str) -> Checkpoint | None:
    """Return what a run was trained from, where it is still there."""
    try:
        return _in_dtype(checkpoint.resolve(model), dtype)
    except UserError:
        return None


def _results(where: str, path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: its {RESULTS} cannot be read: {error}; next: train the recipe again") from error
    return results if isinstance(results, dict) else None


def _without_run(where: str, source: Checkpoint, base: Checkpoint | None, task: str | None) -> SavedRun:
    """Return a model that comes without a run: the task's defaults, for rows that are given later."""
    said = infer_task(source, task)
    values = {"task": said.value, "model": where, "data": {"files": {"train": NOWHERE, "validation": NOWHERE}}}
    if said.value == "translation":
        values["data"]["columns"] = {"source": "source", "target": "target"}  # type: ignore[index]
    document = Document(values)
    return SavedRun(where, said, validate(document), document, source, base)


def _model_in(
    where: str, folder: Path, base: str | None = None, dtype: str = "float32"
) -> tuple[Checkpoint, Checkpoint | None]:
    """Return the checkpoint in a folder, and the base model of an adapter. Raises UserError where it holds neither."""
    if (folder / adapter.FILE).is_file():
        found = adapter.read(where, folder, base, dtype)
        return found, found.base
    if not any((folder / name).is_file() for name in MODEL_FILES):
        raise UserError(
            f"{where}: the folder holds no model; allowed: a run's folder, or one that save_pretrained wrote"
        )
    return Checkpoint(where, str(folder), True, dtype=dtype), None


def _in_dtype(source: Checkpoint, dtype: str) -> Checkpoint:
    if isinstance(source, adapter.Adapter):
        return replace(source, dtype=dtype, base=replace(source.base, dtype=dtype))
    return replace(source, dtype=dtype)


# How the names of transformers' classes end, and the task of ours that they are for. Longer ends stand first.
ARCHITECTURES = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "ForImageClassification": "image-classification",
    "ForObjectDetection": "object-detection",
    "ForSemanticSegmentation": "image-segmentation",
    "ForCTC": "speech-recognition",
    "ForMaskedLM": "masked-lm",
    **dict.fromkeys(
        (f"{name}ForConditionalGeneration" for name in ("Idefics3", "SmolVLM", "VL", "Llava", "InternVL")), "image-text"
    ),
    "WhisperForConditionalGeneration": "speech-seq2seq",
    "MTModel": "translation",
    "M2M100ForConditionalGeneration": "translation",
    "ForConditionalGeneration": "summarization",
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
}
SENTENCES, SAVED = "modules.json", "config_sentence_transformers.json"
"""The files of sentence-transformers' models: their modules, and since release 5 the kind of model (`model_type`)."""
KINDS = {
    "SentenceTransformer": "sentence-embeddings",
    "SparseEncoder": "sparse-embeddings",
    "CrossEncoder": "rerank",
}
"""Their kinds of models, and the task of ours that each is for."""
SPARSE = "SpladePooling"
"""The module of theirs that makes weights of words."""
SCORING = ("sentence_transformers", "sbert_ce_default_activation_function")
"""What a cross-encoder's own configuration has where it was saved by their release 4, and by older ones."""
TEMPLATE = "chat_template.jinja"


def infer_task(checkpoint: Checkpoint, asked: str | None = None) -> Choice[str]:
    """Return the task of a saved model, and what tells it; `asked` is a person's own word for it.

    Raises UserError for a task that there is not, and for a configuration that names no class that a task is for.
    """
    names = tasks.names()
    if asked is not None:
        if asked not in names:
            raise UserError(f"--task {asked} is no task; allowed: {', '.join(names)}{nearest(asked, names)}")
        return Choice(asked, "--task")
    folder = checkpoint._folder()
    if folder is not None and (folder / SENTENCES).is_file():
        return _of_sentence_transformers(checkpoint, folder)
    stored = checkpoint.stored_config()
    if (said := next((key for key in SCORING if stored.get(key)), None)) and len(stored.get("id2label") or ()) == 1:
        return Choice("rerank", f"its configuration has one score and {said}, as sentence-transformers' CrossEncoder")
    classes = stored.get("architectures") or _of_the_hub(checkpoint)
    for name in map(str, classes):
        task = next((task for end, task in ARCHITECTURES.items() if name.endswith(end)), None)
        if task == "causal-lm" and folder is not None and _chats(folder):
            return Choice("sft", f"its configuration names {name}, and its tokenizer has a chat template")
        if task is not None:
            return Choice(task, f"its configuration names {name}")
    named = ", ".join(map(str, classes)) or "no class"
    raise UserError(f"{checkpoint.name}: its configuration names {named}, which tells no task; next: --task TASK")


def _of_sentence_transformers(checkpoint: Checkpoint, folder: Path) -> Choice[str]:
    """Return the task of a model that sentence-transformers saved. Raises UserError for a kind without one."""
    if kind := _read(folder / SAVED).get("model_type"):
        if kind in KINDS:
            return Choice(KINDS[kind], f"its {SAVED} names {kind}")
        raise UserError(f"{checkpoint.name}: its {SAVED} names {kind}, and no task is for that; next: --task TASK")
    if SPARSE in (folder / SENTENCES).read_text(encoding="utf-8", errors="replace"):
        return Choice("sparse-embeddings", f"its {SENTENCES} is sentence-transformers' and names {SPARSE}")
    return Choice("sentence-embeddings", f"its {SENTENCES} is sentence-transformers'")


def _of_the_hub(checkpoint: Checkpoint) -> list[str]:
    """Return the classes that a configuration names whose file is not here yet: it is fetched."""
    return [] if checkpoint.local else list(getattr(checkpoint.config(), "architectures", None) or ())


def _chats(folder: Path) -> bool:
    """Whether the tokenizer in `folder` has a chat template, in a file of its own or among its settings."""
    if (folder / TEMPLATE).is_file():
        return True
    return bool(_read(folder / TOKENIZER).get("chat_template"))


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
