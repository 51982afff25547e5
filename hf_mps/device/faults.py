"""What some Macs' Metal does wrong: faults by name, with the chips, systems and releases of PyTorch that have them.

The simulated device has those of the Mac that it stands for (`hf_mps.simulator.strictness`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from hf_mps.core import settings
from hf_mps.device import machine

ISSUES = "https://github.com/pytorch/pytorch/issues"
PRODUCTS = "https://github.com/pytorch/pytorch/blob/v2.14.1/aten/src/ATen/native/mps/operations/LinearAlgebra.mm"
FIRST_FAMILIES = ("Apple M1", "Apple M2")
"""The chips of Metal's GPU families Apple7 and Apple8."""


@dataclass(frozen=True)
class Fault:
    """What is wrong, in a sentence; `releases` and `macos` are specifiers, `chips` the beginnings of chips' names."""

    what: str
    issue: str
    releases: str
    chips: tuple[str, ...] = ("Apple",)
    macos: str = ""
    asked: bool = False
    """On only where a program asks for it: it is true of every Mac, and too dear to be on in each test."""

    def concerns(self, chip: str, macos: str, release: str) -> bool:
        """Whether a Mac with this chip and macOS has it with this release of torch."""
        from packaging.specifiers import SpecifierSet

        return (
            chip.startswith(self.chips) and macos in SpecifierSet(self.macos) and release in SpecifierSet(self.releases)
        )


_RIGHT = "!=26.4.*,!=26.5.*,!=26.6.*"

FAULTS: dict[str, Fault] = {
    "causal-leak": Fault(
        "causal attention without gradients in half precision lets three of four queries see later keys",
        f"{ISSUES}/195910",
        "<2.13",
    ),
    "permuted-attention": Fault(
        "attention without gradients of at most 8 queries misreads permuted tensors of more than one row",
        f"{ISSUES}/181133",
        "<2.12",
    ),
    "long-keys": Fault(
        "attention without gradients over 1,024 keys or more corrupts its sums in half precision",
        f"{ISSUES}/174861",
        ">=2.8,<2.11",
    ),
    "odd-keys": Fault(
        "attention without gradients of at most 8 queries reads beyond keys that are no multiple of 32",
        "https://github.com/pytorch/pytorch/pull/169222",
        "<2.10",
    ),
    "masked-rows": Fault(
        "attention without gradients is NaN for a query that may attend to nothing",
        f"{ISSUES}/156707",
        "<2.9",
    ),
    # From macOS 15 on MPSGraph reads and writes by strides. 2.14.1 still hands it tanh, threshold, softplus and prelu.
    "permuted-activations": Fault(
        "the backward passes of tanh, sigmoid, silu, … and of batch norm misread permuted and channels_last tensors",
        f"{ISSUES}/175189",
        "<2.15",
        macos="<15",
    ),
    "permuted-results": Fault(
        "softplus, threshold and prelu never write a result that is permuted or in channels_last",
        f"{ISSUES}/131736",
        "<2.15",
        macos="<15",
    ),
    "permuted-batch-norm": Fault(
        "the backward pass of batch norm refuses permuted and channels_last tensors",
        f"{ISSUES}/175189",
        "<2.14",
        macos=">=26",
    ),
    "value-width": Fault(
        "attention without gradients is as wide as its queries where its values are of another width",
        f"{ISSUES}/176767",
        "<2.12",
    ),
    "lstm-dropout": Fault(
        "an LSTM of several layers computes its gradients as if there had been no dropout between them",
        f"{ISSUES}/190056",
        "<2.14",
    ),
    "lstm-mask": Fault(
        "an LSTM of several layers drops at each call what it dropped at the first, in evaluation too",
        "https://github.com/pytorch/pytorch/pull/185351",
        "<2.13",
    ),
    "cuda-graphs": Fault(
        "torch.compile with CUDA graphs (modes reduce-overhead, max-autotune) ends the process on deep float16 models",
        f"{ISSUES}/188970",
        ">=2.13,<2.14",
    ),
    "large-k": Fault(
        "a matrix product that sums over more than 32,766 values also sums what lies behind its operands",
        f"{ISSUES}/193487",
        ">=2.7,<2.14",
        FIRST_FAMILIES,
    ),
    "large-k-batched": Fault(
        "a batched matrix product that sums over more than 32,766 values does so too",
        f"{ISSUES}/195163",
        ">=2.7",
        FIRST_FAMILIES,
    ),
    # Before macOS 15 what has an offset or gaps is computed into a temporary; MPSGraph mis-writes gaps up to macOS 15.
    # 2.14 writes such results of mm, addmm and bmm by kernels of its own; baddbmm asks for neither, in 2.15.0 too.
    "sliced-products": Fault(
        "mm, addmm and bmm never write a result whose tensor has a storage offset or gaps",
        "https://github.com/pytorch/pytorch/pull/193385",
        "<2.14",
        macos="<15",
    ),
    "sliced-baddbmm": Fault("baddbmm does so too", PRODUCTS, ">=2.8", macos="<15"),
    "gapped-products": Fault(
        "mm, addmm and bmm write beside their place where the result's tensor has gaps",
        f"{ISSUES}/104832",
        "<2.14",
        macos=">=15,<26",
    ),
    "gapped-baddbmm": Fault("baddbmm does so too", PRODUCTS, ">=2.8", macos=">=15,<26"),
    # MPSGraph's own, from macOS 15.0 to 26.3 and in 27. PyTorch's copy of such operands, in mm alone, ends with 26.4.
    "expanded-mm": Fault("mm of an expanded tensor computes every 16th row", f"{ISSUES}/180201", ">=2.8", macos=">=27"),
    "expanded-operands": Fault("addmm does so too", f"{ISSUES}/180201", ">=2.8", macos=f">=15,{_RIGHT}"),
    "expanded-gradient": Fault(
        "linear's backward computes every 16th row of the input's gradient where the gradient that arrives is expanded",
        f"{ISSUES}/180201",
        "<2.14",
        macos=f">=15,{_RIGHT}",
    ),
    "late-copies": Fault(
        "a copy that nobody waits for reads its source, or is there, only when the device comes to it",
        f"{ISSUES}/140296",
        ">=2.0",
    ),
    "queued-work": Fault(
        "operators, too, are computed only when somebody waits for the device",
        f"{ISSUES}/140296",
        ">=2.0",
        asked=True,
    ),
    "stopped-gpu": Fault(
        "macOS aborts work that runs too long or needs too much memory, and whoever waits goes on as if it were done",
        "https://github.com/pytorch/pytorch/pull/193571",
        "<2.15",
        asked=True,
    ),
    "freed-sources": Fault(
        "a copy that nobody waits for does not keep its source: it reads what lies there once that was freed",
        "https://github.com/pytorch/pytorch/pull/181017",
        "<2.13",
    ),
    "silent-indices": Fault(
        "an index out of range reads zeros or writes nowhere, a label out of range adds nothing to the loss",
        f"{ISSUES}/144824",
        "<2.14",
    ),
    "late-indices": Fault(
        "an index out of range is an error only when somebody waits for the device, and one that names no place",
        "https://github.com/pytorch/pytorch/pull/187109",
        ">=2.14",
    ),
    # Embedding's backward and scatter_add since 2.13, index_add since 2.14, indexing and upsampling in all of these.
    "atomic-order": Fault(
        "threads add to one sum, or write to one place, in any order: embedding's backward, index_put_, scatter_add, …",
        f"{ISSUES}/195404",
        ">=2.8",
    ),
    "dtype-copies": Fault(
        "a copy to the CPU that also changes the dtype overwrites its source, or reads beside it",
        f"{ISSUES}/189563",
        "<2.14",
    ),
    "wide-copies": Fault(
        "a copy to the CPU that also makes float64 or complex128 writes nothing",
        f"{ISSUES}/197715",
        "==2.14.0",
    ),
    "row-bias": Fault(
        "a linear layer forgets its bias where its input is one row",
        f"{ISSUES}/188438",
        "<2.14",
        ("Apple M1",),
        ">=26,<27",
    ),
    "many-rows-bias": Fault(
        "a linear layer with a bias writes the matrices from the 65,537th on over the first ones",
        f"{ISSUES}/189495",
        ">=2.12,<2.14",
        macos=">=15",
    ),
    "half-unscale": Fault(
        "GradScaler's kernel reads two bytes of its factor for half-precision gradients, which are zero",
        "https://github.com/pytorch/pytorch/pull/184286",
        ">=2.8,<2.13",
    ),
    "huge-products": Fault(
        "a batched product of more than 2^32 elements takes permuted inputs as they lie and misreads large ones",
        f"{ISSUES}/197636",
        ">=2.4",
    ),
    "huge-cat": Fault(
        "torch.cat never writes what lies beyond 2^31 elements",
        f"{ISSUES}/189960",
        ">=2.10,<2.15",
    ),
    "embedding-grad": Fault(
        "the gradient of an embedding of 2^31 elements or more is refused",
        "https://github.com/pytorch/pytorch/blob/v2.14.1/aten/src/ATen/native/mps/operations/Embedding.mm",
        ">=2.13",
    ),
    "conv-batch": Fault(
        "the gradient of a 1-D or 2-D convolution's weight counts a batch in 16 bits",
        f"{ISSUES}/96225",
        ">=2.0",
    ),
    "conv3d-layout": Fault(
        "a 3-D convolution of a volume whose channels do not lie last reads other values",
        f"{ISSUES}/197114",
        ">=2.14",
        macos=">=26,<26.3",
    ),
    "large-pad": Fault("F.pad of large tensors of five dimensions or more loses them", f"{ISSUES}/194922", "<2.15"),
    # From macOS 15 on MPSGraph writes by strides; 2.14 has a kernel of PyTorch's own.
    "index-add-gaps": Fault("index_add_ leaves tensors with gaps unchanged", f"{ISSUES}/176159", "<2.14", macos="<15"),
    "lerp-weight": Fault("lerp misreads a weight of another dtype", f"{ISSUES}/196067", ">=2.12,<2.15"),
    "scalar-views": Fault("`on_mps * on_cpu[3]` uses on_cpu[0]", f"{ISSUES}/187117", ">=2.8,<2.14"),
    # From here on what ends in an error, in an abort of the process, or in a larger figure.
    "dtype-results": Fault(
        "sorting is always stable, the variance of complex numbers is complex, the nanmedian of a row of NaN is 0, the "
        "Cholesky factor of complex numbers is one of other numbers",
        "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/testing/_internal/common_mps.py",
        ">=2.13",
    ),
    "refusals": Fault(
        "Metal's kernels refuse what the CPU computes: pools of sizes that do not divide, products and tensors beyond "
        "INT_MAX, ConvTranspose3d in half precision, complex matrices in linalg, …",
        f"{ISSUES}/96056",
        ">=2.8",
    ),
    "mixed-layer-norm": Fault(
        "a layer norm of float32 weights over a half-precision input reads them as if they had its dtype",
        f"{ISSUES}/190054",
        "<2.14",
    ),
    "mixed-norm-backward": Fault("its backward pass aborts", f"{ISSUES}/190054", "<2.14"),
    # #177093 moved it from MPSGraph to a kernel of PyTorch's own, which misreads such a weight: "lerp-weight".
    "mixed-lerp": Fault(
        "lerp aborts where its weight is one number of another dtype",
        "https://github.com/karpathy/nanochat/pull/741",
        "<2.12",
    ),
    "vector-weight": Fault(
        "the backward pass of F.linear with a weight of one dimension aborts",
        f"{ISSUES}/187988",
        "<2.14",
    ),
    "deep-linear": Fault(
        "the backward pass of F.linear over five dimensions or more aborts where two of them are 1",
        f"{ISSUES}/187201",
        "<2.14",
        macos=">=27",
    ),
    "empty-linear": Fault(
        "F.linear over no features aborts",
        f"{ISSUES}/190050",
        "<2.14",
        macos=">=15",
    ),
    "squeezed-entropy": Fault(
        "the backward pass of binary_cross_entropy without reduction aborts where a dimension is 1",
        f"{ISSUES}/166746",
        "<2.10",
    ),
    "large-scores": Fault(
        "attention without gradients aborts where its scores need more than 4 GiB",
        f"{ISSUES}/149261",
        "<2.13",
    ),
    "heaps": Fault(
        "the driver counts heaps of 8, 32 and 1,024 MiB, full or not",
        "https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/mps/MPSAllocator.h",
        ">=2.8",
    ),
    "whole-buffers": Fault(
        "what is freed stays a buffer of its size, so the driver's figure grows with every new shape",
        f"{ISSUES}/132596",
        "<2.14",
    ),
}

LIMITS = ("huge-products", "huge-cat", "embedding-grad")
"""The faults that begin at a number of elements which no test can hold in memory."""


ABORTS = (
    "mixed-norm-backward",
    "mixed-lerp",
    "vector-weight",
    "deep-linear",
    "empty-linear",
    "squeezed-entropy",
    "large-scores",
)
"""Those that end the process, by SIGABRT, which no Python catches."""


def possible(*names: str) -> bool:
    """Whether this Mac's chip and macOS, with the installed torch, have one of these faults."""
    this, torch = machine.present(), release()
    return any(_concerns(name, this.chip, this.macos or "0", torch) for name in names)


@cache  # several guards' kernels ask of one fault, at each `import torch`
def _concerns(name: str, chip: str, macos: str, release: str) -> bool:
    return FAULTS[name].concerns(chip, macos, release)


def release() -> str:
    """The installed torch's version by its numbers alone: 2.13.0 of 2.13.0+cpu and of 2.13.0a0."""
    import torch
    from packaging.version import Version

    return Version(torch.__version__).base_version


def left_out() -> frozenset[str]:
    """The faults that HF_MPS_FAULTS switches off, as `-name,-name`. Raises UserError for a name that there is not."""
    return settings.switched_off("HF_MPS_FAULTS", "fault", tuple(FAULTS))
