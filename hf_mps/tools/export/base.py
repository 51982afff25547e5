"""What the formats share: loading a saved model, its logits, and their comparison with an export's."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy

from hf_mps.core import extras
from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError, UserError, nearest
from hf_mps.core.text import first_line, gib
from hf_mps.finetune.models import quantization
from hf_mps.finetune.models.checkpoint import VOCABULARY
from hf_mps.finetune.text.lengths import positions
from hf_mps.tools.saved.run import SavedRun

Batch = dict[str, Any]
Logits = Sequence[numpy.ndarray]

F32, F16, BF16, Q8, Q4 = "f32", "f16", "bf16", "q8", "q4"

# The largest relative difference of an export's logits, by its weights (docs/benchmarks.md has measured ones). float32
# differs only by the order of its additions; float16 rounds each weight to 11 bits, bfloat16 to 8, and groups of 8 or 4
# bits round to 1/255 or 1/15 of their range.
TOLERANCE = {F32: 1e-3, F16: 1e-2, BF16: 3e-2, Q8: 5e-2, Q4: 4e-1}
# Short and long texts, with words that tokenizers split: positions, padding and pieces of words all take part.
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
DTYPES = {F32: "float32", F16: "float16", BF16: "bfloat16"}


COMPANIONS = {
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
    *("preprocessor_config.json", "processor_config.json"),
}


class Format:
    """A format that a model can be exported to. Importing one imports neither torch nor the format's library."""

    name: ClassVar[str]
    shapes: ClassVar[tuple[str, ...]]
    """The shapes of the models that it holds (`Task.shape`)."""
    weights: ClassVar[tuple[str, ...]]
    """The kinds of weights that it writes, the default first."""
    default: ClassVar[str]
    """Why the first of `weights` is the default."""
    modules: ClassVar[tuple[str, ...]] = ()
    """The modules that it needs, which the extra of its name installs."""
    packages: ClassVar[tuple[str, ...]]
    """What a record names the version of; the last one is the library that writes."""

    def refuse_missing(self) -> None:
        """Raise UserError where a module that it needs is not installed."""
        if missing := [name for name in self.modules if find_spec(name) is None]:
            raise UserError(f"export {self.name} needs {missing[0]}; next: {extras.install(self.name)}")

    def choose(self, said: str | None) -> Choice[str]:
        """Return the kind of weights to write. Raises UserError for one that the format does not have."""
        if said is None:
            return Choice(self.weights[0], self.default)
        if said not in self.weights:
            allowed = f"{', '.join(self.weights)}{nearest(said, self.weights)}"
            raise UserError(f"--weights {said}: export {self.name} does not write these; allowed: {allowed}")
        return Choice(said, "--weights")

    def check(self, saved: SavedRun, options: Options) -> None:
        """Raise UserError for a model or options that the format cannot take."""

    def write(self, job: Job, folder: Path) -> None:
        """Write the model into `folder`, which is not there yet. Raises UserError for what cannot be converted."""
        raise NotImplementedError

    def compare(self, job: Job, folder: Path) -> Comparison:
        """Open what was written and compare its logits with the model's."""
        raise NotImplementedError


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Keep the reports, bars and warnings of a format's libraries off the screen; their errors are raised."""
    # logging has no public name for what `disable` was called with.
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
    """What the export's weights are: a key of `TOLERANCE`."""
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
    lengths: tuple[int, ...] = ()
    """Those of Core ML's inputs, in tokens."""

    @property
    def name(self) -> str:
        """The model's name for files: the last part of its path."""
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


def precision(saved: SavedRun) -> Choice[str]:
    """Return the dtype in which the model is loaded and compared: float32, or its own where float32 does not fit.

    Raises UserError where the model does not fit into the free memory in its own dtype either; a model with quantized
    layers stays quantized.
    """
    stored, _ = _stored(saved)
    needed, free = room(saved, "float32")
    # In half of it, as the export is opened beside the model.
    if needed <= free / 2:
        return Choice("float32", "rounding by the export itself would hide the export's differences")
    size, _ = room(saved, stored)
    if size > free and quantized(saved) is None:
        lacks = f"{saved.where} takes {gib(size)} in {stored}, and {gib(free)} are free"
        raise UserError(f"{lacks}; next: close other programs")
    return Choice(stored, f"float32 would take {gib(needed)} of the {gib(free)} that are free")


def room(saved: SavedRun, dtype: str) -> tuple[int, int]:
    """Return the bytes of the model's weights in `dtype`, none of them quantized, and those that are free now."""
    import psutil
    import torch

    _, count = _stored(saved)
    return count * getattr(torch, dtype).itemsize, psutil.virtual_memory().available


def quantized(saved: SavedRun) -> quantization.Kind | None:
    """Return how the run's base has its layers below the adapters: nf4, fp4 or int8; None for whole weights."""
    return getattr(saved.recipe, quantization.KEY, None)


def _stored(saved: SavedRun) -> tuple[str, int]:
    """Return the dtype of the largest part of the stored weights, and how many weights there are."""
    counts: dict[str, int] = {}
    base = getattr(saved.checkpoint, "base", None) or saved.checkpoint
    folder = base.folder()
    for file in sorted(folder.glob("*.safetensors")) if folder else ():
        for kind, size in tensors(file):
            counts[kind] = counts.get(kind, 0) + size
    largest = max(counts, key=lambda kind: counts[kind], default="F32")
    return DTYPES.get(largest.lower(), "float32"), sum(counts.values())


def tensors(file: Path) -> list[tuple[str, int]]:
    """Return the dtype (safetensors' word) and the size of a file's tensors. Raises UserError for a torn file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            parts = [opened.get_slice(name) for name in opened.keys()]  # noqa: SIM118  no mapping
            return [(part.get_dtype(), math.prod(part.get_shape())) for part in parts]
    except (OSError, SafetensorError) as error:  # a download or a copy that was cut off
        why = "it is a folder" if file.is_dir() else first_line(error)
        raise UserError(f"{file}: the weights cannot be read: {why}; next: copy or save the model again") from error


def load(saved: SavedRun, dtype: str) -> Any:
    """Return the model with its adapter, if it has one, on the CPU in `dtype`, ready to answer. Raises UserError.

    A base that was quantized is so again, and multiplies in `dtype`.
    """
    source, kind, packed = saved.in_dtype(dtype).checkpoint, saved.task_class.auto_class, quantized(saved)
    model, _ = source.model(kind) if packed is None else quantization.load(source, kind, packed, dtype)
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

    shape, draw = saved.task_class.shape, torch.Generator().manual_seed(0)
    if shape == "image":
        pixels = torch.randint(0, 256, (2, 224, 224, 3), generator=draw, dtype=torch.uint8).numpy()
        return [dict(saved.checkpoint.image_processor()(list(pixels), return_tensors="pt"))]
    if shape == "sound":
        extractor = saved.checkpoint.feature_extractor()
        sound = torch.randn(2, SECONDS * extractor.sampling_rate, generator=draw).numpy()
        return [dict(extractor(list(sound), sampling_rate=extractor.sampling_rate, return_tensors="pt", padding=True))]

    tokenizer = saved.checkpoint.tokenizer()
    longest = min(LONGEST, positions(tokenizer, model.config))
    settings = {"return_tensors": "pt", "truncation": True, "max_length": longest}
    if shape == "decoder":
        return [{"input_ids": tokenizer([text], **settings)["input_ids"]} for text in TEXTS]
    if shape == "seq2seq":
        batches = [dict(tokenizer([text], **settings)) for text in TEXTS]
        return [batch | {"decoder_input_ids": batch["input_ids"][:, :8]} for batch in batches]
    if shape == "choices":
        flat = tokenizer([TEXTS[0]] * CHOICES, list(TEXTS), padding=True, **settings)
        return [{name: ids[None] for name, ids in flat.items()}]
    pairs = (TEXTS[:2], TEXTS[2:])
    return [dict(tokenizer(list(texts), padding=True, **settings)) for texts in pairs]


def logits(model: Any, batches: Sequence[Batch]) -> list[numpy.ndarray]:
    """Return the model's logits for each batch in float32; those of padding are zero, which no export has to give."""
    import torch

    with torch.inference_mode():
        return [masked(answered(model(**batch)), batch) for batch in batches]


def answered(outputs: Mapping[str, Any]) -> numpy.ndarray:
    """Return the logits among a model's outputs in float32; of question answering start and end, (batch, length, 2)."""
    import torch

    names = SPAN if SPAN[0] in outputs else ("logits",)
    found = [torch.as_tensor(outputs[name]).float().numpy() for name in names]
    return numpy.stack(found, axis=-1) if len(found) > 1 else found[0]


def masked(logits: numpy.ndarray, batch: Batch) -> numpy.ndarray:
    """Return logits with zeros where the batch has padding, if they are logits of its tokens."""
    mask = batch.get("attention_mask")
    if mask is None or logits.ndim != 3 or logits.shape[:2] != tuple(mask.shape):
        return logits
    return numpy.where(numpy.asarray(mask)[..., None] > 0, logits, 0.0)


def copy_companions(saved: SavedRun, folder: Path) -> None:
    """Copy into `folder` what the model is used with beside its weights, where it is not there yet.

    That is tokenizer, processor, template, generation; an adapter's own come before those of its base model.
    """
    for source in filter(None, (saved.checkpoint, getattr(saved.checkpoint, "base", None))):
        place, vocabulary = source.folder(), False
        for path in sorted(place.iterdir()) if place else ():
            vocabulary = vocabulary or bool(VOCABULARY.fullmatch(path.name))
            used = VOCABULARY.fullmatch(path.name) or path.name in COMPANIONS
            if used and path.is_file() and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)
        # A tokenizer is whole: nothing of another one is mixed into it.
        if vocabulary:
            break


@dataclass(frozen=True)
class Difference:
    """The difference of two lists of logits; `relative` is its norm over the norm of the model's own logits."""

    largest: float
    relative: float
    tolerance: float
    same: int
    """Positions where both give the largest logit to the same class or token."""
    positions: int

    @property
    def within(self) -> bool:
        """Whether the difference is within the tolerance of the weights; False where a number is not finite."""
        return self.relative <= self.tolerance

    def __str__(self) -> str:
        return (
            f"relative difference {self.relative:.2g} (allowed {self.tolerance:g}), largest {self.largest:.2g},"
            f" the same answer at {self.same} of {self.positions} positions"
        )


@dataclass(frozen=True)
class Comparison:
    """The comparison of an export with the model: who opened it, and the difference, or why there is none."""

    opened_by: str
    difference: Difference | None = None
    not_compared: str = ""

    def lines(self) -> list[str]:
        """Return it as lines for the screen."""
        found = [f"logits   {self.difference}"] if self.difference is not None else []
        return found + ([f"not compared: {self.not_compared}"] if self.not_compared else [])

    def refuse(self, what: str) -> None:
        """Raise RunError where the difference is over the tolerance."""
        if self.difference is not None and not self.difference.within:
            apart = f"its logits, opened by {self.opened_by}, are not the model's: {self.difference}"
            raise RunError(f"{what}: {apart}; nothing was written")


def difference(model: Logits, export: Logits, weights: str) -> Difference:
    """Return how far two lists of logits are apart, each of shape (…, classes), for an export of these `weights`.

    Raises RunError where they are of different shapes.
    """
    pairs = list(zip(model, export, strict=True))
    for ours, theirs in pairs:
        if ours.shape != theirs.shape:
            raise RunError(f"the export gives logits of shape {theirs.shape}, the model {ours.shape}")
    # In float64, so that the norms add no rounding of their own.
    pairs = [(ours.astype(numpy.float64), theirs.astype(numpy.float64)) for ours, theirs in pairs]
    apart = numpy.concatenate([(ours - theirs).ravel() for ours, theirs in pairs])
    whole = numpy.concatenate([ours.ravel() for ours, _ in pairs])
    return Difference(
        largest=float(numpy.abs(apart).max()),
        relative=float(numpy.linalg.norm(apart) / (numpy.linalg.norm(whole) or 1.0)),
        tolerance=TOLERANCE[weights],
        same=sum(int((ours.argmax(-1) == theirs.argmax(-1)).sum()) for ours, theirs in pairs),
        positions=sum(ours[..., 0].size for ours, _ in pairs),
    )
