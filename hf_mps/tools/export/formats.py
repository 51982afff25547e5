"""The formats a model can leave in: what each holds, in which weights, and what it needs. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Literal

from hf_mps.core import extras
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, nearest

LANGUAGE = ("causal-lm", "sft", "dpo", "grpo")
"""Tasks whose model is a decoder that writes text."""
ENCODERS = ("text-classification", "token-classification", "question-answering", "masked-lm")
"""Tasks whose model reads the tokens of a text once and gives logits."""
SEQUENCE_TO_SEQUENCE = ("summarization", "translation")
F32, F16, BF16, Q8, Q4 = "f32", "f16", "bf16", "q8", "q4"

TOLERANCE: Mapping[str, float] = MappingProxyType({F32: 1e-3, F16: 1e-2, BF16: 3e-2, Q8: 5e-2, Q4: 4e-1})
"""The relative difference of the logits that an export may show, by its weights (measured ones: docs/guide-mac.md).

float32 differs by the order of its additions alone; float16 rounds each weight to 11 bits, bfloat16 to 8, and groups
of 8 or 4 bits round to 1/255 or 1/15 of their range.
"""


@dataclass(frozen=True)
class Format:
    """One way out: the tasks it holds, its weights (the default first), and what must be installed."""

    name: str
    what: str
    tasks: tuple[str, ...]
    weights: tuple[str, ...]
    default: str
    """Why the first of `weights` is the default."""
    extra: str | None = None
    packages: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise UserError where a package that it needs is not installed."""
        missing = [name for name in self.packages if not _installed(name)]
        if missing:
            assert self.extra is not None
            raise UserError(f"export {self.name} needs {missing[0]}; next: {extras.install(self.extra)}")

    def refuse_task(self, task: str, who: str) -> None:
        """Raise UserError where the format does not hold the model of `task`; `who` names that model."""
        if task not in self.tasks:
            raise UserError(
                f"{who} is of the task {task}, which export {self.name} does not hold; allowed:"
                f" {', '.join(self.tasks)}; next: {_instead(task)}"
            )

    def choose(self, said: str | None) -> Choice[str]:
        """Return the kind of weights to write. Raises UserError for one that the format does not have."""
        if said is None:
            return Choice(self.weights[0], self.default)
        if said not in self.weights:
            allowed = ", ".join(self.weights)
            raise UserError(
                f"--weights {said}: export {self.name} does not write them; allowed: {allowed}"
                f"{nearest(said, self.weights)}"
            )
        return Choice(said, "--weights")


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        one.name: one
        for one in (
            Format(
                "merged",
                "safetensors with the adapter merged, for transformers",
                (*LANGUAGE, *SEQUENCE_TO_SEQUENCE, *ENCODERS, "multiple-choice", "image-classification"),
                (BF16, F16, F32),
                "half the bytes of float32 with its range; the dtype that language models are published in",
            ),
            Format(
                "gguf",
                "one file for llama.cpp, Ollama and LM Studio",
                LANGUAGE,
                (BF16, F16, F32, Q8),
                "the converter's best 16 bits, from which llama-quantize makes smaller ones",
                "gguf",
                ("gguf",),
            ),
            Format(
                "mlx",
                "safetensors for mlx-lm",
                LANGUAGE,
                (BF16, F16, F32, Q8, Q4),
                "the dtype that language models are published in; q4 takes a quarter of it",
                "mlx",
                ("mlx_lm",),
            ),
            Format(
                "coreml",
                "model.mlpackage for Apple's frameworks",
                ENCODERS,
                (F16, F32),
                "the Neural Engine and Core ML's GPU path compute in it",
                "coreml",
                ("coremltools",),
            ),
            Format(
                "onnx",
                "model.onnx for ONNX Runtime",
                (*ENCODERS, "multiple-choice", "image-classification", "speech-recognition", *LANGUAGE),
                (F32,),
                "ONNX Runtime's CPU kernels compute in it",
                "onnx",
                ("onnx", "onnxscript", "onnxruntime"),
            ),
        )
    }
)

FormatName = Literal["merged", "gguf", "mlx", "coreml", "onnx"]


def named(name: str) -> Format:
    """Return the format of that name. Raises UserError for one that is not known."""
    if name not in FORMATS:
        raise UserError(f"export {name}: no such format; allowed: {', '.join(FORMATS)}{nearest(name, FORMATS)}")
    return FORMATS[name]


def _instead(task: str) -> str:
    """Return what else a model of that task can leave as."""
    holding = [one.name for one in FORMATS.values() if task in one.tasks]
    return f"hf-mps export {' or '.join(holding)}" if holding else "share the run's own folder, as hf-mps push does"


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False
