"""`export mlx`: mlx-lm converts, and mlx-lm opens again; on Linux with MLX's CPU backend."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from hf_mps.core.errors import UserError
from hf_mps.core.text import first_line
from hf_mps.tools.export import loading, merged
from hf_mps.tools.export.compare import Comparison, difference
from hf_mps.tools.export.formats import Q4, Q8
from hf_mps.tools.export.loading import Job, Options
from hf_mps.tools.saved.run import SavedRun

BITS = {Q8: 8, Q4: 4}


def check(saved: SavedRun, options: Options) -> None:
    """Raise UserError where MLX has no backend for this machine, or mlx-lm has no model of this architecture."""
    try:
        import mlx.core  # noqa: F401
        from mlx_lm.utils import _get_classes
    except ImportError as error:
        raise UserError(
            f"export mlx: MLX does not load here: {first_line(error)}; next: pip install 'mlx[cpu]' on Linux"
        ) from error
    config = saved.checkpoint.stored_config() or saved.checkpoint.config().to_dict()
    try:
        _get_classes(config)
    except ValueError as error:
        raise UserError(
            f"{saved.where}: mlx-lm {metadata.version('mlx-lm')} has no model of the type"
            f" {config.get('model_type')}; next: hf-mps export gguf, onnx or merged"
        ) from error


def write(job: Job, folder: Path) -> None:
    """Let mlx-lm write `folder`: weights, configuration and tokenizer."""
    from mlx_lm import convert

    source = merged.plain_folder(job, folder.parent / "plain")
    bits = BITS.get(job.weights)
    dtype = "bfloat16" if bits else loading.DTYPES[job.weights]
    convert(str(source), str(folder), dtype=dtype, quantize=bits is not None, q_bits=bits)


def compare(job: Job, folder: Path) -> Comparison:
    """Open the folder with mlx-lm and compare its logits, computed in float32 from the weights as they are stored.

    MLX's CPU backend adds up a bfloat16 product of quantized weights in bfloat16 (mlx 0.32: 3 % off, 5e-7 in float32),
    which would be no fault of the export.
    """
    import mlx.core
    import numpy
    from mlx_lm.utils import load_model

    opened, _ = load_model(folder)
    opened.set_dtype(mlx.core.float32)
    logits = [
        numpy.array(opened(mlx.core.array(batch["input_ids"].numpy())).astype(mlx.core.float32))
        for batch in job.batches
    ]
    device = str(mlx.core.default_device().type).rpartition(".")[2].upper()
    versions = f"mlx-lm {metadata.version('mlx-lm')} with mlx {metadata.version('mlx')} on its {device}"
    return Comparison(versions, difference(job.reference, logits, job.weights))
