"""Training on one NVIDIA GPU: the runner as it comes against the documented commands and the best of stock Trainer.

    python scripts/bench/bench_cuda.py --minilm PATH/model --data ../shared/data/glue_mrpc
    python scripts/bench/bench_cuda.py --only mrpc,vit --out bench_cuda.json
    python scripts/bench/bench_cuda.py --only f1 --seeds 10 --minilm PATH/model

One run, each training in a process of its own, one after the other; `f1` alone runs all at once, and times nothing.
Before each side a short one of its own, not counted, so that the machine has read the side's libraries from its disk.
Same model, rows, epochs and seed on every side; models of the published sizes with random weights, but for `f1`, which
fine-tunes MiniLM. Rates are Trainer's own and the runner's, over the whole training: the trial of precisions and the
recording of graphs count, evaluations do not. Memory is the most that CUDA's allocator held. `steady` is the median
rate between two logged steps of the runner, without its start; `replay` the GPU's median time of a recorded step of the
commonest shape (all shapes: --out). HF_MPS_FUSED_STEP=0 before the command leaves queries, keys and values apart.

    mrpc    BERT-base, batch 32, 5 epochs. documented: examples/run_glue.py's command, float32, padded to 128; stock:
            the same in TF32, batches of like length padded to their longest row, 4 workers (in bf16 it is slower)
    f1      MiniLM on MRPC over the seeds: mean F1 of each side, and the standard error of their difference
    lora    a Qwen2 of 0.5B parameters with LoRA, bf16, 4 x 512 tokens: tokens per second, and the largest difference
            of the losses
    vit     ViT-base on images of 224 pixels, batch 32, bf16, 12 workers

Exit code 1 where a target is missed: 6 x documented and 4 x stock on mrpc, 3 x on lora with losses within 1e-3, 1.3 x
on vit, 1.1 x of the other side's memory, F1 within the standard error.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import runpy
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measured_on

HERE = Path(__file__).resolve().parent
GLUE = HERE.parent / "examples" / "run_glue.py"
SIDES = {
    "mrpc": ("documented", "stock tf32", "ours"),
    "lora": ("stock bf16", "ours"),
    "vit": ("stock bf16", "ours"),
    "f1": ("stock", "ours"),
}
UNIT = {"mrpc": "examples/s", "lora": "tokens/s", "vit": "images/s"}
TARGETS = {("mrpc", "documented"): 6, ("mrpc", "stock"): 4, ("lora", "stock"): 3, ("vit", "stock"): 1.3}
CLM_STEPS, CLM_ROWS = 120, 4
IMAGES, PIXELS = 1600, 256
SHORT = 40  # steps of the side's first training, which is not counted
SHARES = 5  # processes of each side of f1
QWEN = {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
QWEN |= {"intermediate_size": 4864, "vocab_size": 151_936, "tie_word_embeddings": True}
WORKERS = {"dataloader_num_workers": 12, "dataloader_persistent_workers": True}


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    data = HERE.parents[2] / "shared/data/glue_mrpc"
    parser.add_argument("--data", type=Path, default=data, help="a folder with train.csv and dev.csv")
    parser.add_argument("--minilm", type=Path, required=True, help="MiniLM's folder: its weights, and the tokenizer")
    parser.add_argument("--only", default="mrpc,lora,vit,f1", help="cases, by commas (default: all)")
    parser.add_argument("--seeds", type=int, default=10, help="of f1 (default 10)")
    parser.add_argument("--rounds", type=int, default=1, help="of each timed side; the median counts (default 1)")
    parser.add_argument("--out", type=Path, help="a JSON file for what was measured")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--which", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        case, side = given.child.split(":")
        said = {"f1": f1, "mrpc": mrpc, "lora": lora, "vit": vit}[case](given, side)
        gc.collect()  # a trainer's loaders, whose workers Python would wait for when it ends
        print(json.dumps(said))
        return 0
    print(measured_on.line("cuda"), flush=True)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        given.work = Path(folder)
        make_models(given)
        for case in given.only.split(","):
            found[case] = run_case(given, case)
            if given.out:
                given.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    judged = [met for case, sides in found.items() for met in judge(case, sides)]
    return 0 if all(judged) else 1


def run_case(given: argparse.Namespace, case: str) -> dict[str, dict[str, Any]]:
    """Run the sides of a case, print a row of each, and return what they say."""
    if case == "f1":
        groups = [range(1 + part, given.seeds + 1, SHARES) for part in range(min(SHARES, given.seeds))]
        running = {side: [start(given, case, side, seeds) for seeds in groups] for side in SIDES[case]}
        return {
            side: {"runs": [one for part in parts for one in ended(part)["runs"]]} for side, parts in running.items()
        }
    sides: dict[str, dict[str, Any]] = {}
    for side in SIDES[case]:
        ended(start(given, case, side, steps=SHORT))
        rounds = [ended(start(given, case, side)) for _ in range(given.rounds)]
        sides[side] = sorted(rounds, key=lambda one: one["rate"])[given.rounds // 2]
        row = sides[side]
        measured = f"{row['rate']:10.0f} {UNIT[case]:<12}{row['seconds']:8.2f} s{row['peak'] / 2**30:8.2f} GiB"
        print(f"{case:<6}{side:<12}{measured}  {row['said']}", flush=True)
    return sides


def judge(case: str, sides: dict[str, dict[str, Any]]) -> list[bool]:
    """Print the ratios of a case, and return whether each target is met."""
    ours = sides["ours"]
    if case == "f1":
        scores = {side: [one["f1"] for one in found["runs"]] for side, found in sides.items()}
        means = {side: statistics.mean(values) for side, values in scores.items()}
        error = sum(statistics.variance(values) / len(values) for values in scores.values()) ** 0.5
        between = means["ours"] - means["stock"]
        told = ", ".join(f"{side} {mean:.4f}" for side, mean in means.items())
        print(f"f1: {told}; difference {between:+.4f}, standard error {error:.4f}, {len(scores['ours'])} seeds each")
        return [between >= -error]
    stock = max((found for side, found in sides.items() if side.startswith("stock")), key=lambda one: one["rate"])
    others = {"stock": stock} | {side: found for side, found in sides.items() if side == "documented"}
    judged = []
    for name, other in others.items():
        ratio, memory = ours["rate"] / other["rate"], ours["peak"] / other["peak"]
        print(f"{case}: {ratio:.2f} x {name} (target {TARGETS[case, name]}), {memory:.2f} x its memory")
        judged += [ratio >= TARGETS[case, name], memory <= 1.1]
    if case == "lora":
        apart = max(abs(a - b) for a, b in zip(ours["losses"], stock["losses"], strict=True))
        print(f"lora: the losses of {len(ours['losses'])} logged steps differ by {apart:.1e} at most")
        judged.append(apart <= 1e-3)
    return judged


@dataclass
class Running:
    """A process that trains one side of a case, or all seeds of `f1`."""

    name: str
    process: subprocess.Popen[str]
    log: Path


def start(
    given: argparse.Namespace, case: str, side: str, seeds: Iterable[int] = (), steps: int | None = None
) -> Running:
    """Start one, offline, with a cache of its own; `steps` cuts it short."""
    which = ",".join(map(str, seeds))
    known = ("HF_MPS", "HF_MPS_DEVICE", "HF_MPS_SIMULATE")
    environment = {name: value for name, value in os.environ.items() if name not in known}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(given.work / f"cache-{case}-{side}-{which}")}
    environment |= {"HF_MPS_DEVICE": "cuda"} if side == "ours" else {"HF_MPS": "0"}
    # Trainer would spread each batch over all GPUs that it sees, as one process (DataParallel).
    environment.setdefault("CUDA_VISIBLE_DEVICES", "0")
    command = [sys.executable, __file__, "--child", f"{case}:{side}", "--work", str(given.work)]
    command += ["--data", str(given.data), "--minilm", str(given.minilm), "--which", which]
    command += ["--steps", str(steps)] if steps else []
    log = given.work / f"{case}-{side}-{which}.log"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=file, text=True)
    return Running(f"{case}, {side}", process, log)


def ended(running: Running) -> dict[str, Any]:
    """What a process says in its last line, once it has ended."""
    out, _ = running.process.communicate()
    if running.process.returncode:
        raise SystemExit(
            f"{running.name} ended with {running.process.returncode}:\n{out}\n{running.log.read_text()[-4000:]}"
        )
    said: dict[str, Any] = json.loads(out.splitlines()[-1])
    return said


def make_models(given: argparse.Namespace) -> None:
    """Write models with random weights, and images of noise, into the working folder."""
    import numpy
    import torch
    import transformers
    from PIL import Image

    tokenizer = transformers.AutoTokenizer.from_pretrained(given.minilm)
    torch.manual_seed(0)
    if "mrpc" in given.only:
        transformers.BertForSequenceClassification(transformers.BertConfig()).save_pretrained(given.work / "bert")
        tokenizer.save_pretrained(given.work / "bert")
    if "lora" in given.only:
        transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**QWEN)).save_pretrained(given.work / "qwen")
        tokenizer.save_pretrained(given.work / "qwen")
        sentences = [
            row.split(",", 1)[0] for row in (given.data / "train.csv").read_text(encoding="utf-8").splitlines()
        ]
        random.Random(0).shuffle(sentences)
        text = "\n".join(" ".join(sentences) for _ in range(4 * CLM_STEPS // 60 + 1))
        (given.work / "train.txt").write_text(text, encoding="utf-8")
        (given.work / "dev.txt").write_text(text[:20_000], encoding="utf-8")
    if "vit" in given.only:
        transformers.ViTForImageClassification(transformers.ViTConfig()).save_pretrained(given.work / "vit")
        transformers.ViTImageProcessor().save_pretrained(given.work / "vit")
        draw = numpy.random.default_rng(0)
        for number in range(IMAGES + 64):
            split, kind = "train" if number < IMAGES else "validation", number % 2
            file = given.work / "images" / split / "ab"[kind] / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = draw.integers(0, 128, (PIXELS // 8, PIXELS // 8, 3), dtype=numpy.uint8) + 127 * kind
            Image.fromarray(pixels.astype(numpy.uint8)).resize((PIXELS, PIXELS)).save(file)


# The sides, each in a process of its own.


def mrpc(given: argparse.Namespace, side: str) -> dict[str, Any]:
    """BERT-base on MRPC, five epochs, as the table of transformers' examples has it."""
    if side == "ours":
        model = f"model={given.work / 'bert'}"
        return runner(given, "glue/mrpc", 1, *csv(given), model, "training.num_train_epochs=5", *cut(given))
    folder = given.work / f"mrpc {side}"
    words = ["--do_train", "--max_seq_length", "128", "--report_to", "none", "--save_strategy", "no"]
    words += ["--model_name_or_path", str(given.work / "bert"), "--output_dir", str(folder), "--seed", "42"]
    words += ["--train_file", str(given.data / "train.csv"), "--validation_file", str(given.data / "dev.csv")]
    words += ["--learning_rate", "2e-5", "--per_device_train_batch_size", "32", "--num_train_epochs", "5"]
    words += ["--max_steps", str(given.steps)] if given.steps else []
    if side == "documented":
        words += ["--pad_to_max_length", "true"]
    else:
        words += ["--pad_to_max_length", "false", "--train_sampling_strategy", "group_by_length"]
        words += ["--dataloader_num_workers", "4", "--logging_steps", "100", f"--{side.split()[1]}", "true"]
    arguments, sys.argv = sys.argv, [str(GLUE), *words]
    sys.path.insert(0, str(GLUE.parent))
    try:
        runpy.run_path(str(GLUE), run_name="__main__")
    finally:
        sys.argv = arguments
    said = json.loads((folder / "train_results.json").read_text(encoding="utf-8"))
    return {"rate": said["train_samples_per_second"], "seconds": said["train_runtime"], "peak": held(), "said": ""}


def lora(given: argparse.Namespace, side: str) -> dict[str, Any]:
    """A Qwen2 of 0.5B with LoRA, on blocks of 512 tokens."""
    words = [f"model={given.work / 'qwen'}", f"data.files.train={given.work / 'train.txt'}", "max_length=512"]
    words += [f"data.files.validation={given.work / 'dev.txt'}", "lora.r=16", "training.eval_on_start=false"]
    words += [
        f"training.per_device_train_batch_size={CLM_ROWS}",
        f"training.max_steps={given.steps or CLM_STEPS}",
        "training.bf16=true",
    ]
    words += ["training.gradient_accumulation_steps=1", "training.learning_rate=2e-4", "training.logging_steps=10"]
    words += ["training.train_sampling_strategy=random"]  # the same order on both sides
    if side == "ours":
        return runner(given, "causal-lm/wikitext", 512, *words)
    return stock(given, "causal-lm/wikitext", 512, *words)


def vit(given: argparse.Namespace, side: str) -> dict[str, Any]:
    """ViT-base on images from files."""
    words = [f"model={given.work / 'vit'}", f"data.folder={given.work / 'images'}", "data.columns.label=label"]
    words += ["training.per_device_train_batch_size=32", "training.num_train_epochs=6", "training.bf16=true"]
    words += [*(f"training.{name}={str(value).lower()}" for name, value in WORKERS.items()), *cut(given)]
    if side == "ours":
        return runner(given, "image-classification", 1, *words)
    return stock(given, "image-classification", 1, *words)


def f1(given: argparse.Namespace, side: str) -> dict[str, Any]:
    """MiniLM on MRPC, each seed of `which` in turn."""
    import stock as theirs

    from hf_mps.finetune.recipe.resolve import load_recipe

    runs = []
    for seed in map(int, given.which.split(",")):
        words = (*csv(given), f"model={given.minilm}", "training.learning_rate=5e-5", f"seed={seed}")
        if side == "ours":
            runs.append({"seed": seed, **runner(given, "glue/mrpc", 1, *words)["metrics"]})
            continue
        recipe = load_recipe("glue/mrpc", words).recipe
        runs.append({"seed": seed, **theirs.train(recipe, given.work / f"stock-{seed}", cuda=True)})
    return {"runs": runs}


def cut(given: argparse.Namespace) -> list[str]:
    """The recipe's words for a training that only warms the machine."""
    return [f"training.max_steps={given.steps}"] if given.steps else []


def csv(given: argparse.Namespace) -> tuple[str, ...]:
    """The recipe's words for MRPC's files."""
    return (f"data.files.train={given.data / 'train.csv'}", f"data.files.validation={given.data / 'dev.csv'}")


def runner(given: argparse.Namespace, recipe: str, scale: int, *words: str) -> dict[str, Any]:
    """The runner's training as it comes, without checkpoints and evaluations in between, as on the other sides."""
    from contextlib import redirect_stdout

    from hf_mps.finetune.recipe.resolve import load_recipe
    from hf_mps.finetune.run import runner as running
    from hf_mps.tools.dryrun.memory import adjust

    output = tempfile.mkdtemp(dir=given.work)
    quiet = ("training.save_strategy=no", "training.eval_strategy=no", f"output_dir={output}")
    with redirect_stdout(sys.stderr), replays() as timed:
        said = running.run(load_recipe(recipe, [*words, *quiet]), adjust.estimate_fit)
    shapes = {
        shape: statistics.median(first.elapsed_time(last) for first, last in each) for shape, each in timed.items()
    }
    commonest = max(timed, key=lambda shape: len(timed[shape]), default="")
    logged = [entry for entry in said["log_history"] if "loss" in entry]
    steady = statistics.median(entry["samples_per_second"] for entry in logged)
    words_of = [f"{name}: {said['choices'][name]['value']}" for name in ("precision", "cuda_graphs")]
    return {
        "rate": said["samples_per_second"] * scale,
        "seconds": said["train_seconds"],
        "peak": max(entry["peak_memory_bytes"] for entry in logged),  # of training: the other sides do not evaluate
        "losses": [entry["loss"] for entry in logged],
        "metrics": said["metrics"],
        "choices": {name: said["choices"][name] for name in ("precision", "cuda_graphs")},
        "replays": shapes,
        "said": f"{', '.join(words_of)}; steady {steady * scale:.0f}"
        + (f"; replay of {commonest}: {shapes[commonest]:.2f} ms" if commonest else ""),
    }


@contextmanager
def replays() -> Iterator[dict[str, list[tuple[Any, Any]]]]:
    """CUDA's events before and after each recorded step while it is open, by the batch's shape; recordings left out."""
    import torch

    from hf_mps.finetune.cuda_graphs.graphs import Graphs

    stock, found = Graphs.run, {}

    def run(graphs: Any, key: Any, inputs: Any, body: Any) -> Any:
        known, events = len(graphs), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        outputs = stock(graphs, key, inputs, body)
        events[1].record()
        if len(graphs) == known:
            shape = " x ".join(map(str, next(iter(inputs.values())).shape))
            found.setdefault(shape, []).append(tuple(events))
        return outputs

    Graphs.run = run  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Graphs.run = stock  # type: ignore[method-assign]


def stock(given: argparse.Namespace, name: str, scale: int, *words: str) -> dict[str, Any]:
    """transformers' own Trainer on the model, rows and arguments of a recipe without the runner's optimizations."""
    import torch
    from transformers import Trainer, TrainingArguments, set_seed

    from hf_mps.finetune import tasks
    from hf_mps.finetune.data import load
    from hf_mps.finetune.models.checkpoint import resolve
    from hf_mps.finetune.recipe.resolve import load_recipe

    recipe = load_recipe(name, [*words, "optimizations=false"]).recipe
    set_seed(recipe.seed)
    task = tasks.find(recipe.task)(recipe, resolve(recipe.model), "cuda")
    prepared = task.prepare(load.load(recipe.data, recipe.seed))
    said = recipe.training | {"save_strategy": "no", "eval_strategy": "no", "eval_on_start": False, "report_to": "none"}
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(dir=given.work), seed=recipe.seed, disable_tqdm=True, **said
    )
    trainer = Trainer(prepared.model, arguments, train_dataset=prepared.train, data_collator=prepared.collator)
    seconds = trainer.train().metrics["train_runtime"]
    torch.cuda.synchronize()
    rows = trainer.state.global_step * arguments.per_device_train_batch_size
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"rate": rows * scale / seconds, "seconds": seconds, "peak": held(), "losses": losses, "said": ""}


def held() -> int:
    """The most that CUDA's allocator held in this process, in bytes."""
    import torch

    return int(torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    sys.exit(main())
