"""How much more fits a Mac's memory: the largest batch and the largest model, stock Trainer against a recipe's run.

    HF_MPS_SIMULATE=1 python scripts/bench/bench_memory_room.py [--only NAME] [--small] [--layer LENGTH]

Peaks are those of the memory plan (fake tensors, Trainer's own loop), against what Metal recommends for Macs of 8, 16
and 64 GB; both sides in float32 with AdamW, rows of 512 tokens. The right side is what a run does by itself where its
step would not fit: loss in chunks, attention in blocks, checkpointing, and for the largest model steps in the backward
pass. Beside it stands what a recipe may say that trains to other numbers: Adafactor, weights in bfloat16. `--small`
shows with a small decoder of the same architecture that the plan's largest batch is the one that really fits, and that
the losses of 30 steps are stock's. `--layer 4096` measures one layer of attention, 12 heads of width 64, forward and
backward, on the device.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import check_plan
import measured_on
from check_plan import CHECKPOINTING, CLASSIFY, CONTINUE, LORA, Pair

from hf_mps.core.text import GIB

MEMORY = ("8gb", "16gb", "64gb")
LENGTH = 512
STOCK = ("optimizations=false", "attention=sdpa", CHECKPOINTING.replace("true", "false"))
OURS = ("attention=blockwise", CHECKPOINTING)
EARLY, ADAFACTOR, HALVES = "step_in_backward=true", "training.optim=adafactor", "weights=bfloat16"
DEPTHS = (12, 24, 36)
"""Layers of the models whose peaks a line is laid through; the third one says how near it comes."""
BATCHES = (32, 64)
"""Rows of two batches that tell what each row adds."""
QWEN2 = {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864}
SMALL = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 384}


class Case(NamedTuple):
    """A training: architecture and its size, the task, overrides of both sides, and the rows of the largest model.

    `made` is what a run makes for that one beside OURS, `said` what a recipe may say.
    """

    name: str
    architecture: str
    size: dict[str, Any]
    layers: int
    task: tuple[str, str]
    rows: int
    overrides: tuple[str, ...] = ()
    made: tuple[str, ...] = (EARLY,)
    said: tuple[str, ...] = (ADAFACTOR, HALVES)

    @property
    def sides(self) -> dict[str, tuple[str, ...]]:
        """The ways to train the largest model, by their columns' names."""
        ours = {word.partition("=")[2]: (*OURS, *self.made, word) for word in self.said}
        return {"stock": STOCK, "hf_mps": (*OURS, *self.made), **ours}


DECODER = {**QWEN2, "vocab_size": 151_936, "tie_word_embeddings": True}
CASES = (
    Case("BERT-base", "bert", {}, 12, CLASSIFY, 8),
    Case("Qwen2-0.5B", "qwen2", DECODER, 24, CONTINUE, 1),
    Case("Qwen2-0.5B LoRA", "qwen2", DECODER, 24, CONTINUE, 1, (LORA,), made=(), said=(HALVES,)),
)
TINY = Case("small Qwen2", "qwen2", {**SMALL, "vocab_size": 8000, "tie_word_embeddings": True}, 4, CONTINUE, 4)


def main() -> int:
    """Print the tables; the exit code is 1 where the small model's figures are not the plan's, or its losses differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[case.name for case in CASES])
    parser.add_argument("--small", action="store_true", help="run the small decoder alone")
    parser.add_argument("--layer", type=int, metavar="LENGTH", help="measure one layer of attention alone")
    asked = parser.parse_args()
    from hf_mps.tools.dryrun import metal_device

    device = metal_device()
    print(measured_on.line())
    warnings.simplefilter("ignore")
    if asked.layer:
        return layer(asked.layer)
    with tempfile.TemporaryDirectory() as folder:
        if asked.small:
            return small(Path(folder), device)
        for case in CASES:
            if asked.only in (None, case.name):
                table(case, Path(folder), device)
    return 0


def table(case: Case, folder: Path, device: Any) -> None:
    """The largest batch and the largest model of one training, for each machine."""
    from hf_mps.tools.dryrun.memory import machine

    machines = [machine.named(name) for name in MEMORY]
    sides = [tracer(case, side, case.layers, folder, device) for side in (STOCK, OURS)]
    lines = [depth_line(case, side, folder, device) for side in case.sides.values()]
    print(f"\n{case.name}, rows of {LENGTH} tokens; the line through {DEPTHS[:2]} layers is off by", end=" ")
    print(f"{max(line.off for line in lines):.2%} at {DEPTHS[2]}")
    print(f"{'':6} {'largest batch':>24}   largest model, {case.rows} row{'s' * (case.rows > 1)}")
    columns = "".join(f"{name:>12}" for name in case.sides)
    print(f"{'':6} {'stock':>8}{'hf_mps':>8}{'times':>8}   {columns}{'times':>8}", flush=True)
    for each in machines:
        rows = [most_rows(side, each.comfortable) for side in sides]
        sizes = [line.parameters(each.comfortable) for line in lines]
        columns = "".join(f"{millions(size):>12}" for size in sizes)
        batches = f"{rows[0]:>8}{rows[1]:>8}{times(rows):>8}"
        print(f"{each.memory // GIB:>3} GB {batches}   {columns}{times(sizes):>8}", flush=True)


def most_rows(side: Any, limit: int) -> int:
    """The most rows of a batch within `limit` bytes, which was traced; 0 where not even one fits.

    Every row adds the same bytes from where the batch's own moment is the highest, which it is at BATCHES.
    """
    if side(1).bytes > limit:
        return 0
    few, many = BATCHES
    by_row = (side(many).bytes - side(few).bytes) / (many - few)
    rows = max(1, int(few + (limit - side(few).bytes) / by_row))
    while rows > 1 and side(rows).bytes > limit:
        rows -= max(1, int((side(rows).bytes - limit) / by_row))
    return rows


def times(pair: Sequence[int]) -> str:
    """The second over the first."""
    return f"{pair[1] / pair[0]:.1f}" if pair[0] else "-"


def millions(parameters: int) -> str:
    """For a person."""
    return f"{parameters / 1e6:,.0f} M" if parameters else "none"


class DepthLine(NamedTuple):
    """Peak and parameters of a model by its number of layers: a value at none, and what each layer adds."""

    peak: tuple[float, float]
    size: tuple[float, float]
    off: float

    def parameters(self, limit: int) -> int:
        """Of the deepest model whose step stays within `limit` bytes; 0 where not one layer does."""
        layers = int((limit - self.peak[0]) // self.peak[1])
        return int(self.size[0] + layers * self.size[1]) if layers > 0 else 0


def depth_line(case: Case, side: Sequence[str], folder: Path, device: Any) -> DepthLine:
    """The line of one side, through two depths, with how far off it is at a third."""
    found = []
    for layers in DEPTHS:
        traced = tracer(case, side, layers, folder, device)
        found.append((traced(case.rows).bytes, traced.parameters))
    (first, second, third), (few, many, _) = zip(*found, strict=True)
    span = DEPTHS[1] - DEPTHS[0]
    by_layer = ((second - first) / span, (many - few) / span)
    start = (first - by_layer[0] * DEPTHS[0], few - by_layer[1] * DEPTHS[0])
    expected = start[0] + by_layer[0] * DEPTHS[2]
    return DepthLine((start[0], by_layer[0]), (start[1], by_layer[1]), abs(expected / third - 1))


def pair_of(case: Case, side: Sequence[str], layers: int, rows: int) -> Pair:
    """The case as check_plan writes its recipe and its model's configuration."""
    name = f"{case.architecture}-{layers}"
    size = {"num_hidden_layers": layers, "max_position_embeddings": 2048, **case.size}
    check_plan.SIZES[name] = {"model_type": case.architecture, **size}
    return Pair(name, case.task, rows, LENGTH, (*case.overrides, *side))


def tracer(case: Case, side: Sequence[str], layers: int, folder: Path, device: Any) -> Any:
    """The plan's tracer for a side of a case, with the number of its model's parameters."""
    from hf_mps.tools.dryrun import prepare
    from hf_mps.tools.dryrun.memory.trace import Tracer
    from hf_mps.tools.dryrun.resolve import resolve_target

    pair = pair_of(case, side, layers, case.rows)
    target = resolve_target(str(check_plan.recipe(pair, folder)), pair.overrides)
    with prepare.weightless(target) as parts:
        made: Any = Tracer(parts, device)
        made.parameters = sum(each.numel() for each in parts.prepared.model.parameters())
    return made


def layer(length: int) -> int:
    """The measured peaks of one layer of attention, PyTorch's and in blocks; the exit code is 1 above a quarter."""
    from torch.nn.functional import scaled_dot_product_attention

    from hf_mps.layer.fused_step.attention.blockwise import attention
    from hf_mps.layer.fused_step.attention.masks import Causal

    worst = 0.0
    print(f"\n1 x 12 heads x {length} x 64, float32: peak in MiB beside query, key and value")
    for dropout in (0.0, 0.1):
        for causal in (False, True):
            stock = peak_of(length, scaled_dot_product_attention, dropout_p=dropout, is_causal=causal)
            ours = peak_of(length, attention, mask=Causal() if causal else None, dropout=dropout)
            worst = max(worst, ours / stock)
            kind = f"{'causal' if causal else 'full'}, dropout {dropout}"
            print(f"{kind:<20} {stock / 2**20:7.0f} {ours / 2**20:7.0f}   {ours / stock:.3f} of it", flush=True)
    return int(worst > 0.25)


def peak_of(length: int, function: Any, **settings: Any) -> int:
    """Bytes that a forward and backward pass of one layer hold at most."""
    import torch

    from hf_mps.metal import simulator

    leaves = [torch.randn(1, 12, length, 64, device="mps", requires_grad=True) for _ in range(3)]
    before = torch.mps.current_allocated_memory()
    simulator.reset_peak_memory()
    out = function(*leaves, **settings)
    out.backward(torch.ones_like(out))
    return simulator.peak_memory() - before


def small(folder: Path, device: Any) -> int:
    """A small decoder: the plan's largest batches really run, and both sides' losses are the same."""
    from hf_mps.tools.dryrun.memory.machine import largest

    limit = tracer(TINY, STOCK, TINY.layers, folder, device)(3).bytes
    wrong = False
    print(f"\n{TINY.name}, {limit / 2**20:.0f} MiB: the largest batch, its measured peak, and that of a larger one")
    for name, side in (("stock", STOCK), ("hf_mps", OURS)):
        traced = tracer(TINY, side, TINY.layers, folder, device)
        most = largest(lambda rows, traced=traced: traced(rows).bytes, limit, 3)  # type: ignore[misc]
        more = most + max(1, most // 25) + 1
        fits, too_much = (
            check_plan.both(pair_of(TINY, side, TINY.layers, rows), folder, device)[1] for rows in (most, more)
        )
        wrong |= fits > 1.01 * limit or too_much <= limit
        print(
            f"{name:<7} {most:>4} rows {fits / 2**20:6.0f} MiB   {more:>4} rows {too_much / 2**20:6.0f} MiB", flush=True
        )
    stock = losses(pair_of(TINY, STOCK, TINY.layers, 4), folder, device)
    print(f"\nlosses of {len(stock)} steps, stock's from {stock[0]:.4f} to {stock[-1]:.4f}; how far the others are off")
    for side in (OURS, (*OURS, EARLY), (*OURS, EARLY, ADAFACTOR), (*OURS, HALVES)):
        curve = losses(pair_of(TINY, side, TINY.layers, 4), folder, device)
        furthest = max(abs(a - b) / abs(a) for a, b in zip(stock, curve, strict=True))
        print(f"{furthest:.1e} at most, the last is {curve[-1]:.4f}   {' '.join(side)}", flush=True)
        wrong |= furthest > 1e-3 and not {ADAFACTOR, HALVES} & {*side}
    return int(wrong)


def losses(pair: Pair, folder: Path, device: Any, steps: int = 30) -> list[float]:
    """The loss of every step of a training with weights drawn by the recipe's seed."""
    from hf_mps.tools.dryrun import prepare
    from hf_mps.tools.dryrun.resolve import resolve_target

    target = resolve_target(str(check_plan.recipe(pair, folder)), pair.overrides)
    found: list[float] = []
    with prepare.weightless(target, "cpu") as parts:
        step = prepare.step(parts, device, fake=False, **check_plan.shape(parts, pair))
        step.run(steps, after_backward=lambda loss: found.append(float(loss)))
    return found


if __name__ == "__main__":
    sys.exit(main())
