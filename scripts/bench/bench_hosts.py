"""Training on several hosts with a network between them: losses, steps a second, and the bytes on the wire.

    python scripts/bench/bench_hosts.py --rate 1gbit --latency 0.3ms
    python scripts/bench/bench_hosts.py --device mps --hosts 2 4

Each host is a network namespace of this machine (scripts/tools/hosts.py; root on Linux) and runs one process of the
same training, with the same global batch as the one process that all are compared with. Bytes are those that the host's
interface has sent, as the kernel counts them, headers included; `copied` are those that the backend metal moved between
a tensor and what Gloo works on. `limit` is what the link's rate and latency allow
(hf_mps/distributed/link/cost.py); hosts of one machine share its cores, so that `alone` is what a step computes for.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import measured_on
from scripts.tools.hosts import hosts, seconds, stop

ROWS_A_STEP, TOKENS, WORDS = 32, 32, 8000
WARM_UP = 3
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "fp16": {"compression": "fp16"},
    "bf16": {"compression": "bf16"},
    "powersgd": {"compression": "powersgd"},
    "local steps": {"local_steps": 8},
}
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def model() -> Any:
    """A BERT of 2.5 M parameters without dropout, whose masks would be drawn by each rank for itself."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=WORDS, hidden_size=192, num_hidden_layers=2, num_attention_heads=4, intermediate_size=768,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def sent() -> int:
    """Bytes that this host's interface has sent; 0 where it is no host of scripts/tools/hosts.py."""
    import psutil

    counts = psutil.net_io_counters(pernic=True)
    return counts["net0"].bytes_sent if "net0" in counts else 0


def copied() -> int:
    """Bytes that the backend `metal` has copied in this process; 0 without it."""
    if os.environ["HF_MPS_DEVICE"] != "mps":
        return 0
    from hf_mps.distributed.metal.traffic import traffic

    return traffic().copied


def train(way: str, steps: int, folder: str) -> dict[str, Any]:
    """Train one way, and return the losses, the median seconds of a step, and the bytes that a step sends."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

    from hf_mps.core.choice import Choice
    from hf_mps.distributed.world import World
    from hf_mps.finetune.loss import accumulation
    from hf_mps.finetune.recipe.schema import LinkSection
    from hf_mps.finetune.run import links

    world, marks = World.here(), []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            marks.append((time.perf_counter(), sent(), copied()))

    set_seed(1)
    draw = torch.Generator().manual_seed(2)
    words = torch.randint(5, WORDS, (ROWS_A_STEP * steps, TOKENS), generator=draw)
    rows = [{"input_ids": each, "labels": each[0] % 2} for each in words]
    args = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=ROWS_A_STEP // world.size, learning_rate=1e-3,
        lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=os.environ["HF_MPS_DEVICE"] == "cpu", optim="sgd", seed=3,
    )  # fmt: skip
    trainer = Trainer(model(), args, train_dataset=rows, callbacks=[Clock()])
    accumulation.fix_accumulation_scaling(trainer)
    choices: dict[str, Choice[Any]] = {"steps": Choice(steps, "")}
    choices |= links.decide(LinkSection(**WAYS[way]), {}, trainer.model, world)
    links.compress(trainer, choices)
    links.step_locally(trainer, choices)
    trainer.train()
    marks = marks[WARM_UP - 1 :] if way != "powersgd" else marks[steps // 2 :]  # it begins after a tenth of the steps
    gaps = [after[0] - before[0] for before, after in itertools.pairwise(marks)]
    took = (marks[-1][0] - marks[0][0]) / len(gaps) if way == "local steps" else median(gaps)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    began, ended = marks[0], marks[-1]
    return {
        "losses": losses,
        "step": took,
        "sent": (ended[1] - began[1]) / len(gaps),
        "copied": (ended[2] - began[2]) / len(gaps),
        "shapes": [tuple(each.shape) for each in trainer.model.parameters()],
        "device": trainer.args.device.type,
    }


def work(steps: int, ways: list[str]) -> None:
    """One rank: train every way, or the plain one alone where there is no other rank; the main one prints JSON."""
    from hf_mps.distributed.world import World

    world = World.here()
    with tempfile.TemporaryDirectory() as folder:
        found = {way: train(way, steps, folder) for way in ways}
    if world.main:
        print(json.dumps(found), flush=True)


def command(steps: int, ways: list[str]) -> list[str]:
    return [sys.executable, __file__, "--work", "--steps", str(steps), "--ways", *ways]


def on_hosts(count: int, rate: str, latency: str, rank: list[str]) -> dict[str, Any]:
    """Return what the main one of `count` hosts prints."""
    with hosts(count, rate=rate, latency=latency) as made:
        started = []
        for host in made:
            ranks = {"RANK": host.index, "WORLD_SIZE": count, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            meet = {"MASTER_ADDR": made[0].name, "MASTER_PORT": 29500}
            own = {**os.environ, **{name: str(value) for name, value in {**ranks, **meet}.items()}}
            started.append(host.start(rank, env=own, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
        try:
            said = [one.communicate(timeout=900)[0] for one in started]
        finally:
            for one in started:
                if one.poll() is None:
                    stop(one)
    return dict(json.loads(said[0].splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--latency", default="0.3ms")
    parser.add_argument("--steps", type=int, default=19)
    parser.add_argument("--device", choices=["cpu", "mps"], default="cpu")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--work", action="store_true", help="be one of the ranks")
    words = parser.parse_args()
    if words.work:
        work(words.steps, words.ways)
        return
    layer = {"HF_MPS_SIMULATE": "1"} if words.device == "mps" else {"HF_MPS": "0"}
    os.environ |= {"HF_MPS_DEVICE": words.device, "OMP_NUM_THREADS": "1", **layer}
    alone = subprocess.run(command(words.steps, ["as it is"]), capture_output=True, text=True, check=True).stdout
    one = json.loads(alone.splitlines()[-1])["as it is"]
    where = measured_on.line_of(os.environ) if words.device == "mps" else measured_on.line("cpu")
    print(f"{where}; {words.rate}, {words.latency} in one direction; {ROWS_A_STEP} rows a step")
    names = ("s/step", "rows/s", "limit", "MiB sent", "copied", "loss off")
    print(f"{'hosts':>5} {'way':<12}" + "".join(f" {name:>8}" for name in names))
    print(f"{1:>5} {'alone':<12} {one['step']:>8.3f} {ROWS_A_STEP / one['step']:>8.1f}")
    rank = command(words.steps, words.ways)
    for count in words.hosts:
        for way, found in on_hosts(count, words.rate, words.latency, rank).items():
            print(_row(count, way, found, one, _link(words.rate, words.latency)), flush=True)


def _link(rate: str, latency: str) -> tuple[float, float]:
    unit = rate.lstrip("0123456789.")
    return float(rate.removesuffix(unit)) * UNITS[unit], seconds(latency)


def _row(count: int, way: str, found: dict[str, Any], one: dict[str, Any], link: tuple[float, float]) -> str:
    """A line of the table: what was measured, and what the link allows."""
    from hf_mps.distributed.link import cost

    names = {"as it is": cost.NONE, "local steps": "local_steps", "fp16": cost.BF16}
    ways = cost.ways(cost.Gradients([tuple(each) for each in found["shapes"]]), cost.Link(*link), count)
    limit = ROWS_A_STEP / ways[names.get(way, way)].seconds
    off = max(abs(a - b) for a, b in zip(found["losses"], one["losses"], strict=True))
    step = found["step"]
    return (
        f"{count:>5} {way:<12} {step:>8.3f} {ROWS_A_STEP / step:>8.1f} {limit:>8.1f} {found['sent'] / 2**20:>8.2f} "
        f"{found['copied'] / 2**20:>8.2f} {off:>8.1e}"
    )


if __name__ == "__main__":
    main()
