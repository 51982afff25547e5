"""What weights in 4 or 8 bits cost a LoRA: its loss over the same rows, against the same LoRA over weights in bfloat16.

    HF_MPS_SIMULATE=1 python scripts/bench/quantized_lora.py MODEL TEXT.txt [--steps 200] [--kinds nf4 int8]

MODEL is a folder or hub id of a decoder, TEXT.txt holds texts, one in a line. Each run takes the same steps from the
same seed; the ratios are of the mean training losses of the last tenth of them, and of the last validation losses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    """Print a line for each kind; exit code 1 where a loss is further off than `--within`."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("model")
    arguments.add_argument("text", type=Path)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--rows", type=int, default=4)
    arguments.add_argument("--tokens", type=int, default=64)
    arguments.add_argument("--kinds", nargs="+", default=["nf4", "int8"])
    arguments.add_argument("--within", type=float, default=0.01)
    asked = arguments.parse_args()
    import measured_on

    from hf_mps.dryrun import metal_device

    metal_device()
    print(measured_on.line())
    with tempfile.TemporaryDirectory() as folder:
        trained, validated = losses(asked, None, Path(folder))
        print(f"bf16  train {trained:.4f}  validation {validated:.4f}", flush=True)
        worst = 0.0
        for kind in asked.kinds:
            ours = losses(asked, kind, Path(folder))
            ratios = ours[0] / trained, ours[1] / validated
            worst = max(worst, *(abs(ratio - 1) for ratio in ratios))
            told = f"{kind:<5} train {ours[0]:.4f}  validation {ours[1]:.4f}"
            print(f"{told}  x{ratios[0]:.4f} x{ratios[1]:.4f}", flush=True)
    return int(worst > asked.within)


def losses(asked: argparse.Namespace, kind: str | None, folder: Path) -> tuple[float, float]:
    """Train in a process of its own; return the mean training loss of the last tenth of steps, and the validation's."""
    output = folder / (kind or "bf16")
    recipe = folder / f"{output.name}.yaml"
    recipe.write_text(
        f"task: causal-lm\nmodel: {asked.model}\noutput_dir: {output}\n"
        f"data: {{files: {{train: {asked.text.resolve()}}}, hold_out: 0.1, columns: {{text: text}}}}\n"
        f"max_length: {asked.tokens}\nweights: bfloat16\nlora: {{export: adapter}}\n"
        + (f"quantization: {kind}\n" if kind else "")
        + f"training: {{max_steps: {asked.steps}, per_device_train_batch_size: {asked.rows}, learning_rate: 1e-3,"
        " logging_steps: 1, eval_strategy: 'no', save_strategy: steps, save_steps: 1000000}\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "hf_mps.finetune", str(recipe)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    results = json.loads((output / "results.json").read_text(encoding="utf-8"))
    logged = [entry["loss"] for entry in results["log_history"] if "loss" in entry]
    return statistics.fmean(logged[-max(1, asked.steps // 10) :]), results["metrics"]["loss"]


if __name__ == "__main__":
    sys.exit(main())
