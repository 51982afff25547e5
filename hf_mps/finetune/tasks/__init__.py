"""The tasks, a class each: `text_classification.py` holds `TextClassification`, the task `text-classification`.

`hf_mps.finetune.tasks._base.Task` says what a task has and does. Code that several tasks need is beside this package
(`text`, `media`, `models`, `loss`) or in a base class here (`_text.py`, `_language.py`, `_images.py`).

Finding a task imports its file, which must not import torch: a recipe is validated without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hf_mps.finetune.tasks._base import Task

__all__ = ["TASKS", "Task", "every", "find", "names"]

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
