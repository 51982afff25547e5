"""The saved model that is exported: loaded on the CPU, what it is given to compare by, and its own logits."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.text import gib
from hf_mps.finetune.models import quantization
from hf_mps.finetune.models.quantization import Kind
from hf_mps.tools.export.formats import LANGUAGE, SEQUENCE_TO_SEQUENCE
from hf_mps.tools.saved.run import SavedRun

if TYPE_CHECKING:
    import numpy

    Batch = dict[str, Any]

# Short and long, with words that tokenizers split, so that positions, padding and pieces of words all take part.
TEXTS = (
    "Once upon a time there was a little girl who liked to play in the park.",
    "The results were surprisingly good!",
    "He asked whether the train to Edinburgh would still leave at half past seven, and nobody could tell him.",
    "No.",
)
LONGEST = 64
"""Tokens of a text that is compared."""
CHOICES = 4
SECONDS = 1
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
SPAN = ("start_logits", "end_logits")
"""What a model of question answering gives in place of `logits`."""
DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Keep the reports, bars and warnings of a format's libraries off the screen; their errors are raised."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


@dataclass
class Job:
    """One export under way: the saved model, loaded; what is written, and what it is compared by."""

    saved: SavedRun
    weights: str
    """What the export's weights are: a key of `formats.TOLERANCE`."""
    model: Any
    """None from the comparison on."""
    architecture: str
    batches: list[Batch]
    reference: list[numpy.ndarray]
    """The model's own logits for `batches`."""
    options: Options
    choices: dict[str, Choice[Any]] = field(default_factory=dict)
    """What was decided on the way, for the screen and the record."""
    traced: Any = None
    """Core ML's source: the model as TorchScript."""

    @property
    def name(self) -> str:
        """The model's name for files: the last part of where it lies."""
        return re.sub(r"[^\w.-]+", "-", Path(self.saved.where).name) or "model"

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.saved.checkpoint.tokenizer()


@dataclass(frozen=True)
class Options:
    """What single formats take: Core ML the lengths of its inputs, GGUF the place of llama.cpp's converter."""

    lengths: tuple[int, ...] | None = None
    converter: str | None = None


def auto_class(task: str) -> str:
    """Return the name of transformers' auto class that loads a model of `task`."""
    from hf_mps.finetune import tasks
    from hf_mps.finetune.models import language

    if task in LANGUAGE:
        return language.AUTO_CLASS
    if task in SEQUENCE_TO_SEQUENCE:
        return "AutoModelForSeq2SeqLM"
    return str(tasks.module(task).AUTO_CLASS)


def precision(saved: SavedRun) -> Choice[str]:
    """Return the dtype in which the model is loaded and compared: float32, or where that does not fit its own.

    Raises UserError where the model in its own dtype is larger than the memory that is free; one whose layers are
    quantized is loaded so.
    """
    stored, _ = _stored(saved)
    needed, free = room(saved, "float32")
    if needed <= free / 2:
        return Choice("float32", "what float32 rounds is no difference of the export")
    size, _ = room(saved, stored)
    if size > free and quantized(saved) is None:
        raise UserError(f"{saved.where} takes {gib(size)} in {stored}, and {gib(free)} are free; next: free memory")
    return Choice(stored, f"float32 would take {gib(needed)} of the {gib(free)} that are free")


def room(saved: SavedRun, dtype: str) -> tuple[int, int]:
    """Return the bytes of the model's weights in `dtype`, none of them quantized, and those that are free now."""
    import psutil
    import torch

    _, count = _stored(saved)
    return count * getattr(torch, dtype).itemsize, psutil.virtual_memory().available


def quantized(saved: SavedRun) -> Kind | None:
    """Return how the run's base has its layers below the adapters: nf4, fp4 or int8; None for whole weights."""
    return getattr(saved.recipe, quantization.KEY, None)


def _stored(saved: SavedRun) -> tuple[str, int]:
    """Return the dtype of the largest part of the stored weights, and how many weights there are."""
    from safetensors import safe_open

    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    counts: dict[str, int] = {}
    base = getattr(saved.checkpoint, "base", None) or saved.checkpoint
    folder = base._folder()
    for file in sorted(folder.glob("*.safetensors")) if folder else ():
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  no mapping
                part = opened.get_slice(name)
                size = 1
                for length in part.get_shape():
                    size *= length
                counts[part.get_dtype()] = counts.get(part.get_dtype(), 0) + size
    largest = max(counts, key=lambda kind: counts[kind], default="F32")
    return names.get(largest, "float32"), sum(counts.values())


def load(saved: SavedRun, dtype: str) -> Any:
    """Return the model with its adapter, if it has one, on the CPU in `dtype`, ready to answer. Raises UserError.

    A base that was quantized is so again, and multiplies in `dtype`.
    """
    import transformers

    kind = getattr(transformers, auto_class(saved.task.value))
    source, packed = saved.in_dtype(dtype).checkpoint, quantized(saved)
    if packed is None:
        return source.model(kind)[0].eval()
    settings = {"quantization_config": quantization.config(packed, dtype), "device_map": {"": "cpu"}}
    model, _ = source.model(kind, **settings)
    quantization.settle(model, dtype)
    return model.eval()


def plain(model: Any) -> Any:
    """Return transformers' model in one with peft's adapters around it, which stay in its layers."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def samples(saved: SavedRun, model: Any) -> list[Batch]:
    """Return batches of the model's inputs as PyTorch tensors, the same at each call.

    A text model gets `TEXTS`: a decoder one by one, an encoder two at a time with padding. A model of pictures or sound
    gets noise through its own processor.
    """
    import torch

    task, draw = saved.task.value, torch.Generator().manual_seed(0)
    if task == "image-classification":
        pixels = torch.randint(0, 256, (2, 224, 224, 3), generator=draw, dtype=torch.uint8).numpy()
        return [dict(saved.checkpoint.image_processor()(list(pixels), return_tensors="pt"))]
    if task == "speech-recognition":
        extractor = saved.checkpoint.feature_extractor()
        sound = torch.randn(2, SECONDS * extractor.sampling_rate, generator=draw).numpy()
        return [dict(extractor(list(sound), sampling_rate=extractor.sampling_rate, return_tensors="pt", padding=True))]
    from hf_mps.finetune.text.lengths import positions

    tokenizer = saved.checkpoint.tokenizer()
    longest = min(LONGEST, positions(tokenizer, model.config))
    settings = {"return_tensors": "pt", "truncation": True, "max_length": longest}
    if task in LANGUAGE:
        return [{"input_ids": tokenizer([text], **settings)["input_ids"]} for text in TEXTS]
    if task in SEQUENCE_TO_SEQUENCE:
        batches = [dict(tokenizer([text], **settings)) for text in TEXTS]
        return [batch | {"decoder_input_ids": batch["input_ids"][:, :8]} for batch in batches]
    if task == "multiple-choice":
        flat = tokenizer([TEXTS[0]] * CHOICES, list(TEXTS), padding=True, **settings)
        return [{name: ids[None] for name, ids in flat.items()}]
    pairs = (TEXTS[:2], TEXTS[2:])
    return [dict(tokenizer(list(texts), padding=True, **settings)) for texts in pairs]


def logits(model: Any, batches: Sequence[Batch]) -> list[numpy.ndarray]:
    """Return the model's logits for each batch in float32; those of padding are zero, which no export has to give."""
    import torch

    found = []
    with torch.inference_mode():
        for batch in batches:
            found.append(masked(answered(model(**batch)), batch))
    return found


def answered(outputs: Mapping[str, Any]) -> numpy.ndarray:
    """Return the logits among a model's outputs in float32; of question answering start and end, (batch, length, 2)."""
    import numpy
    import torch

    names = SPAN if SPAN[0] in outputs else ("logits",)
    found = [torch.as_tensor(outputs[name]).float().numpy() for name in names]
    return numpy.stack(found, axis=-1) if len(found) > 1 else found[0]


def masked(logits: numpy.ndarray, batch: Batch) -> numpy.ndarray:
    """Return logits with zeros where the batch has padding, if they are logits of its tokens."""
    import numpy

    mask = batch.get("attention_mask")
    if mask is None or logits.ndim != 3 or logits.shape[:2] != tuple(mask.shape):
        return logits
    return numpy.where(numpy.asarray(mask)[..., None] > 0, logits, 0.0)


def companions(saved: SavedRun) -> list[Path]:
    """Return the files beside the weights that a model is used with: tokenizer, processor, template, generation.

    An adapter's own come before those of its base model.
    """
    from hf_mps.finetune.models.checkpoint import VOCABULARY

    base = getattr(saved.checkpoint, "base", None)
    found: dict[str, Path] = {}
    for source in filter(None, (saved.checkpoint, base)):
        folder = source._folder()
        for path in sorted(folder.iterdir()) if folder else ():
            if path.is_file() and (VOCABULARY.fullmatch(path.name) or path.name in COMPANIONS):
                found.setdefault(path.name, path)
        if any(VOCABULARY.fullmatch(name) for name in found):
            break
    return list(found.values())


def copy_companions(saved: SavedRun, folder: Path) -> None:
    """Copy into `folder` what the model is used with, where it is not there yet."""
    for path in companions(saved):
        if not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)


COMPANIONS = {
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
}
