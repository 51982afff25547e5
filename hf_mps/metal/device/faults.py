"""What is wrong on Metal, declared once: which releases, chips and systems have a fault, and which guard cures it.

The doctor, docs/hazards.md, the guards, the simulated device and the tests read this table. It was read up to torch
2.15; bounds below 2.13, the oldest release that is supported, are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hf_mps.core import settings
from hf_mps.core.choice import Choice
from hf_mps.core.releases import numbers, torch_release, within
from hf_mps.metal.device import machine

PYTORCH = "https://github.com/pytorch/pytorch"
OPERATIONS = f"{PYTORCH}/blob/v2.14.1/aten/src/ATen/native/mps/operations"
FIRST_FAMILIES = ("Apple M1", "Apple M2")
"""The chips of Metal's GPU families Apple7 and Apple8."""


@dataclass(frozen=True)
class Fault:
    """What is wrong, in a sentence, and where a thread or a source says so.

    `releases` of `package` and `macos` are bounds, `chips` the beginnings of chips' names; each is empty for all.
    `guard` names what cures it here, if anything does.
    """

    what: str
    issue: str
    releases: str = ""
    guard: str = ""
    macos: str = ""
    chips: tuple[str, ...] = ()
    package: str = "torch"
    simulated: bool = True
    """Whether the simulated device imitates it."""
    asked: bool = False
    """Simulated only where a program asks for it: it is true of every Mac, and too dear to be on in each test."""
    listed: bool = True
    """Whether the doctor names it; what Metal is like without being a problem of some release is not listed."""

    def concerns(self, chip: str, macos: str | None, release: str | tuple[int, ...]) -> bool:
        """Return whether a Mac with this chip and macOS has it with this release of the package."""
        there = chip.startswith(self.chips or "") and within(release, self.releases)
        return there and (not self.macos or (macos is not None and within(macos, self.macos)))


def at(issue: int | str, releases: str = "", guard: str = "", macos: str = "", **others: Any) -> Callable[[str], Fault]:
    """Return a Fault's maker, which takes the sentence; `issue` is PyTorch's, by number, "pull/1", or another's URL."""
    where = f"{PYTORCH}/issues/{issue}" if isinstance(issue, int) else issue
    where = f"{PYTORCH}/{where}" if where.startswith("pull/") else where
    return partial(Fault, issue=where, releases=releases, guard=guard, macos=macos, **others)


_RIGHT = "!=26.4.*,!=26.5.*,!=26.6.*"

FAULTS: dict[str, Fault] = {
    # From macOS 15 on MPSGraph reads and writes by strides. 2.14.1 still hands it tanh, threshold, softplus and prelu.
    "permuted-activations": at(175189, "<2.15", "permuted-activations", "<15")(
        "gradients of activations and batch norm are wrong on permuted and channels_last tensors"
    ),
    "permuted-results": at(131736, "<2.15", "permuted-activations", "<15")(
        "softplus, threshold and prelu never write a result that is permuted or in channels_last"
    ),
    "permuted-batch-norm": at(175189, "<2.14", "permuted-activations", ">=26")(
        "the backward pass of batch norm refuses permuted and channels_last tensors"
    ),
    "conv-weights": at(192212, "<2.14", "non-contiguous", simulated=False)(
        "convolutions are wrong with non-contiguous weights"
    ),
    "lstm-dropout": at(190056, "<2.14", "lstm-dropout")(
        "the gradients of an LSTM of two or more layers are computed as if there were no dropout between them"
    ),
    "checkpoint-rng": at(127676, guard="checkpoint-rng", simulated=False)(
        "gradient checkpointing replays other random numbers: wrong gradients with dropout"
    ),
    "compiled-layouts": at(192551, "<2.14", "compile", simulated=False)(
        "torch.compile forces channels_last on convolutions, which trains four to nine times slower"
    ),
    "uncompiled-graphs": at(150121, guard="compile", simulated=False)(
        "torch.compile ends the run where it cannot compile a graph for Metal; through Accelerate it runs as it is"
    ),
    "cuda-graphs": at(188970, "<2.14", "cuda-graphs")(
        "torch.compile with CUDA graphs (modes reduce-overhead, max-autotune) ends the process on deep float16 models"
    ),
    "large-k": at(193487, "<2.14", "large-k", chips=FIRST_FAMILIES)(
        "matrix products that sum over more than 32,766 values (below a large vocabulary, of large batches) also sum "
        "memory beyond their operands"
    ),
    "large-k-batched": at(195163, guard="large-k", chips=FIRST_FAMILIES)(
        "batched matrix products that sum over more than 32,766 values are wrong"
    ),
    # Before macOS 15 what has an offset or gaps is computed into a temporary; MPSGraph mis-writes gaps up to macOS 15.
    # 2.14 writes such results of mm, addmm and bmm by its own kernels; baddbmm asks for neither, in 2.15.0 too.
    "sliced-products": at("pull/193385", "<2.14", "sliced-products", "<15")(
        "mm, addmm and bmm into a slice, or a part of each row, are never written"
    ),
    "sliced-baddbmm": at(f"{OPERATIONS}/LinearAlgebra.mm", guard="sliced-products", macos="<15")(
        "baddbmm into a slice, or a part of each row, is never written"
    ),
    "gapped-products": at(104832, "<2.14", "sliced-products", ">=15,<26")(
        "mm, addmm and bmm into a part of each row are written beside their place"
    ),
    "gapped-baddbmm": at(f"{OPERATIONS}/LinearAlgebra.mm", guard="sliced-products", macos=">=15,<26")(
        "baddbmm into a part of each row is written beside its place"
    ),
    # MPSGraph's own, from macOS 15.0 to 26.3 and in 27. PyTorch's copy of such operands, in mm alone, ends with 26.4.
    "expanded-operands": at(180201, guard="expanded-operands", macos=f">=15,{_RIGHT}")(
        "matrix products of an expanded tensor, as the gradient of a sum is, compute every 16th row alone (addmm)"
    ),
    "expanded-mm": at(180201, guard="expanded-operands", macos=">=27")(
        "mm of an expanded tensor computes every 16th row alone"
    ),
    "expanded-gradient": at(180201, "<2.14", "expanded-operands", f">=15,{_RIGHT}")(
        "linear's backward computes every 16th row of the input's gradient where the gradient that arrives is expanded"
    ),
    "late-copies": at(189690, guard="non-blocking")(
        "copies with non_blocking=True are done when the device comes to them: to the CPU they are read too early"
    ),
    "queued-work": at(140296, asked=True, listed=False)(
        "operators, too, are computed only when somebody waits for the device"
    ),
    "stopped-gpu": at("pull/193571", "<2.15", asked=True)(
        "GPU work that macOS aborts (too long, too much memory) raises no error, and its results are garbage; the "
        "sentinel stopped-gpu watches trainings for it"
    ),
    "silent-indices": at(144824, "<2.14", "index-range")(
        "ids and labels out of range raise no error: zeros are read, labels are left out, and the training goes on"
    ),
    "late-indices": at("pull/187109", ">=2.14", "index-range")(
        "ids and labels out of range are an AcceleratorError that comes late and names no place"
    ),
    "atomic-order": at(195404, guard="atomic-order")(
        "two runs with one seed differ in their last bits: where an index repeats (embedding's backward, scatter_add, "
        "index_put_) Metal adds in any order; in one under torch.use_deterministic_algorithms(True)"
    ),
    "dtype-copies": at(189563, "<2.14", "dtype-copies")(
        "copies to the CPU that also change the dtype overwrite their source or read beside it"
    ),
    "wide-copies": at(197715, "==2.14.0", "dtype-copies")(
        "copies to the CPU that also make float64 or complex128 write nothing"
    ),
    "row-bias": at(188438, "<2.14", "linear-bias", ">=26,<27", chips=("Apple M1",))(
        "F.linear forgets the bias for a single row on macOS 26"
    ),
    # Older systems multiply by MPSGraph (Linear.mm asks for macOS 15).
    "many-rows-bias": at(189495, "<2.14", "linear-bias", ">=15")(
        "F.linear with a bias is wrong for more than 65,536 matrices: later ones are written over the first"
    ),
    "huge-lookups": at(188756, "<2.14", "huge-embedding", simulated=False)(
        "looking up rows in a tensor of 2^31 or more elements gives zeros"
    ),
    "huge-products": at(197636, guard="huge-products")(
        "batched matrix products of more than 2^32 elements are wrong, their gradients too"
    ),
    "huge-cat": at(189960, "<2.15", "huge-cat")(
        "torch.cat to more than 2^31 elements loses rows and writes over other tensors"
    ),
    "embedding-grad": at(f"{OPERATIONS}/Embedding.mm", guard="embedding-grad")(
        "the backward pass of an embedding of 2^31 elements or more ends in an error"
    ),
    "conv-batch": at(96225, guard="conv-batch")(
        "weights of 1-D and 2-D convolutions get wrong gradients of a batch of 65,536 or more"
    ),
    # 2.14 convolves volumes with Metal Performance Primitives (PR 188802); those of macOS 26.3 and later are right.
    "conv3d-layout": at(197114, ">=2.14", "conv3d-layout", ">=26,<26.3")(
        "3-D convolutions are wrong on macOS 26.0 to 26.2"
    ),
    # 2.15 pads with its own kernels (PR 195368, PR 196985); the wheel of 2.14.1 still has MPSGraph's.
    "large-pad": at(194922, "<2.15", "large-pad")("F.pad of five dimensions or more loses large frames and volumes"),
    # From macOS 15 on MPSGraph writes by strides; 2.14 has a kernel of PyTorch's own.
    "index-add-gaps": at(176159, "<2.14", "index-add-gaps", "<15")("index_add_ leaves transposed tensors unchanged"),
    # The host takes the stride of the dimension for the number of columns, as MLX's did (ml-explore/mlx#4254).
    "lone-scans": at(f"{OPERATIONS}/ScanKernel.mm", guard="lone-scans")(
        "cumulative sums, products and extremes over a dimension of size 1 leave values of slices and transposed "
        "columns unwritten, or write over other tensors"
    ),
    # PR 196662 is not in the wheel of 2.14.1.
    "lerp-weight": at(196067, "<2.15", "lerp-weight")("torch.lerp misreads a weight of another dtype"),
    # 2.14 gives the kernel the bounds of each window (PR 189659).
    "adaptive-max-pool": at(190064, "<2.14", "adaptive-max-pool", simulated=False)(
        "adaptive max pools of sizes that do not divide have wrong values, indices and gradients; larger results also "
        "have a wrong shape"
    ),
    # No guard: it would be a kernel in Python before each addition and multiplication, 2.5 µs a call.
    "scalar-views": at(187117, "<2.14")(
        "`on_mps * on_cpu[3]` uses on_cpu[0], without an error: write on_cpu[3].item()"
    ),
    # Of 768 to 3,072 rows. macOS chooses between two kernels when a process first runs a graph: no fix in PyTorch.
    "slow-products": at(182815, macos=">=26", chips=("Apple M5",), simulated=False)(
        "products may run 2 to 3 times slower in 4 of 10 runs"
    ),
    "graphs-of-26": at("https://github.com/actions/runner-images/issues/14380", "<2.14", macos=">=26", simulated=False)(
        "MPSGraph of macOS 26 gives other results than that of macOS 15 for some models (SAM2)"
    ),
    # From here on what ends in an error, in an abort of the process, or in a larger figure.
    "dtype-results": at(
        "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/testing/_internal/common_mps.py", listed=False
    )(
        "sorting is always stable, the variance of complex numbers is complex, the nanmedian of a row of NaN is 0, the "
        "Cholesky factor of complex numbers is one of other numbers"
    ),
    "refusals": at(96056, listed=False)(
        "Metal's kernels refuse what the CPU computes: pools of sizes that do not divide, products and tensors beyond "
        "INT_MAX, ConvTranspose3d in half precision, complex matrices in linalg, …"
    ),
    "mixed-layer-norm": at(190054, "<2.14", "mixed-dtypes")(
        "layer norms of float32 weights over half-precision input give garbage"
    ),
    "mixed-norm-backward": at(190054, "<2.14", "mixed-dtypes")(
        "the backward pass of such a layer norm ends the program"
    ),
    "vector-weight": at(187988, "<2.14", "linear-shapes")(
        "the backward pass of F.linear ends the program where the weight has one dimension"
    ),
    "deep-linear": at(187201, "<2.14", "linear-shapes", ">=27")(
        "the backward pass of F.linear ends the program where the input has five dimensions or more, two of size 1"
    ),
    "empty-linear": at(190050, "<2.14", macos=">=15")("F.linear over no features ends the program"),
    "bfloat16-linear": at(197796, "<2.14", macos=">=27", simulated=False)(
        "F.linear by a transposed bfloat16 weight ends the program"
    ),
    "heaps": at("https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/mps/MPSAllocator.h", listed=False)(
        "the driver counts heaps of 8, 32 and 1,024 MiB, full or not"
    ),
    "whole-buffers": at(132596, "<2.14", "shape-growth")(
        "what is freed stays a buffer of its size, so the driver's figure grows with every new shape"
    ),
    "fallback-variable": at(
        "https://github.com/huggingface/accelerate/issues/3294",
        guard="the fallback",
        package="accelerate",
        simulated=False,
    )("sets PYTORCH_ENABLE_MPS_FALLBACK after PyTorch has read it, so that it has no effect"),
}

OLDEST = "2.13"
"""The oldest release of torch that is supported."""

SIMULATED = tuple(name for name, fault in FAULTS.items() if fault.simulated)

LIMITS = ("huge-products", "huge-cat", "embedding-grad")
"""The faults that begin at a number of elements which no test can hold in memory."""

ABORTS = ("mixed-norm-backward", "vector-weight", "deep-linear", "empty-linear")
"""Those that end the process, by SIGABRT, which no Python catches."""


def possible(*names: str) -> bool:
    """Return whether this Mac's chip and macOS, with the installed torch, have one of these faults."""
    this, release = machine.present(), torch_release()
    return any(FAULTS[name].concerns(this.chip, this.macos, release) for name in names)


def here(*names: str) -> Choice[bool]:
    """Return the same with the reason, which names the Mac and torch."""
    import torch

    this = machine.present()
    has = possible(*names)
    where = f"torch {torch.__version__} on {this.chip} with macOS {this.macos}"
    return Choice(has, f"{where} {'has' if has else 'does not have'} the fault, by its upstream issue")


def end(names: Sequence[str]) -> str:
    """Return the release from which on none of these faults is there. Raises ValueError where one has not ended."""
    return max((FAULTS[name].releases.removeprefix("<") for name in names), key=numbers)


def cured_by(guard: str) -> tuple[str, ...]:
    """Return the faults that a guard cures, by name."""
    return tuple(name for name, fault in FAULTS.items() if fault.guard == guard)


def too_old(torch: str) -> str:
    """Return the sentence about a version of torch that is older than OLDEST; empty where it is not."""
    return "" if within(torch, f">={OLDEST}") else f"torch {torch} is older than {OLDEST}: wrong results are known"


def left_out() -> frozenset[str]:
    """The faults that HF_MPS_FAULTS switches off, as `-name,-name`. Raises UserError for a name that there is not."""
    return settings.switched_off("HF_MPS_FAULTS", "fault", SIMULATED)
