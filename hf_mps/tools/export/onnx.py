"""`export onnx`: transformers' own exporter, which goes by torch.export, and ONNX Runtime opens the file again.

optimum-onnx 0.1.0 asks for transformers below 4.58, so that it serves none that hf_mps runs with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.tools.export import loading, merged
from hf_mps.tools.export.compare import Comparison, difference
from hf_mps.tools.export.formats import LANGUAGE
from hf_mps.tools.export.loading import Job, Options
from hf_mps.tools.saved.run import SavedRun

FILE = "model.onnx"
# What varies from call to call, by task; of texts it is batch and length.
AXES = {"multiple-choice": ("batch", "choices", "length"), "image-classification": ("batch",)}
TEXT_AXES = ("batch", "length")


def check(saved: SavedRun, options: Options) -> None:
    """Raise UserError where the installed transformers has no exporter."""
    try:
        import transformers.exporters  # noqa: F401
    except ImportError as error:
        version = metadata.version("transformers")
        raise UserError(
            f"export onnx goes by transformers' own exporter, which {version} does not have; next:"
            " pip install -U transformers"
        ) from error


def write(job: Job, folder: Path) -> None:
    """Write model.onnx with its weights beside it, configuration, and tokenizer or processor."""
    from transformers.exporters import OnnxConfig, OnnxExporter

    model = merged.plain_model(job, folder.parent / "plain")
    # A batch of at least two rows: torch.export takes a dimension of one for a constant.
    import torch

    inputs = {name: torch.cat([rows, rows]) if len(rows) == 1 else rows for name, rows in job.batches[0].items()}
    settings = {}
    if job.saved.task.value in LANGUAGE:
        settings["use_cache"] = False
        job.choices["cache"] = Choice("none", "one graph gives the logits of every position, and keeps no keys")
    with _configured(model, settings):
        exported = OnnxExporter().export(model, inputs, OnnxConfig(dynamic_shapes=_axes(job, inputs)))
        exported.save_pretrained(folder)
    loading.copy_companions(job.saved, folder)


def _axes(job: Job, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the dimensions of each input that vary, by torch.export's own names for them."""
    import torch

    names = AXES.get(job.saved.task.value, TEXT_AXES)
    dynamic = torch.export.Dim.DYNAMIC
    return {name: dict.fromkeys(range(min(rows.dim(), len(names))), dynamic) for name, rows in inputs.items()}


@contextlib.contextmanager
def _configured(model: Any, settings: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(model.config, name, None) for name in settings}
    for name, value in settings.items():
        setattr(model.config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(model.config, name, value)


def compare(job: Job, folder: Path) -> Comparison:
    """Open the file with ONNX Runtime on the CPU and compare its logits, batches of other sizes included."""
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / FILE, providers=["CPUExecutionProvider"])
    asked = [given.name for given in session.get_inputs()]
    found = []
    for batch in job.batches:
        fed = {name: batch[name].numpy() for name in asked}
        named = dict(zip([one.name for one in session.get_outputs()], session.run(None, fed), strict=True))
        found.append(loading.masked(loading.answered(named), batch))
    opened_by = f"onnxruntime {onnxruntime.__version__} on the CPU"
    return Comparison(opened_by, difference(job.reference, found, job.weights))
