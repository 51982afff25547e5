"""Trains with other people's trainers on the CPU and on mps, and compares the losses.

    python scripts/tools/trainers.py                        each trainer that is installed
    python scripts/tools/trainers.py skorch setfit          some of them
    python scripts/tools/trainers.py --page docs/trainers.md

The programs are in scripts/examples/trainers/: tiny models of random weights, no dropout (each device draws its own
numbers), `python PROGRAM cpu` or `mps`; the last line has the losses. Where there is no Mac, mps is the simulated
device. Exit code 1 where losses differ or a program fails.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parents[1] / "examples" / "trainers"
MADE = "<!-- Written by scripts/tools/trainers.py; change the code, not this file. -->"
CLOSE = 1e-4
"""The largest difference of a loss from the CPU's, relative to it, that counts as rounding after a few steps."""
SECONDS = 300


@dataclass(frozen=True)
class Trainer:
    """A library's trainer: its package, the program, what a user types or passes to train on Metal."""

    package: str
    program: str
    what: str
    choose: str
    words: tuple[str, ...] = ()


TRAINERS = {
    "deepspeed": Trainer("deepspeed", "deepspeed_zero.py", "ZeRO-1 on one process", "`DS_ACCELERATOR=mps`"),
    "diffusers": Trainer("diffusers", "diffusers_lora.py", "text-to-image LoRA's step, under Accelerate", "nothing"),
    "fastai": Trainer("fastai", "fastai_learner.py", "`Learner.fit_one_cycle`", "nothing"),
    "keras": Trainer("keras", "keras_fit.py", "`model.fit` on the torch backend", "`KERAS_BACKEND=torch`"),
    "litgpt": Trainer("litgpt", "litgpt_lora.py", "LoRA under Lightning's Fabric", "`accelerator: auto`, the default"),
    "sentence-transformers": Trainer(
        "sentence-transformers", "sentence_embeddings.py", "SentenceTransformerTrainer, in-batch negatives", "nothing"
    ),
    "setfit": Trainer("setfit", "setfit_classifier.py", "the body by pairs, then the head", "nothing"),
    "skorch": Trainer("skorch", "skorch_classifier.py", "NeuralNetClassifier.fit", '`device="mps"`'),
    "smp": Trainer("segmentation-models-pytorch", "segmentation_unet.py", "a Unet by Dice loss", '`.to("mps")`'),
    "timm": Trainer("timm", "timm_vit.py", "a ViT as train.py steps", "`--device mps` of its train.py"),
    "transformer-lens": Trainer(
        "transformer-lens", "transformer_lens_bridge.py", "a GPT-2 under its bridge, with a hook", '`device="mps"`'
    ),
    "yolo": Trainer("ultralytics", "ultralytics_yolo.py", "YOLO11n, detection", "`device=mps`"),
    "yolo-seg": Trainer("ultralytics", "ultralytics_yolo.py", "YOLO11n, segmentation", "`device=mps`", ("segment",)),
}
CANNOT = {
    "adapters 1.3.0": "asks for transformers 4.57; hf_mps for 5.3 or later",
    "flair 0.15.1": "asks for transformers before 5",
    "lerobot 0.4.4": "asks for torch before 2.11; hf_mps for 2.13 or later",
    "spacy-transformers 1.4.0": "asks for transformers before 4.53.3",
    "torchtune 0.6.1": "imports torchao.dtypes.nf4tensor, which today's torchao lacks",
    "unsloth 2026.10.9": "trains on a Mac by MLX or on the CPU (unsloth_zoo/device_type.py), never on PyTorch's mps",
    "nanochat": "is no package; not tried, as no network was there to clone it",
}
"""Those that were tried and cannot be compared, and why."""


@dataclass(frozen=True)
class Outcome:
    """The losses on both devices, or the line that a program ended with."""

    cpu: Sequence[float]
    mps: Sequence[float]
    failed: str = ""

    @property
    def difference(self) -> float:
        """Return the largest difference of a loss, relative to the CPU's."""
        pairs = zip(self.cpu, self.mps, strict=True)
        return max(abs(mine - theirs) / max(abs(theirs), 1e-12) for theirs, mine in pairs)

    @property
    def right(self) -> bool:
        """Return whether both devices went the same way, and the loss went somewhere."""
        return not self.failed and len(set(self.cpu)) > 1 and self.difference <= CLOSE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trainers that the command line names; 1 where one differs or fails, 2 for a name that is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TRAINERS)}")
    parser.add_argument("--page", type=Path, help="write a page of the outcomes")
    given = parser.parse_args(argv)
    if unknown := [name for name in given.names if name not in TRAINERS]:
        parser.error(f"{unknown[0]!r} is no trainer; allowed: {', '.join(TRAINERS)}")
    found: dict[str, Outcome] = {}
    for name in given.names or TRAINERS:
        if not given.names and version(TRAINERS[name]) is None:
            print(f"{name}: not installed; next: pip install {TRAINERS[name].package}")
            continue
        found[name] = one = run(TRAINERS[name])
        print(f"{name}: {one.failed or f'{len(one.cpu)} losses, largest difference {one.difference:.1e}'}", flush=True)
    if given.page:
        given.page.write_text("\n".join(page(found)) + "\n", encoding="utf-8")
    return int(not all(one.right for one in found.values()))


def version(trainer: Trainer) -> str | None:
    """Return the installed release of a trainer's package; None where it is not installed."""
    try:
        return metadata.version(trainer.package)
    except metadata.PackageNotFoundError:
        return None


def run(trainer: Trainer) -> Outcome:
    """Train on both devices, each in a process of its own."""
    try:
        return Outcome(_losses(trainer, "cpu"), _losses(trainer, "mps"))
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return Outcome((), (), str(error))


def _losses(trainer: Trainer, device: str) -> list[float]:
    command = [sys.executable, str(PROGRAMS / trainer.program), device, *trainer.words]
    off = {"HF_MPS": "0"} if device == "cpu" else {}
    env = {"HF_MPS_SIMULATE": "1", "HF_HUB_OFFLINE": "1", **os.environ, **off}
    ended = subprocess.run(command, capture_output=True, text=True, env=env, timeout=SECONDS, check=False)
    told = [line for line in ended.stdout.splitlines() if line.startswith("losses ")]
    if ended.returncode or not told:
        last = (ended.stderr.strip() or "no losses").splitlines()[-1]
        raise RuntimeError(f"on {device}: exit code {ended.returncode}: {last}")
    losses: list[float] = ast.literal_eval(told[-1].removeprefix("losses "))
    return losses


def page(found: dict[str, Outcome]) -> list[str]:
    """Return the lines of the page."""
    lines = [
        *("# Other people's trainers", "", MADE, ""),
        "Each trained a tiny model of random weights on the CPU without this layer, and on the simulated Metal device",
        "with it; the losses were compared. `python scripts/tools/trainers.py` repeats it, each night with the newest",
        "releases. The programs are in `scripts/examples/trainers/`. `import torch` arms the layer; nothing else is",
        "typed for it.",
        "",
        "| library | what trained | to train on Metal | losses | largest difference |",
        "| --- | --- | --- | ---: | ---: |",
    ]
    for name, one in found.items():
        trainer = TRAINERS[name]
        result = one.failed or f"{one.difference:.1e}".replace("0.0e+00", "none")
        lines.append(
            f"| {trainer.package} {version(trainer)} | {trainer.what} | {trainer.choose} | {len(one.cpu)} | {result} |"
        )
    lines += ["", "Not compared:", "", "| library | why |", "| --- | --- |"]
    return lines + [f"| {name} | {why} |" for name, why in CANNOT.items()]


if __name__ == "__main__":
    sys.exit(main())
