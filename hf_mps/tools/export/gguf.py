"""`export gguf`: llama.cpp's own converter writes the file, and transformers' GGUF reader opens it again.

The `gguf` package reads and writes the container; which tensor of an architecture goes where, and how a tokenizer is
stored, only llama.cpp's `convert_hf_to_gguf.py` knows, which is no part of it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError, UserError
from hf_mps.finetune.run.logging import errors_only
from hf_mps.tools.export import loading, merged
from hf_mps.tools.export.compare import Comparison, difference
from hf_mps.tools.export.formats import BF16, F16, F32, Q8
from hf_mps.tools.export.loading import Job, Options
from hf_mps.tools.saved.run import SavedRun

SCRIPT = "convert_hf_to_gguf.py"
# The script itself, and the names that distributions give it (containers/ramalama#2786 calls the second).
COMMANDS = (SCRIPT, "llama-convert-hf-to-gguf", "convert-hf-to-gguf")
KINDS = {BF16: "bf16", F16: "f16", F32: "f32", Q8: "q8_0"}
UNKNOWN = re.compile(r"Model (\S+) is not supported|Architecture '?(\S+?)'? not supported")


def check(saved: SavedRun, options: Options) -> None:
    """Raise UserError where llama.cpp's converter is not to be found."""
    converter(options.converter)


def converter(said: str | None) -> Choice[list[str]]:
    """Return the command of llama.cpp's converter: `said`, a script or llama.cpp's folder, or one on the PATH.

    Raises UserError where there is none.
    """
    if said is not None:
        path = Path(said).expanduser()
        script = path / SCRIPT if path.is_dir() else path
        if not script.is_file():
            raise UserError(f"--converter {said}: there is no {SCRIPT}; allowed: that file, or llama.cpp's folder")
        return Choice(_command(script), "--converter")
    for name in COMMANDS:
        if found := shutil.which(name):
            return Choice(_command(Path(found)), "on the PATH")
    raise UserError(
        f"export gguf needs llama.cpp's {SCRIPT}, which the package gguf does not bring, and none is on the PATH; next:"
        " git clone https://github.com/ggml-org/llama.cpp, and --converter llama.cpp; or hf-mps export mlx"
    )


def _command(script: Path) -> list[str]:
    """A Python script runs in this environment, whose torch and transformers it needs."""
    return [sys.executable, str(script)] if script.suffix == ".py" else [str(script)]


def write(job: Job, folder: Path) -> None:
    """Write one .gguf file into `folder`. Raises UserError for an architecture that llama.cpp does not know."""
    found = converter(job.options.converter)
    job.choices["converter"] = Choice(Path(found.value[-1]).name, found.reason)
    source = merged.plain_folder(job, folder.parent / "plain")
    folder.mkdir()
    kind = KINDS[job.weights]
    words = [str(source), "--outfile", str(folder / f"{job.name}-{kind}.gguf"), "--outtype", kind]
    # The layer has no part in a conversion, and no name of ours is to be looked up on the hub.
    settings = os.environ | {"HF_MPS": "0", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*found.value, *words, "--model-name", job.name], env=settings, capture_output=True, text=True, check=False
    )
    if done.returncode or not any(folder.glob("*.gguf")):
        raise _failure(job, done)


def _failure(job: Job, done: subprocess.CompletedProcess[str]) -> Exception:
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    unknown = next((found for line in lines if (found := UNKNOWN.search(line))), None)
    if unknown is not None:
        name = unknown.group(1) or unknown.group(2)
        return UserError(f"{job.saved.where}: llama.cpp's converter does not know {name}; next: hf-mps export mlx")
    errors = [line for line in lines if "Error" in line] or lines or [f"exit code {done.returncode}"]
    return RunError(f"llama.cpp's converter failed: {errors[-1]}; nothing was written")


def compare(job: Job, folder: Path) -> Comparison:
    """Open the file with transformers' reader and compare its logits; not where that does not know the architecture."""
    import torch
    import transformers

    [file] = folder.glob("*.gguf")
    opened_by = f"transformers {transformers.__version__}, whose reader dequantizes GGUF into PyTorch"
    auto_class = getattr(transformers, loading.auto_class(job.saved.task.value))
    dtype: Any = torch.float32 if job.choices["compared in"].value == "float32" else torch.bfloat16
    try:
        with errors_only():
            # Without device_map the reader dequantizes on the accelerator, and leaves the model there.
            settings = {"gguf_file": file.name, "dtype": dtype, "device_map": "cpu"}
            opened = auto_class.from_pretrained(folder, **settings).eval()
    except (ValueError, NotImplementedError, KeyError) as error:
        if "not supported" not in str(error):
            raise
        return Comparison(opened_by, not_compared=f"transformers reads no GGUF of this architecture ({error})")
    logits = loading.logits(opened, job.batches)
    return Comparison(opened_by, difference(job.reference, logits, job.weights))
