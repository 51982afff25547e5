"""What weights in 4 or 8 bits cost a LoRA: its losses on the same rows, beside the same LoRA's over bfloat16.

    HF_MPS_SIMULATE=1 python scripts/bench/quantized_lora.py ../shared/data [--seeds 1 2 3] [--kinds nf4 fp4 int8]
    HF_MPS_SIMULATE=1 python scripts/bench/quantized_lora.py --model MODEL --text TEXT.txt

Without MODEL, a folder or hub id of a decoder, a small Llama is trained first (small_llama.py), on texts from books and
films; without TEXT.txt, texts one in a line, the LoRA learns conversations (DialogSum's), which that has never seen.
Each run takes the same steps from the same seed; the ratios are of the mean training losses of the last tenth of them,
and of the last losses on the tenth of the rows that is held out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WHOLE = "bf16"


def main() -> int:
    """Print a line for each run; exit code 1 where the mean ratio of a kind is further off than `--within`."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("data", type=Path, nargs="?", help="the folder shared/data")
    arguments.add_argument("--model")
    arguments.add_argument("--text", type=Path)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--rows", type=int, default=4)
    arguments.add_argument("--tokens", type=int, default=64)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments.add_argument("--kinds", nargs="+", default=["nf4", "fp4", "int8"])
    arguments.add_argument("--within", type=float, default=0.01)
    asked = arguments.parse_args()
    if asked.data is None and None in (asked.model, asked.text):
        arguments.error("give the folder shared/data, or --model and --text")
    import measured_on

    from hf_mps.tools.dryrun import metal_device

    metal_device()
    print(measured_on.line())
    with tempfile.TemporaryDirectory() as folder:
        made_up(asked, Path(folder))
        ratios: dict[str, list[tuple[float, float]]] = {kind: [] for kind in asked.kinds}
        for seed in asked.seeds:
            whole = losses(asked, None, seed, Path(folder))
            print(f"seed {seed}  {WHOLE:<5} train {whole[0]:.4f}  validation {whole[1]:.4f}", flush=True)
            for kind in asked.kinds:
                ours = losses(asked, kind, seed, Path(folder))
                ratios[kind].append((ours[0] / whole[0], ours[1] / whole[1]))
                told = f"seed {seed}  {kind:<5} train {ours[0]:.4f}  validation {ours[1]:.4f}"
                print(f"{told}  x{ratios[kind][-1][0]:.4f} x{ratios[kind][-1][1]:.4f}", flush=True)
    means = {kind: [statistics.fmean(each) for each in zip(*found, strict=True)] for kind, found in ratios.items()}
    for kind, (trained, validated) in means.items():
        print(f"mean    {kind:<5} x{trained:.4f} x{validated:.4f}")
    return int(max(abs(ratio - 1) for both in means.values() for ratio in both) > asked.within)


def made_up(asked: argparse.Namespace, folder: Path) -> None:
    """Make the model and the text that nobody named."""
    if asked.model is None:
        import small_llama

        asked.model = str(small_llama.make(asked.data, folder / "llama"))
    if asked.text is None:
        asked.text = folder / "conversations.txt"
        files = (asked.data / "dialogsum" / f"dialogsum.{split}.jsonl" for split in ("dev", "test"))
        rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
        asked.text.write_text("\n".join(" ".join(row["dialogue"].split()) for row in rows), encoding="utf-8")


def losses(asked: argparse.Namespace, kind: str | None, seed: int, folder: Path) -> tuple[float, float]:
    """Train in a process of its own; return the mean training loss of the last tenth of steps, and the validation's."""
    output = folder / f"{kind or WHOLE}-{seed}"
    recipe = folder / f"{output.name}.yaml"
    recipe.write_text(
        f"task: causal-lm\nmodel: {asked.model}\noutput_dir: {output}\nseed: {seed}\n"
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
