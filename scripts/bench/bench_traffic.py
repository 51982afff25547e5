"""The memory traffic of a step's work apart from its products, and a modelled step on an M2 Pro: stock and fused.

    python scripts/bench/bench_traffic.py
    python scripts/bench/bench_traffic.py --models vit --steps 10 --list

The trainings are bench_waits.py's: MiniLM as a classifier, a small decoder with LoRA and a small ViT, by the Trainer on
the simulated device, alone and with fused steps and Metal kernels of ours. Each call of a step counts for the tensors
that it reads and those that it writes, once each; products (linear layers, matrix products, convolutions) count for
their floating-point operations. What our attention kernels multiply is left in the traffic, on our side alone. The
batch's is what is left without the optimizer, clipping and a table's gradient, which go through all weights; clipping
counts as if the norm were above its limit (below, our kernel reads the norm and stops, and PyTorch multiplies by one).

The model of a step is the larger of two sums, as a host queues work ahead of its GPU. Host: a time for each MPSGraph or
framework kernel and for each Metal kernel. GPU: for each launch the largest of a dispatch's time, its bytes by the
bandwidth and its operations by the rate. Python between the calls is left out on both sides. The figures are public:

    host          20 us a graph, 1.3 us a Metal kernel: M1 Pro, pytorch#148219
    dispatch      4.6, 5.0 and 7.6 us for kernels of one element: the same table; all three are printed, 5.0 first
    bandwidth     200 GB/s: Apple's figure of the M2 Pro
    products      0.81 of 6.8 TFLOPS, as an M1 Pro's 4.28 of 5.3 (zzc0721/torch-performance-test-data#191)

Against the seven rows of that table the model is -34 to +9 percent off for kernels and -5 to +2 for graphs. No public
time of a whole step names its model, batch and release, so that the error of a step is not known.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import bench_waits
import measured_on

if TYPE_CHECKING:
    from hf_mps.metal.operators.launch_class import Call

SIDES = ("stock", "fused")
HOST_US = {"graph": 20.0, "framework": 20.0, "metal": 1.3, "blit": 1.3}
DISPATCH_US = (5.0, 4.6, 7.6)
BYTES_PER_US = 200e9 / 1e6
OPERATIONS_PER_US = 0.81 * 6.8e12 / 1e6
BYTES = {"bool": 1, "uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "int64": 8, "float64": 8}
"""Bytes of an element; of the dtypes that are not named, four."""

PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "linear", "linear_backward", "convolution", "mps_convolution_backward"}
PRODUCTS |= {"_mps_convolution", "convolution_backward", "convolution_overrideable"}
OVERWRITES = {"copy", "zero", "fill", "random", "normal", "uniform", "bernoulli"}
"""In-place operators that write their first tensor and do not read it."""
REDUCES = {"sum", "mean", "amax", "amin", "max", "min", "all", "any", "argmax", "argmin", "norm", "linalg_vector_norm"}
REDUCES |= {"nll_loss_forward"}
"""What writes a small part of what it reads, which is not counted."""
BOOLEAN = {"eq", "ne", "lt", "le", "gt", "ge", "isneginf", "isposinf", "isinf", "isnan", "logical_not"}
OF_WEIGHTS = {"aten::_fused_adamw_", "aten::linalg_vector_norm", "aten::mul_.Tensor", "aten::embedding_dense_backward"}
OF_WEIGHTS |= {"metal::squares_float", "metal::scale_float"}
"""The optimizer, clipping and a table's gradient: as much as a model has weights, however small its batch."""
TWICE = ("scale_", "cross_entropy")
"""Kernels of ours that read and write the tensors they are given."""


def main() -> int:
    """Train each model on both sides and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps of each training (default %(default)s)")
    parser.add_argument("--models", default=",".join(bench_waits.MODELS), help="of %(default)s, with commas")
    parser.add_argument("--list", action="store_true", help="each operator's launches and bytes as well")
    given = parser.parse_args()
    models = bench_waits.models_of(parser, given)
    print(measured_on.line_of({"HF_MPS_SIMULATE": "1"}))
    counted = given.steps - bench_waits.begins(given.steps)
    print(f"figures of a step, of {counted} steps; MB without the products; milliseconds as modelled")
    heads = {"launches": 10, "graphs": 8, "MB": 9, "of batch": 10, "GFLOP": 8, "host ms": 9}
    heads |= {f"GPU {us}": 9 for us in DISPATCH_US}
    print(f"{'':<16}" + "".join(f"{head:>{width}}" for head, width in heads.items()))
    for model in models:
        steps = {side: step_of(model, side, given.steps) for side in SIDES}
        for side, step in steps.items():
            print(step.row(f"{model}, {side}"), flush=True)
        stock, ours = steps["stock"], steps["fused"]
        ratios = ", ".join(f"{stock.milliseconds(us) / ours.milliseconds(us):.2f}" for us in DISPATCH_US)
        whole, rest = (ours.bytes(name) / stock.bytes(name) for name in ((), OF_WEIGHTS))
        print(f"{model}: {whole:.2f} of stock's bytes, {rest:.2f} of the batch's; modelled {ratios} times as fast")
        for side, step in steps.items() if given.list else ():
            print("\n".join(step.listed(side)))
    return 0


@dataclass
class Work:
    """What a call gives a Mac to do: the classes of its launches, the bytes it moves, a product's operations."""

    operator: str
    launches: tuple[str, ...]
    bytes: int
    operations: int


@dataclass
class Step:
    """A step's calls, each with how often a step has it."""

    works: list[tuple[Work, float]]

    def bytes(self, without: Container[str] = ()) -> float:
        """The traffic of what is no product, without some operators'."""
        rest = ((each, times) for each, times in self.works if not (each.operations or each.operator in without))
        return sum(times * each.bytes for each, times in rest)

    def launched(self, *kinds: str) -> float:
        """How many launches of these classes a step has."""
        return sum(times * sum(kind in kinds for kind in work.launches) for work, times in self.works)

    def host(self) -> float:
        """Milliseconds in which the host encodes a step."""
        return sum(times * sum(HOST_US[kind] for kind in work.launches) for work, times in self.works) / 1e3

    def gpu(self, dispatch_us: float) -> float:
        """Milliseconds in which the GPU runs a step."""
        return sum(times * took(work, dispatch_us) for work, times in self.works) / 1e3

    def milliseconds(self, dispatch_us: float) -> float:
        """The modelled step."""
        return max(self.host(), self.gpu(dispatch_us))

    def row(self, title: str) -> str:
        """A line of the table."""
        operations = sum(times * work.operations for work, times in self.works)
        launches, graphs = self.launched("metal", "graph", "framework"), self.launched("graph", "framework")
        traffic = f"{self.bytes() / 1e6:>9.1f}{self.bytes(OF_WEIGHTS) / 1e6:>10.1f}"
        cells = f"{launches:>10.0f}{graphs:>8.0f}{traffic}{operations / 1e9:>8.2f}{self.host():>9.2f}"
        return f"{title:<16}{cells}" + "".join(f"{self.gpu(us):>9.2f}" for us in DISPATCH_US)

    def listed(self, side: str) -> Iterable[str]:
        """Each operator's launches and bytes, the most bytes first."""
        launches, moved = Counter[str](), Counter[str]()
        for work, times in self.works:
            launches[work.operator] += times * len(work.launches)
            moved[work.operator] += 0 if work.operations else times * work.bytes
        for name in sorted(launches, key=lambda name: (-moved[name], -launches[name])):
            yield f"    {side:<6}{launches[name]:>8.1f}{moved[name] / 1e6:>10.3f} MB  {name}"


def took(work: Work, dispatch_us: float) -> float:
    """Microseconds of a call on the GPU."""
    longest = max(work.bytes / BYTES_PER_US, work.operations / OPERATIONS_PER_US)
    return max(longest, dispatch_us * len(work.launches))


def step_of(model: str, side: str, steps: int) -> Step:
    """Train and return what a step does, as the installed release's host launches it."""
    import torch

    from hf_mps.metal.operators import launch_class
    from hf_mps.metal.operators.calls import read

    found = bench_waits.counted(model, side, steps, "")
    table = launch_class.nearest(str(torch.__version__))
    works = []
    for text, times in found["calls"].items():
        call = read(text)
        if launches := table.encoded(call):
            works.append((Work(call.operator, launches, moved(call), operations(call)), times / found["later_steps"]))
    return Step(works)


def moved(call: Call) -> int:
    """Bytes that a call reads and writes.

    The simulated device records what a call is given and not what it returns: an element-wise operator returns as many
    elements as its operands have when broadcast, the others by what they do.
    """
    sizes = [prod(each.shape) * BYTES.get(each.dtype, 4) if each.device == "mps" else 0 for each in call.inputs]
    name, given = call.base, sum(sizes)
    if call.operator.startswith("metal::"):
        return given * (2 if call.operator.removeprefix("metal::").startswith(TWICE) else 1)
    if not sizes or call.operator.endswith("out") or name in OVERWRITES or name in REDUCES:
        return given  # an .out form's result is among its inputs
    if name == "_fused_adamw":  # parameters, gradients and both moments are read, all but the gradients written
        lengths = call.lists[:4]
        return given + sum(sizes[: sum(lengths)]) - sum(sizes[lengths[0] : sum(lengths[:2])])
    if name in ("index_select", "embedding"):  # the rows that are looked up, and not the table
        rows = prod(call.inputs[1].shape)
        return sizes[1] + 2 * rows * prod(call.inputs[0].shape[1:]) * BYTES.get(call.inputs[0].dtype, 4)
    if name == "embedding_dense_backward":
        rows = next((each for each in call.arguments if isinstance(each, int)), 0)
        return given + rows * call.inputs[0].shape[-1] * BYTES.get(call.inputs[0].dtype, 4)
    if name == "cat" or name.startswith("_foreach"):
        return 2 * given
    if call.operator.partition("::")[2].partition(".")[0].endswith("_"):
        return given + sizes[0]
    element = 1 if name in BOOLEAN else max(BYTES.get(each.dtype, 4) for each in call.inputs)
    written = broadcast([each.shape for each in call.inputs]) * element
    return given + written + (written // 4 if name == "native_dropout" else 0)


def broadcast(shapes: list[tuple[int, ...]]) -> int:
    """The elements of a result of shapes that broadcast; the most of one of them where they do not."""
    deepest = max(map(len, shapes))
    aligned = [(1,) * (deepest - len(shape)) + shape for shape in shapes]
    sizes = [max(column) for column in zip(*aligned, strict=True)]
    together = all(size in (1, largest) for shape in aligned for size, largest in zip(shape, sizes, strict=True))
    return prod(sizes) if together else max(map(prod, shapes))


def operations(call: Call) -> int:
    """Floating-point operations of a product, two for each multiplication; 0 of what is none."""
    if call.base not in PRODUCTS:
        return 0
    shapes = [each.shape for each in call.inputs if each.shape]
    if call.base == "linear":
        return 2 * prod(shapes[0]) * shapes[1][0]
    if call.base == "linear_backward":  # of the input and of the weight: as much each
        return 4 * prod(shapes[0]) * shapes[2][0]
    if "convolution" in call.base:  # no padding is known: a patch for each kernel-sized piece of the input
        backward = "backward" in call.base
        weight = next(shape for shape in reversed(shapes[:3]) if len(shape) == len(shapes[0]))
        return (4 if backward else 2) * prod(shapes[0][:1] + shapes[0][2:]) * weight[0] * weight[1]
    first, second = [shape for shape in shapes if len(shape) == max(map(len, shapes))][-2:]
    return 2 * prod(first) * second[-1]


if __name__ == "__main__":
    sys.exit(main())
