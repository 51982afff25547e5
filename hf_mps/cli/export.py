"""`hf-mps export` and `push`: a trained model for somewhere else."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from hf_mps.cli.options import deferred
from hf_mps.core.errors import UserError


@deferred
def export(
    format: Annotated[str, Argument(metavar="FORMAT", help="merged, gguf, mlx, coreml or onnx.")],
    run: Annotated[str, Argument(metavar="RUN", help="A run's folder, one that save_pretrained wrote, or a hub name.")],
    out: Annotated[str, Argument(metavar="OUT", help="The new folder to write.")],
    weights: str | None = Option(
        None, help="f32, f16, bf16, q8 or q4, as the format has them. Default: the format's own."
    ),
    lengths: str | None = Option(None, metavar="N,N,…", help="For coreml: the lengths of its inputs in tokens."),
    converter: str | None = Option(
        None, metavar="PATH", help="For gguf: llama.cpp's folder, or its convert_hf_to_gguf.py."
    ),
) -> None:
    """Write a trained model in another format, open it again and compare its outputs with the model's.

    merged: safetensors with the adapter merged. gguf: for llama.cpp. mlx: for mlx-lm. coreml: for Apple's frameworks.
    onnx: for ONNX Runtime. OUT/hf-mps-export.json records the files, the versions and the differences.

    Example: `hf-mps export onnx runs/quickstart quickstart-onnx`
    """
    from hf_mps.tools.export import make
    from hf_mps.tools.export.base import Options

    make.export(format, run, out, weights, Options(_numbers(lengths), converter))


def _numbers(said: str | None) -> tuple[int, ...] | None:
    if said is None:
        return None
    try:
        return tuple(int(word) for word in said.split(","))
    except ValueError as error:
        raise UserError(f"--lengths {said}: allowed: numbers with commas between them, as 64,128,256") from error


@deferred
def push(
    run: Annotated[str, Argument(metavar="RUN", help="A run's folder, or one that hf-mps export wrote.")],
    name: Annotated[str, Argument(metavar="NAME", help="The repository on the hub, OWNER/NAME.")],
    private: bool = Option(False, "--private", help="Make a new repository private."),
    dry_run: bool = Option(False, "--dry-run", help="Only print what would be sent."),
) -> None:
    """Send a trained model with its card to the Hugging Face hub.

    Checkpoints, optimizer states and recipe.yaml, which holds paths of this machine, stay here. Without a token (hf
    auth login) it sends nothing and lists the files.

    Example: `hf-mps push runs/quickstart OWNER/quickstart --dry-run`
    """
    from hf_mps.tools.export.make import push as send

    send(run, name, private=private, dry_run=dry_run)
