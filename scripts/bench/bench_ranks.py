"""Training on one GPU and on two: examples per second under DDP, captured or not, and memory by rank under FSDP.

    python scripts/bench/bench_ranks.py --out DIR
    python scripts/bench/bench_ranks.py --out DIR --only bert --steps 100
    python scripts/bench/bench_ranks.py --out DIR --tiny

Needs two NVIDIA GPUs and no network: models are made from their configurations with random weights, rows of random
words. Where there is one, all ranks share it, each as a host of its own for NCCL: memory and losses are then what they
are on several, and rates mean nothing, as with --tiny, where everything is tiny and runs on the CPU. Each training is
the runner's (python -m hf_mps.finetune), the one with several processes started by torchrun, one after the other.

    bert    BERT-base (108 M), bf16, batches of 64 rows of 128 tokens on each GPU, on 1 GPU and on --processes; with
            CUDA graphs and without. examples/s of all ranks between two steps, and the efficiency: their rate over
            that of one GPU times their number; and how far the losses of both are apart
    llama   a Llama of 1.1 billion parameters, full fine-tuning in bf16 under FSDP2, 8 blocks of 1024 tokens on each
            GPU: tokens/s, and the most that CUDA's allocator gave out on each rank against what the plan says

DIR/bench_ranks.json holds the figures, DIR/SIDE.log all that each side printed. Of a side that fails the end of its log
is shown; it leaves the others alone. Exit code 1 where a target is missed: 1.8 x one GPU with the faster of captured
and not, peak memory within 10 % of the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measured_on

HERE = Path(__file__).resolve().parent
SIDES = ("eager", "captured")
WARM = 12
"""Steps before the clock: kernels are loaded, graphs recorded, the optimizer's state is there."""
SPEED, MEMORY = 1.8, 0.1
LAST, LONGEST = 40, 480
"""Lines of the log of a side that failed which are shown, and the seconds that a side may take."""
BERT: dict[str, Any] = {}
LLAMA: dict[str, Any] = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 32_000, "max_position_embeddings": 2048}
TINY: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for bench_ranks.json and the logs")
    parser.add_argument("--only", default="bert,llama", help="cases, by commas (default: both)")
    parser.add_argument("--processes", type=int, default=2, help="GPUs of the larger side (default 2)")
    parser.add_argument("--steps", type=int, default=60, help="steps on the clock (default 60)")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return child(given)
    given.shared = not given.tiny and gpus() < given.processes
    print(measured_on.line("cpu" if given.tiny else "cuda"), flush=True)
    if given.shared:
        print(f"{given.processes} ranks share one GPU: memory and losses count, rates do not", flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    met = []
    with tempfile.TemporaryDirectory() as folder:
        given.work = Path(folder)
        for case in given.only.split(","):
            make(given, case)
            found[case] = {"bert": bert, "llama": llama}[case](given)
            met.append(bool(found[case]["met"]))
            (given.out / "bench_ranks.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0 if all(met) else 1


def bert(given: argparse.Namespace) -> dict[str, Any]:
    """BERT-base on one GPU and on several, eagerly and by graphs."""
    sides = ("eager",) if given.tiny else SIDES
    found: dict[str, Any] = {}
    for side in sides:
        for processes in (1, given.processes):
            found[f"{side} x{processes}"] = train(given, "bert", side, processes)
    scaled = []
    for side in sides:
        one, many = (found[f"{side} x{processes}"] for processes in (1, given.processes))
        if one and many:
            ratio = many["rate"] / one["rate"]
            scaled.append(ratio)
            print(f"bert {side}: {ratio:.2f} x one GPU, efficiency {ratio / given.processes:.2f}", flush=True)
            found[f"{side} speedup"] = ratio
    if all(found.get(f"{side} x{given.processes}") for side in SIDES):
        both = (found[f"{side} x{given.processes}"]["ranks"][0]["losses"] for side in SIDES)
        found["apart"] = max(abs(one - other) for one, other in zip(*both, strict=True))
        print(f"bert: losses of {given.processes} ranks, eager and captured, {found['apart']:.1e} apart", flush=True)
    rates = {name: side["rate"] for name, side in found.items() if isinstance(side, dict)}
    fastest = {
        count: max((v for k, v in rates.items() if k.endswith(f"x{count}")), default=0)
        for count in (1, given.processes)
    }
    if all(fastest.values()):
        found["fastest"] = fastest[given.processes] / fastest[1]
        print(f"bert: {found['fastest']:.2f} x, the faster side of each (target {SPEED})", flush=True)
    found["met"] = given.tiny or given.shared or max(scaled, default=0) >= SPEED
    return found


def llama(given: argparse.Namespace) -> dict[str, Any]:
    """A decoder under FSDP, and what the plan says of each rank."""
    planned = plan(given)
    trained = train(given, "llama", "fsdp", given.processes)
    found: dict[str, Any] = {"planned": planned, "trained": trained, "met": given.tiny}
    if planned and trained and not given.tiny:
        ratios = [rank["allocated"] / planned["bytes"] for rank in trained["ranks"]]
        told = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"llama: allocated over planned, by rank: {told} (target within {MEMORY:.0%})", flush=True)
        found |= {"ratios": ratios, "met": all(abs(ratio - 1) <= MEMORY for ratio in ratios)}
    return found


def words(given: argparse.Namespace, case: str, side: str) -> tuple[str, list[str]]:
    """A recipe's name, and its words for one side of a case."""
    files = [f"data.files.{split}={given.work / f'{case}-{split}'}" for split in ("train", "validation")]
    said = [f"model={given.work / case}", *(f"{file}{'.csv' if case == 'bert' else '.txt'}" for file in files)]
    said += ["training.eval_strategy=no", "training.save_strategy=no", "training.logging_steps=10"]
    said += [f"training.max_steps={WARM + given.steps}", f"training.per_device_train_batch_size={rows(given, case)}"]
    if not given.tiny:
        said.append("training.bf16=true")
    if case == "bert":
        graphs = [] if given.tiny else [f"cuda_graphs={str(side == 'captured').lower()}"]
        return "glue/mrpc", [*said, *graphs]
    said += [f"max_length={length(given, case)}", "training.gradient_accumulation_steps=1", "training.fsdp=true"]
    return "causal-lm/wikitext", [*said, "training.eval_on_start=false"]


def rows(given: argparse.Namespace, case: str) -> int:
    """Rows of a batch on one GPU."""
    return 4 if given.tiny else {"bert": 64, "llama": 8}[case]


def length(given: argparse.Namespace, case: str) -> int:
    """Tokens of each row."""
    return 32 if given.tiny else {"bert": 128, "llama": 1024}[case]


def train(given: argparse.Namespace, case: str, side: str, processes: int) -> dict[str, Any] | None:
    """Train one side, print a line of it, and return what its ranks say; None where it failed."""
    name = f"{case}-{side}-x{processes}"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    begun = time.perf_counter()
    code = run(given, name, [*(start if processes > 1 else [sys.executable]), *again(given, f"{case}:{side}:{name}")])
    said = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(given.work.glob(f"{name}.rank*.json"))]
    if code or len(said) != processes:
        log = given.out / f"{name}.log"
        print(f"{name}: ended with {code}; the end of {log}:\n{last_words(log)}", flush=True)
        return None
    unit, scale = ("examples/s", 1) if case == "bert" else ("tokens/s", length(given, case))
    rate = sum(rank["rate"] for rank in said) * scale
    peaks = ", ".join(f"{rank['allocated'] / 2**30:.2f}" for rank in said)
    took = f"{time.perf_counter() - begun:.0f} s in all"
    print(f"{name:<20}{rate:12.0f} {unit}  peak by rank {peaks} GiB  {said[0]['said']}; {took}", flush=True)
    return {"rate": rate, "unit": unit, "ranks": said}


def last_words(log: Path) -> str:
    """What a training said before its end, without the launcher's own account of it."""
    text = log.read_text(encoding="utf-8", errors="replace").partition("torch.distributed.elastic.multiprocessing")[0]
    return "\n".join(f"    {line}" for line in text.splitlines()[-LAST:])


def plan(given: argparse.Namespace) -> dict[str, Any] | None:
    """What `hf-mps plan --ranks` says of the decoder's step."""
    name, said = words(given, "llama", "fsdp")
    command = [sys.executable, "-m", "hf_mps", "plan", name, *said, "--ranks", str(given.processes), "--json"]
    code = run(given, "llama-plan", command, device="cpu")
    text = (given.out / "llama-plan.log").read_text(encoding="utf-8")
    if "{" not in text:
        print(f"llama-plan: ended with {code}, see {given.out / 'llama-plan.log'}", flush=True)
        return None
    estimate: dict[str, Any] = json.JSONDecoder().raw_decode(text[text.index("{") :])[0]["estimate"]
    parts = ", ".join(f"{part} {size / 2**30:.2f}" for part, size in estimate["parts"].items())
    print(f"{'llama-plan':<20}peak by rank {estimate['bytes'] / 2**30:.2f} GiB: {parts}", flush=True)
    return estimate


def again(given: argparse.Namespace, which: str) -> list[str]:
    """This program's words for a child."""
    said = [str(HERE / "bench_ranks.py"), "--child", which, "--work", str(given.work), "--out", str(given.out)]
    return [*said, "--steps", str(given.steps), *(["--tiny"] if given.tiny else [])]


def run(given: argparse.Namespace, name: str, command: list[str], device: str = "") -> int:
    """Run a command offline, with what it prints in a log."""
    known = ("HF_MPS", "HF_MPS_DEVICE", "HF_MPS_SIMULATE")
    environment = {key: value for key, value in os.environ.items() if key not in known}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(given.work / f"cache-{name}")}
    environment |= {"HF_MPS_DEVICE": device or ("cpu" if given.tiny else "cuda"), "TOKENIZERS_PARALLELISM": "false"}
    root = str(HERE.parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    with (given.out / f"{name}.log").open("w", encoding="utf-8") as log:
        try:
            return subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=LONGEST).returncode
        except subprocess.TimeoutExpired:  # its ranks end with their launcher
            return 124  # as timeout(1) says it


def make(given: argparse.Namespace, case: str) -> None:
    """Write a model with random weights, its tokenizer of whole words, and rows that fill their length."""
    import torch
    import transformers

    torch.manual_seed(0)
    if case == "bert":
        config = transformers.BertConfig(**(TINY | {"vocab_size": 500} if given.tiny else BERT))
        transformers.BertForSequenceClassification(config).save_pretrained(given.work / case)
    else:
        tiny = TINY | {"vocab_size": 500, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(**(tiny if given.tiny else LLAMA))
        transformers.LlamaForCausalLM(config).save_pretrained(given.work / case)
    tokenizer(config.vocab_size).save_pretrained(given.work / case)
    draw, count = random.Random(0), rows(given, case) * given.processes * (WARM + given.steps)
    for split, many in (("train", count), ("validation", 2 * rows(given, case))):
        if case == "bert":
            half = (length(given, case) - 3) // 2
            lines = ["sentence1,sentence2,label"]
            lines += [
                f"{text(draw, half)},{text(draw, length(given, case) - 3 - half)},{row % 2}" for row in range(many)
            ]
            (given.work / f"{case}-{split}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        else:
            lines = [text(draw, length(given, case)) for _ in range(many + 8)]
            (given.work / f"{case}-{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def text(draw: random.Random, words: int) -> str:
    """So many words of the tokenizer's."""
    return " ".join(f"w{draw.randrange(400)}" for _ in range(words))


def tokenizer(size: int) -> Any:
    """A tokenizer of `size` tokens, each a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    known = {word: number for number, word in enumerate([*special, *(f"w{number}" for number in range(size - 5))])}
    made = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad", "unk", "cls", "sep", "mask"), special, strict=True))
    roles: dict[str, Any] = {f"{role}_token": word for role, word in names.items()}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=2048, eos_token="[SEP]", **roles)


# One process of a side.


def gpus() -> int:
    """How many NVIDIA GPUs there are."""
    import torch

    return torch.cuda.device_count()


def share_gpu() -> None:
    """Where ranks outnumber the GPUs let each be a host's only one, on the first: NCCL refuses two of a host."""
    if 0 < gpus() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NCCL_HOSTID": f"rank{os.environ['RANK']}"}
        os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def child(given: argparse.Namespace) -> int:
    """Train by the runner, with a clock of its own, and write down what this rank measured."""
    import torch
    from transformers import trainer

    from hf_mps.distributed.voice import one_voice
    from hf_mps.distributed.world import World
    from hf_mps.finetune.recipe.resolve import load_recipe
    from hf_mps.finetune.run import runner
    from hf_mps.tools.dryrun.memory import adjust

    share_gpu()
    case, side, label = given.child.split(":")
    name, said = words(given, case, side)
    clock = make_clock(given.steps, rows(given, case))
    trainer.DEFAULT_CALLBACKS.append(clock)
    with one_voice():  # as in the command: where one rank fails all end
        resolved = load_recipe(name, [*said, f"output_dir={given.work / f'run-{label}'}"])
        results = runner.run(resolved, adjust.estimate_fit, fresh=True)
    choices = results["choices"]
    shown = [f"{key}: {choices[key]['value']}" for key in ("precision", "cuda_graphs", "sharding") if key in choices]
    measured = {**clock.measured, "said": ", ".join(shown), "choices": {key: choices[key] for key in choices}}
    measured["losses"] = [entry["loss"] for entry in results["log_history"] if "loss" in entry]
    if torch.cuda.is_available() and not given.tiny:
        measured["device"] = torch.cuda.get_device_name()
    file = given.work / f"{label}.rank{World.here().rank}.json"
    file.write_text(json.dumps(measured, default=str), encoding="utf-8")
    return 0


def make_clock(steps: int, rows_of_a_batch: int) -> Any:
    """A callback that measures the `steps` after WARM: this rank's rows per second, and bytes at the highest moment."""
    import torch
    from transformers import TrainerCallback

    cuda = torch.cuda.is_available()

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Starts after the warm steps, and stops after the last one."""

        def __init__(self) -> None:
            self.measured: dict[str, Any] = {}
            self.began = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == WARM:
                if args.device.type == "cuda":
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                self.began = time.perf_counter()
            elif state.global_step == WARM + steps:
                on_gpu = cuda and args.device.type == "cuda"
                if on_gpu:
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - self.began
                self.measured = {
                    "rate": rows_of_a_batch * steps / seconds,
                    "seconds": seconds,
                    "allocated": torch.cuda.max_memory_allocated() if on_gpu else 0,
                    "reserved": torch.cuda.max_memory_reserved() if on_gpu else 0,
                }

    return Clock()


if __name__ == "__main__":
    sys.exit(main())
