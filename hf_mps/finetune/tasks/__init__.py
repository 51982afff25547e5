"""The tasks, a class each: `text_classification.py` holds `TextClassification`, the task `text-classification`.

`hf_mps.finetune.tasks._base.Task` says what a task has and does. Code that several tasks need is beside this package
(`text`, `media`, `models`, `loss`) or in a base class here (`_text.py`, `_language.py`, `_seq2seq.py`).

Finding a task imports its file, which must not import torch: a recipe is validated without it.
"""

from __future__ import annotations

from importlib import import_module

from hf_mps.finetune.tasks._base import Task

__all__ = ["TASKS", "Task", "every", "find", "names"]

# The name of each task in a recipe, and its class in the file of the same name.
TASKS = {
    "causal-lm": "CausalLM",
    "distill": "Distill",
    "dpo": "DPO",
    "grpo": "GRPO",
    "image-classification": "ImageClassification",
    "image-segmentation": "ImageSegmentation",
    "image-text": "ImageText",
    "kto": "KTO",
    "masked-lm": "MaskedLM",
    "multiple-choice": "MultipleChoice",
    "object-detection": "ObjectDetection",
    "orpo": "ORPO",
    "question-answering": "QuestionAnswering",
    "rerank": "Rerank",
    "sentence-embeddings": "SentenceEmbeddings",
    "sft": "SFT",
    "sparse-embeddings": "SparseEmbeddings",
    "speech-recognition": "SpeechRecognition",
    "speech-seq2seq": "SpeechSeq2Seq",
    "summarization": "Summarization",
    "text-classification": "TextClassification",
    "token-classification": "TokenClassification",
    "translation": "Translation",
}


def names() -> list[str]:
    """Return the names of all tasks, as a recipe has them."""
    return list(TASKS)


def find(name: str) -> type[Task]:
    """Return the class of the task `name`, one of `names()`."""
    found: type[Task] = getattr(import_module(f"{__name__}.{name.replace('-', '_')}"), TASKS[name])
    return found


def every() -> list[type[Task]]:
    """Return the classes of all tasks."""
    return [find(name) for name in TASKS]
