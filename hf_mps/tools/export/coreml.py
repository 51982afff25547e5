"""`export coreml`: coremltools converts the traced encoder to an ML program whose inputs have one of a few lengths.

Conversion runs on Linux too, but Core ML predicts on macOS alone: elsewhere the traced module, from which coremltools
converted, answers in its place.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy

from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError, UserError
from hf_mps.core.text import summary
from hf_mps.finetune.text.lengths import positions
from hf_mps.tools.export import base, merged
from hf_mps.tools.export.base import F16, F32, Comparison, Format, Job, Options, difference
from hf_mps.tools.saved.run import SavedRun

PACKAGE = "model.mlpackage"
LENGTHS = (32, 64, 128, 256, 512)
HIDDEN = -1e4
"""What a score gets where there is padding: float16, whose least number is -65504, holds a sum of two such."""
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class CoreML(Format):
    """An ML program for Apple's frameworks."""

    name = "coreml"
    shapes = ("encoder",)
    weights = (F16, F32)
    default = "the Neural Engine and Core ML's GPU path compute in it"
    modules = ("coremltools",)
    packages = ("coremltools",)

    def check(self, saved: SavedRun, options: Options) -> None:
        """Raise UserError for lengths that the model does not have."""
        if options.lengths is not None:
            if len(set(options.lengths)) < 2:
                raise UserError(f"--lengths {options.lengths[0]}: allowed: two lengths or more, such as 64,128")
            most = positions(saved.checkpoint.tokenizer(), saved.checkpoint.config())
            if over := [length for length in options.lengths if not 2 <= length <= most]:
                raise UserError(f"--lengths {over[0]}: allowed: 2 to {most}, the positions that this model has")

    def write(self, job: Job, folder: Path) -> None:
        """Write model.mlpackage, the configuration and the tokenizer. Raises UserError for what it cannot convert."""
        import coremltools

        lengths = _lengths(job)
        job.lengths = lengths.value
        names = [name for name in INPUTS if name in job.batches[0]]
        model = merged.plain_model(job, folder.with_name(f"{folder.name}-plain"))
        traced = job.traced = _traced(job, model, names, lengths.value[-1])
        job.choices["lengths"] = Choice(", ".join(map(str, lengths.value)), lengths.reason)
        job.choices["runs on"] = Choice("macOS 15, iOS 18", "before them Core ML takes one input of several lengths")
        shapes = [[1, length] for length in lengths.value]
        shape = coremltools.EnumeratedShapes(shapes, default=shapes[0])
        try:
            converted = coremltools.convert(
                traced,
                inputs=[coremltools.TensorType(name, shape, numpy.int32) for name in names],
                outputs=[coremltools.TensorType(name) for name in job.saved.task_class.outputs],
                convert_to="mlprogram",
                minimum_deployment_target=coremltools.target.macOS15,
                compute_precision=getattr(coremltools.precision, {F16: "FLOAT16", F32: "FLOAT32"}[job.weights]),
                skip_model_load=True,
            )
        except (NotImplementedError, ValueError, RuntimeError, TypeError, KeyError) as error:
            raise UserError(
                f"{job.saved.where}: coremltools {coremltools.__version__} does not convert"
                f" {type(model).__name__}: {summary(error)}; next: hf-mps export onnx RUN OUT"
            ) from error
        folder.mkdir()
        converted.save(str(folder / PACKAGE))
        model.config.save_pretrained(folder)
        base.copy_companions(job.saved, folder)

    def compare(self, job: Job, folder: Path) -> Comparison:
        """Open the package again; compare Core ML's logits on macOS, and elsewhere those of what it was converted from.

        Raises RunError where the package does not have the inputs and lengths that it should.
        """
        import coremltools

        version = f"coremltools {metadata.version('coremltools')}"
        on_a_mac = platform.system() == "Darwin"
        opened = coremltools.models.MLModel(str(folder / PACKAGE), skip_model_load=not on_a_mac)
        description, asked = opened.get_spec().description, set(job.lengths)
        for given in description.input:
            array = given.type.multiArrayType
            found = {int(shape.shape[1]) for shape in array.enumeratedShapes.shapes} or {int(array.shape[1])}
            if found != asked:
                raise RunError(f"the package takes {given.name} of {sorted(found)} tokens, not {sorted(asked)}")
        if {given.name for given in description.output} != set(job.saved.task_class.outputs):
            raise RunError(f"the package gives {', '.join(given.name for given in description.output)}")
        if on_a_mac:
            return Comparison(f"{version} and Core ML", _difference(job, opened.predict, job.weights))

        def answer(inputs: dict[str, Any]) -> dict[str, Any]:
            import torch

            with torch.no_grad():
                found = job.traced(*(torch.from_numpy(rows) for rows in inputs.values()))
            return {name: output.numpy() for name, output in zip(job.saved.task_class.outputs, found, strict=True)}

        alike = f"{_same_weights(job, opened)} weights in the package"
        opened_by = f"{version}; the TorchScript that it converted was compared, and {alike}"
        why = f"Core ML predicts on macOS alone, and this is {platform.system()}"
        return Comparison(opened_by, _difference(job, answer, F32), why)


def _lengths(job: Job) -> Choice[tuple[int, ...]]:
    if job.options.lengths is not None:
        return Choice(tuple(sorted(set(job.options.lengths))), "--lengths; a text is padded to the next one")
    most = positions(job.tokenizer, base.plain(job.model).config)
    fitting = tuple(dict.fromkeys((*(length for length in LENGTHS if length < most), min(most, LENGTHS[-1]))))
    return Choice(fitting, "the default, within the model's positions; a text is padded to the next one")


def _traced(job: Job, model: Any, names: Sequence[str], length: int) -> Any:
    """Return the model as TorchScript with the inputs `names`, each of shape (1, length) and int32."""
    import torch

    class Encoder(torch.nn.Module):
        def __init__(self, added: bool) -> None:
            super().__init__()
            self.model, self.added = model, added

        def forward(self, *inputs: Any) -> Any:
            given = dict(zip(names, inputs, strict=True))
            # coremltools has no operators for the mask that transformers makes: the model gets a finished one.
            if self.added:
                hidden = (1.0 - given["attention_mask"].to(torch.float32)) * HIDDEN
                given["attention_mask"] = hidden[:, None, None, :]
            answer = self.model(**given)
            return tuple(getattr(answer, name) for name in job.saved.task_class.outputs)

    model.set_attn_implementation("eager")
    # The shortest row has the most padding, where a mask that is misunderstood shows.
    short = min(range(len(job.batches[0]["input_ids"])), key=lambda at: int(job.batches[0]["attention_mask"][at].sum()))
    padded = _padded({name: rows[short : short + 1] for name, rows in job.batches[0].items()}, length, job.tokenizer)
    given = tuple(padded[name] for name in names)
    with torch.no_grad():
        expected = base.answered(model(**padded))
        found = base.answered(dict(zip(job.saved.task_class.outputs, Encoder(True)(*given), strict=True)))
        # DeBERTa takes a finished mask for something else, and gets that of the tokens.
        added = numpy.allclose(found, expected, rtol=1e-3, atol=1e-5)
        trace: Any = torch.jit.trace
        return trace(Encoder(added).eval(), given, strict=False, check_trace=False)


def _padded(row: dict[str, Any], length: int, tokenizer: Any) -> dict[str, Any]:
    """Return one row without its padding, then padded to `length`, as int32; cut where it is longer."""
    import torch

    kept = min(length, int(row["attention_mask"].sum()))
    # The first token that is none of the padding, which some tokenizers put on the left.
    at = row["attention_mask"][0].argmax()
    padded = {}
    for name in INPUTS:
        if name in row:
            value = (tokenizer.pad_token_id or 0) if name == "input_ids" else 0
            # Core ML's inputs have no whole numbers of 64 bits.
            whole = torch.full((1, length), value, dtype=torch.int32)
            whole[0, :kept] = row[name][0, at : at + kept].to(torch.int32)
            padded[name] = whole
    return padded


def _same_weights(job: Job, opened: Any) -> int:
    """Return how many of the traced model's weights are in the package as they should be, rounded to its type.

    Raises RunError for one that is another, by more than one step of its type.
    """
    import coremltools

    # The default leaves out weights of fewer than 2,048 elements.
    stored = coremltools.optimize.coreml.get_weights_metadata(opened, weight_threshold=1)
    ending, width = ("_to_fp16", numpy.float16) if job.weights == F16 else ("", numpy.float32)
    alike, step = 0, numpy.finfo(width)
    for name, weight in job.traced.named_parameters():
        # coremltools calls them by their names in the model.
        found = stored.get(name.replace(".", "_") + ending)
        if found is None or found.val.shape != tuple(weight.shape):
            continue
        arrays = (found.val, weight.detach().numpy().astype(width))
        stored_as, rounded = (array.astype(numpy.float64) for array in arrays)
        # What float16 would round to 0 coremltools keeps as its least number (`_check_underflow_to_zero`).
        if not numpy.allclose(stored_as, rounded, rtol=float(step.eps), atol=float(step.smallest_subnormal)):
            raise RunError(f"the package holds another {name} than the model; nothing was written")
        alike += 1
    return alike


def _difference(job: Job, answer: Any, weights: str) -> Any:
    """Compare row by row, each padded to every length that it fits into."""
    ours, theirs = [], []
    for batch, reference in zip(job.batches, job.reference, strict=True):
        for at in range(len(reference)):
            row = {name: rows[at : at + 1] for name, rows in batch.items()}
            tokens = row["attention_mask"][0].numpy().astype(bool)
            for length in (length for length in job.lengths if length >= tokens.sum()):
                given = {name: tensor.numpy() for name, tensor in _padded(row, length, job.tokenizer).items()}
                logits = base.answered(answer(given))
                wanted = reference[at : at + 1]
                # These are logits of each token: those of padding are nobody's.
                if wanted.ndim == 3:
                    wanted, logits = wanted[:, tokens], logits[:, : tokens.sum()]
                ours.append(wanted)
                theirs.append(logits)
    return difference(ours, theirs, weights)
