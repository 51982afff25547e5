"""Which task a saved model was made for, told by its configuration where no run tells it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, nearest
from hf_mps.finetune import tasks
from hf_mps.finetune.models.checkpoint import TOKENIZER, Checkpoint

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


def of(checkpoint: Checkpoint, asked: str | None = None) -> Choice[str]:
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
