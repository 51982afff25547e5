"""What is wrong on Metal, declared once: which releases, chips and systems have a fault, and which guard cures it.

The doctor, docs/hazards.md, the guards, the simulated device and the tests read this table. It was read up to torch
2.15; bounds below 2.13, the oldest release that is supported, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_mps.core import settings
from hf_mps.core.choice import Choice
from hf_mps.core.releases import numbers, torch_release, within
from hf_mps.metal.device import machine

ISSUES = "https://github.com/pytorch/pytorch/issues"
PULLS = "https://github.com/pytorch/pytorch/pull"
OPERATIONS = "https://github.com/pytorch/pytorch/blob/v2.14.1/aten/src/ATen/native/mps/operations"
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
        """Whether a Mac with this chip and macOS has it with this release of the package."""
        there = chip.startswith(self.chips or "") and within(release, self.releases)
        return there and (not self.macos or (macos is not None and within(macos, self.macos)))


_RIGHT = "!=26.4.*,!=26.5.*,!=26.6.*"

FAULTS: dict[str, Fault] = {
    # From macOS 15 on MPSGraph reads and writes by strides. 2.14.1 still hands it tanh, threshold, softplus and prelu.
    "permuted-activations": Fault(
        "gradients of activations and batch norm are wrong on permuted and channels_last tensors",
        f"{ISSUES}/175189",
        "<2.15",
        "permuted-activations",
        "<15",
    ),
    "permuted-results": Fault(
        "softplus, threshold and prelu never write a result that is permuted or in channels_last",
        f"{ISSUES}/131736",
        "<2.15",
        "permuted-activations",
        "<15",
    ),
    "permuted-batch-norm": Fault(
        "the backward pass of batch norm refuses permuted and channels_last tensors",
        f"{ISSUES}/175189",
        "<2.14",
        "permuted-activations",
        ">=26",
    ),
    "conv-weights": Fault(
        "convolutions are wrong with non-contiguous weights",
        f"{ISSUES}/192212",
        "<2.14",
        "non-contiguous",
        simulated=False,
    ),
    "lstm-dropout": Fault(
        "the gradients of an LSTM of two or more layers are computed as if there were no dropout between them",
        f"{ISSUES}/190056",
        "<2.14",
        "lstm-dropout",
    ),
    "checkpoint-rng": Fault(
        "gradient checkpointing replays other random numbers: wrong gradients with dropout",
        f"{ISSUES}/127676",
        guard="checkpoint-rng",
        simulated=False,
    ),
    "compiled-layouts": Fault(
        "torch.compile forces channels_last on convolutions, which trains four to nine times slower",
        f"{ISSUES}/192551",
        "<2.14",
        "compile",
        simulated=False,
    ),
    "uncompiled-graphs": Fault(
        "torch.compile ends the run where it cannot compile a graph for Metal; through Accelerate it runs as it is",
        f"{ISSUES}/150121",
        guard="compile",
        simulated=False,
    ),
    "cuda-graphs": Fault(
        "torch.compile with CUDA graphs (modes reduce-overhead, max-autotune) ends the process on deep float16 models",
        f"{ISSUES}/188970",
        "<2.14",
        "cuda-graphs",
    ),
    "large-k": Fault(
        "matrix products that sum over more than 32,766 values (below a large vocabulary, of large batches) also sum "
        "what lies behind their operands",
        f"{ISSUES}/193487",
        "<2.14",
        "large-k",
        chips=FIRST_FAMILIES,
    ),
    "large-k-batched": Fault(
        "batched matrix products that sum over more than 32,766 values are wrong",
        f"{ISSUES}/195163",
        guard="large-k",
        chips=FIRST_FAMILIES,
    ),
    # Before macOS 15 what has an offset or gaps is computed into a temporary; MPSGraph mis-writes gaps up to macOS 15.
    # 2.14 writes such results of mm, addmm and bmm by kernels of its own; baddbmm asks for neither, in 2.15.0 too.
    "sliced-products": Fault(
        "mm, addmm and bmm into a slice, or a part of each row, are never written",
        f"{PULLS}/193385",
        "<2.14",
        "sliced-products",
        "<15",
    ),
    "sliced-baddbmm": Fault(
        "baddbmm into a slice, or a part of each row, is never written",
        f"{OPERATIONS}/LinearAlgebra.mm",
        guard="sliced-products",
        macos="<15",
    ),
    "gapped-products": Fault(
        "mm, addmm and bmm into a part of each row are written beside their place",
        f"{ISSUES}/104832",
        "<2.14",
        "sliced-products",
        ">=15,<26",
    ),
    "gapped-baddbmm": Fault(
        "baddbmm into a part of each row is written beside its place",
        f"{OPERATIONS}/LinearAlgebra.mm",
        guard="sliced-products",
        macos=">=15,<26",
    ),
    # MPSGraph's own, from macOS 15.0 to 26.3 and in 27. PyTorch's copy of such operands, in mm alone, ends with 26.4.
    "expanded-operands": Fault(
        "matrix products of an expanded tensor, as the gradient of a sum is, compute every 16th row alone (addmm)",
        f"{ISSUES}/180201",
        guard="expanded-operands",
        macos=f">=15,{_RIGHT}",
    ),
    "expanded-mm": Fault(
        "mm of an expanded tensor computes every 16th row alone",
        f"{ISSUES}/180201",
        guard="expanded-operands",
        macos=">=27",
    ),
    "expanded-gradient": Fault(
        "linear's backward computes every 16th row of the input's gradient where the gradient that arrives is expanded",
        f"{ISSUES}/180201",
        "<2.14",
        "expanded-operands",
        f">=15,{_RIGHT}",
    ),
    "late-copies": Fault(
        "copies with non_blocking=True are done when the device comes to them: to the CPU they are read too early",
        f"{ISSUES}/189690",
        guard="non-blocking",
    ),
    "queued-work": Fault(
        "operators, too, are computed only when somebody waits for the device",
        f"{ISSUES}/140296",
        asked=True,
        listed=False,
    ),
    "stopped-gpu": Fault(
        "GPU work that macOS aborts (too long, too much memory) raises no error, and its results are garbage; the "
        "sentinel stopped-gpu watches trainings for it",
        f"{PULLS}/193571",
        "<2.15",
        asked=True,
    ),
    "silent-indices": Fault(
        "ids and labels out of range raise no error: zeros are read, labels are left out, and the training goes on",
        f"{ISSUES}/144824",
        "<2.14",
        "index-range",
    ),
    "late-indices": Fault(
        "ids and labels out of range are an AcceleratorError that comes late and names no place",
        f"{PULLS}/187109",
        ">=2.14",
        "index-range",
    ),
    "atomic-order": Fault(
        "two runs with one seed differ in their last bits: where an index repeats (embedding's backward, scatter_add, "
        "index_put_) Metal adds in any order; in one under torch.use_deterministic_algorithms(True)",
        f"{ISSUES}/195404",
        guard="atomic-order",
    ),
    "dtype-copies": Fault(
        "copies to the CPU that also change the dtype overwrite their source or read beside it",
        f"{ISSUES}/189563",
        "<2.14",
        "dtype-copies",
    ),
    "wide-copies": Fault(
        "copies to the CPU that also make float64 or complex128 write nothing",
        f"{ISSUES}/197715",
        "==2.14.0",
        "dtype-copies",
    ),
    "row-bias": Fault(
        "F.linear forgets the bias for a single row on macOS 26",
        f"{ISSUES}/188438",
        "<2.14",
        "linear-bias",
        ">=26,<27",
        ("Apple M1",),
    ),
    # Older systems multiply by MPSGraph (Linear.mm asks for macOS 15).
    "many-rows-bias": Fault(
        "F.linear with a bias is wrong for more than 65,536 matrices: later ones are written over the first",
        f"{ISSUES}/189495",
        "<2.14",
        "linear-bias",
        ">=15",
    ),
    "huge-lookups": Fault(
        "looking up rows in a tensor of 2^31 or more elements gives zeros",
        f"{ISSUES}/188756",
        "<2.14",
        "huge-embedding",
        simulated=False,
    ),
    "huge-products": Fault(
        "batched matrix products of more than 2^32 elements are wrong, their gradients too",
        f"{ISSUES}/197636",
        guard="huge-products",
    ),
    "huge-cat": Fault(
        "torch.cat to more than 2^31 elements loses rows and writes over other tensors",
        f"{ISSUES}/189960",
        "<2.15",
        "huge-cat",
    ),
    "embedding-grad": Fault(
        "the backward pass of an embedding of 2^31 elements or more ends in an error",
        f"{OPERATIONS}/Embedding.mm",
        guard="embedding-grad",
    ),
    "conv-batch": Fault(
        "weights of 1-D and 2-D convolutions get wrong gradients of a batch of 65,536 or more",
        f"{ISSUES}/96225",
        guard="conv-batch",
    ),
    # 2.14 convolves volumes with Metal Performance Primitives (PR 188802); those of macOS 26.3 and later are right.
    "conv3d-layout": Fault(
        "3-D convolutions are wrong on macOS 26.0 to 26.2",
        f"{ISSUES}/197114",
        ">=2.14",
        "conv3d-layout",
        ">=26,<26.3",
    ),
    # 2.15 pads with kernels of its own (PR 195368, PR 196985); the wheel of 2.14.1 still has MPSGraph's.
    "large-pad": Fault(
        "F.pad of five dimensions or more loses large frames and volumes", f"{ISSUES}/194922", "<2.15", "large-pad"
    ),
    # From macOS 15 on MPSGraph writes by strides; 2.14 has a kernel of PyTorch's own.
    "index-add-gaps": Fault(
        "index_add_ leaves transposed tensors unchanged", f"{ISSUES}/176159", "<2.14", "index-add-gaps", "<15"
    ),
    # PR 196662 is not in the wheel of 2.14.1.
    "lerp-weight": Fault("torch.lerp misreads a weight of another dtype", f"{ISSUES}/196067", "<2.15", "lerp-weight"),
    # No guard: it would be a kernel in Python before each addition and multiplication, 2.5 µs a call.
    "scalar-views": Fault(
        "`on_mps * on_cpu[3]` uses on_cpu[0], without an error: write on_cpu[3].item()", f"{ISSUES}/187117", "<2.14"
    ),
    # Of 768 to 3,072 rows. macOS chooses between two kernels when a process first runs a graph: no fix in PyTorch.
    "slow-products": Fault(
        "products may run 2 to 3 times slower in 4 of 10 runs",
        f"{ISSUES}/182815",
        macos=">=26",
        chips=("Apple M5",),
        simulated=False,
    ),
    "graphs-of-26": Fault(
        "MPSGraph of macOS 26 gives other results than that of macOS 15 for some models (SAM2)",
        "https://github.com/actions/runner-images/issues/14380",
        "<2.14",
        macos=">=26",
        simulated=False,
    ),
    # From here on what ends in an error, in an abort of the process, or in a larger figure.
    "dtype-results": Fault(
        "sorting is always stable, the variance of complex numbers is complex, the nanmedian of a row of NaN is 0, the "
        "Cholesky factor of complex numbers is one of other numbers",
        "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/testing/_internal/common_mps.py",
        listed=False,
    ),
    "refusals": Fault(
        "Metal's kernels refuse what the CPU computes: pools of sizes that do not divide, products and tensors beyond "
        "INT_MAX, ConvTranspose3d in half precision, complex matrices in linalg, …",
        f"{ISSUES}/96056",
        listed=False,
    ),
    "mixed-layer-norm": Fault(
        "layer norms of float32 weights over half-precision input give garbage",
        f"{ISSUES}/190054",
        "<2.14",
        "mixed-dtypes",
    ),
    "mixed-norm-backward": Fault(
        "the backward pass of such a layer norm ends the program", f"{ISSUES}/190054", "<2.14", "mixed-dtypes"
    ),
    "vector-weight": Fault(
        "the backward pass of F.linear ends the program where the weight has one dimension",
        f"{ISSUES}/187988",
        "<2.14",
        "linear-shapes",
    ),
    "deep-linear": Fault(
        "the backward pass of F.linear ends the program where the input has five dimensions or more, two of size 1",
        f"{ISSUES}/187201",
        "<2.14",
        "linear-shapes",
        ">=27",
    ),
    "empty-linear": Fault("F.linear over no features ends the program", f"{ISSUES}/190050", "<2.14", macos=">=15"),
    "bfloat16-linear": Fault(
        "F.linear by a transposed bfloat16 weight ends the program",
        f"{ISSUES}/197796",
        "<2.14",
        macos=">=27",
        simulated=False,
    ),
    "heaps": Fault(
        "the driver counts heaps of 8, 32 and 1,024 MiB, full or not",
        "https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/mps/MPSAllocator.h",
        listed=False,
    ),
    "whole-buffers": Fault(
        "what is freed stays a buffer of its size, so the driver's figure grows with every new shape",
        f"{ISSUES}/132596",
        "<2.14",
        "shape-growth",
    ),
    "fallback-variable": Fault(
        "sets PYTORCH_ENABLE_MPS_FALLBACK after PyTorch has read it, so that it has no effect",
        "https://github.com/huggingface/accelerate/issues/3294",
        guard="the fallback",
        package="accelerate",
        simulated=False,
    ),
}

OLDEST = "2.13"
"""The oldest release of torch that is supported."""

SIMULATED = tuple(name for name, fault in FAULTS.items() if fault.simulated)

LIMITS = ("huge-products", "huge-cat", "embedding-grad")
"""The faults that begin at a number of elements which no test can hold in memory."""

ABORTS = ("mixed-norm-backward", "vector-weight", "deep-linear", "empty-linear")
"""Those that end the process, by SIGABRT, which no Python catches."""


def possible(*names: str) -> bool:
    """Whether this Mac's chip and macOS, with the installed torch, have one of these faults."""
    this, release = machine.present(), torch_release()
    return any(FAULTS[name].concerns(this.chip, this.macos, release) for name in names)


def here(*names: str) -> Choice[bool]:
    """The same with the reason, which names the Mac and torch."""
    import torch

    this = machine.present()
    has = possible(*names)
    where = f"torch {torch.__version__} on {this.chip} with macOS {this.macos}"
    return Choice(has, f"{where} {'has' if has else 'does not have'} the fault, by its upstream issue")


def end(names: Sequence[str]) -> str:
    """The release from which on none of these faults is there. Raises ValueError where one has not ended."""
    return max((FAULTS[name].releases.removeprefix("<") for name in names), key=numbers)


def cured_by(guard: str) -> tuple[str, ...]:
    """The faults that a guard cures, by name."""
    return tuple(name for name, fault in FAULTS.items() if fault.guard == guard)


def too_old(torch: str) -> str:
    """The sentence about a version of torch that is older than OLDEST; empty where it is not."""
    return "" if within(torch, f">={OLDEST}") else f"torch {torch} is older than {OLDEST}: wrong results are known"


def left_out() -> frozenset[str]:
    """The faults that HF_MPS_FAULTS switches off, as `-name,-name`. Raises UserError for a name that there is not."""
    return settings.switched_off("HF_MPS_FAULTS", "fault", SIMULATED)
