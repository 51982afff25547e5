"""Training on several hosts with a network between them: losses, steps a second, and the bytes on the wire.

    python scripts/bench/bench_hosts.py --rate 1gbit --latency 0.3ms

Each host is a network namespace of this machine (scripts/tools/hosts.py; root on Linux) and runs one process of the
same training, with the same global batch as the one process that all are compared with. Bytes are those that the host's
interface has sent, as the kernel counts them, headers included. `limit` is what the link's rate and latency allow
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

ROWS_A_STEP, TOKENS, WORDS = 32, 64, 8000
WARM_UP = 3
SENT = Path("/sys/class/net/net0/statistics/tx_bytes")
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "fp16": {"compression": "fp16"},
    "bf16": {"compression": "bf16"},
    "powersgd": {"compression": "powersgd"},
    "local steps": {"local_steps": 8},
}
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def model() -> Any:
    """A BERT of 5 M parameters without dropout, whose masks would be drawn by each rank for itself."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=WORDS, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


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
            marks.append((time.perf_counter(), int(SENT.read_text()) if SENT.exists() else 0))

    set_seed(1)
    draw = torch.Generator().manual_seed(2)
    words = torch.randint(5, WORDS, (ROWS_A_STEP * steps, TOKENS), generator=draw)
    rows = [{"input_ids": each, "labels": each[0] % 2} for each in words]
    args = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=ROWS_A_STEP // world.size, learning_rate=1e-3,
        lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=True, optim="sgd", seed=3,
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
    shapes = [tuple(each.shape) for each in trainer.model.parameters()]
    return {"losses": losses, "step": took, "sent": (marks[-1][1] - marks[0][1]) / len(gaps), "shapes": shapes}


def work(steps: int) -> None:
    """One rank: train every way, or the plain one alone where there is no other rank; the main one prints JSON."""
    from hf_mps.distributed.world import World

    world = World.here()
    with tempfile.TemporaryDirectory() as folder:
        found = {way: train(way, steps, folder) for way in (WAYS if not world.alone else ["as it is"])}
    if world.main:
        print(json.dumps(found), flush=True)


def command(steps: int) -> list[str]:
    return [sys.executable, __file__, "--work", "--steps", str(steps)]


def on_hosts(count: int, rate: str, latency: str, steps: int) -> dict[str, Any]:
    """Return what the main one of `count` hosts prints."""
    with hosts(count, rate=rate, latency=latency) as made:
        started = []
        for host in made:
            ranks = {"RANK": host.index, "WORLD_SIZE": count, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            meet = {"MASTER_ADDR": made[0].name, "MASTER_PORT": 29500}
            own = {**os.environ, **{name: str(value) for name, value in {**ranks, **meet}.items()}}
            started.append(host.start(command(steps), env=own, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
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
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--work", action="store_true", help="be one of the ranks")
    words = parser.parse_args()
    os.environ |= {"HF_MPS_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "HF_MPS": os.environ.get("HF_MPS", "0")}
    if words.work:
        work(words.steps)
        return
    alone = subprocess.run(command(words.steps), capture_output=True, text=True, check=True).stdout
    one = json.loads(alone.splitlines()[-1])["as it is"]
    print(f"{measured_on.line('cpu')}; {words.rate}, {words.latency} in one direction; {ROWS_A_STEP} rows a step")
    print(f"{'hosts':>5} {'way':<12} {'s/step':>8} {'rows/s':>8} {'limit':>8} {'MiB sent':>9} {'loss off':>9}")
    print(f"{1:>5} {'alone':<12} {one['step']:>8.3f} {ROWS_A_STEP / one['step']:>8.1f}")
    for count in words.hosts:
        for way, found in on_hosts(count, words.rate, words.latency, words.steps).items():
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
        f"{count:>5} {way:<12} {step:>8.3f} {ROWS_A_STEP / step:>8.1f} {limit:>8.1f} {found['sent'] / 2**20:>9.2f} "
        f"{off:>9.1e}"
    )


if __name__ == "__main__":
    main()
