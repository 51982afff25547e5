"""The problems of single releases on Metal, as their own threads and release notes have them; read up to torch 2.15."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from hf_mps.device import machine
from hf_mps.device.faults import FAULTS, FIRST_FAMILIES, ISSUES, PRODUCTS

PULLS = "https://github.com/pytorch/pytorch/pull"
EMBEDDING = "https://github.com/pytorch/pytorch/blob/v2.14.1/aten/src/ATen/native/mps/operations/Embedding.mm"


@dataclass(frozen=True)
class KnownFault:
    """A problem of some versions of a package on Metal; `versions` and `macos` are specifiers, `chips` its GPUs' names.

    `guard` names what cures it here, if anything does.
    """

    package: str
    versions: str
    says: str
    link: str
    guard: str = ""
    macos: str = ""
    chips: tuple[str, ...] = ("Apple",)

    def concerns(self, version: str, chip: str, macos: str | None) -> bool:
        """Whether this version of the package has it, on a Mac with that chip and macOS."""
        from packaging.specifiers import SpecifierSet

        if not SpecifierSet(self.versions).contains(version, prereleases=True) or not chip.startswith(self.chips):
            return False
        return not self.macos or (macos is not None and macos in SpecifierSet(self.macos))


def _torch(
    versions: str,
    number: int,
    says: str,
    guard: str = "",
    *,
    macos: str = "",
    chips: tuple[str, ...] = ("Apple",),
    links: str = ISSUES,
) -> KnownFault:
    return KnownFault("torch", versions, says, f"{links}/{number}", guard, macos, chips)


# What a guard of ours cures is a note all the same: it says which release needs no cure. Not listed, because the wheel
# of torch 2.13 has the fixes: random numbers in place that leave tensors with gaps unchanged (PR 165267), and
# float16 products of sliced matrices with up to 16 rows or columns that end the program (#178056).
KNOWN = (
    _torch(">=2.8,<2.9", 161640, "F.linear is wrong on non-contiguous tensors", "non-contiguous"),
    _torch("<2.14", 192212, "convolutions are wrong with non-contiguous weights", "non-contiguous"),
    _torch(
        "<2.13",
        186360,
        "fused Adam, AdamW and SGD apply the steps that fp16's GradScaler wants skipped",
        "fp16-fused-adam",
        links=PULLS,
    ),
    _torch(
        "<2.13",
        184286,
        "GradScaler sets float16 and bfloat16 gradients to zero (of half-precision parameters)",
        "half-unscale",
        links=PULLS,
    ),
    _torch(
        "<2.13", 183825, "LayerNorm's weights get wrong gradients behind a frozen part of the model", "layernorm-frozen"
    ),
    _torch(
        "<2.14",
        190056,
        "the gradients of an LSTM of two or more layers are computed as if there were no dropout",
        "lstm-dropout",
    ),
    _torch("<2.14", 190054, "layer norms of float32 weights over half-precision input give garbage", "mixed-dtypes"),
    _torch(">=2.12,<2.15", 196067, "torch.lerp misreads a weight of another dtype", "lerp-weight"),
    # No guard: it would be a kernel in Python before each addition and multiplication, 2.5 µs a call.
    _torch(">=2.8,<2.14", 187117, "`on_mps * on_cpu[3]` uses on_cpu[0], without an error: write on_cpu[3].item()"),
    _torch(
        ">=2.8",
        127676,
        "gradient checkpointing replays other random numbers: wrong gradients with dropout",
        "checkpoint-rng",
    ),
    _torch(
        ">=2.8",
        189690,
        "copies with non_blocking=True to the CPU are read before they are there (up to 2.12 those to the device too)",
        "non-blocking",
    ),
    _torch(
        "<2.15",
        193571,
        "GPU work that macOS aborts (too long, too much memory) raises no error, and its results are garbage;"
        " the sentinel stopped-gpu watches trainings for it",
        links=PULLS,
    ),
    _torch("<2.10", 161905, "torch.compile cannot compile the backward pass of a ResNet"),
    # Inductor's codegen/mps.py up to 2.10: a loop in a loop for each of two dimensions that are summed over.
    _torch("<2.11", 170360, "torch.compile gives sums of broadcast tensors twice as large"),
    _torch("<2.13", 191976, "torch.compile gives wrong LayerNorm results"),
    _torch(
        "==2.13.*",
        192551,
        "torch.compile forces channels_last on convolutions, which trains four to nine times slower",
        "compile",
    ),
    _torch(
        "==2.13.*",
        188970,
        "torch.compile ends the process on deep float16 models in its modes reduce-overhead and max-autotune",
        "cuda-graphs",
    ),
    _torch(
        ">=2.7,<2.14",
        193487,
        "matrix products that sum over more than 32,766 values are wrong (below a large vocabulary, of large batches)",
        "large-k",
        chips=FIRST_FAMILIES,
    ),
    _torch(
        ">=2.7",
        195163,
        "batched matrix products that sum over more than 32,766 values are wrong",
        "large-k",
        chips=FIRST_FAMILIES,
    ),
    _torch("<2.14", 188756, "looking up rows in a tensor of 2^31 or more elements gives zeros", "huge-embedding"),
    _torch(
        ">=2.8",
        197636,
        "batched matrix products of more than 2^32 elements are wrong, their gradients too",
        "huge-products",
    ),
    _torch(
        ">=2.8",
        195404,
        "two runs with one seed differ in their last bits: where an index repeats (embedding's backward, scatter_add, "
        "index_put_) Metal adds in any order; in one under torch.use_deterministic_algorithms(True)",
        "atomic-order",
    ),
    _torch(
        ">=2.10,<2.15",
        189960,
        "torch.cat to more than 2^31 elements loses rows and writes over other tensors",
        "huge-cat",
    ),
    KnownFault(
        "torch",
        ">=2.13",
        "the backward pass of an embedding of 2^31 elements or more ends in an error",
        EMBEDDING,
        "embedding-grad",
    ),
    _torch(
        ">=2.8",
        96225,
        "weights of 1-D and 2-D convolutions get wrong gradients of a batch of 65,536 or more",
        "conv-batch",
    ),
    _torch("<2.15", 194922, "F.pad of five dimensions or more loses large frames and volumes", "large-pad"),
    _torch("<2.14", 176159, "index_add_ leaves transposed tensors unchanged", "index-add-gaps", macos="<15"),
    _torch(">=2.14", 197114, "3-D convolutions are wrong on macOS 26.0 to 26.2", "conv3d-layout", macos=">=26,<26.3"),
    # MPSGraph's sum, which wheels up to 2.12.1 have; that of 2.13.0 brings its own (pull request #180709). Nobody knows
    # what sets the fault off, so no guard can do anything about it.
    _torch("<2.13", 178497, "sums and means are wrong, rarely, when they are asked for in rapid succession"),
    _torch(
        "<2.10",
        166746,
        "binary_cross_entropy of probabilities ends the program or has wrong gradients where a dimension has size 1",
    ),
    _torch(">=2.9,<2.11", 171602, "grid_sample of volumes is wrong with a grid that is not contiguous"),
    _torch("<2.13", 185663, "fold (col2im) is wrong for more than 2^32 values"),
    _torch(
        "<2.13",
        195910,
        "causal attention without gradients (evaluation, generation) lets float16 and bfloat16 see later tokens",
        "attention-no-grad",
    ),
    _torch(
        "<2.12",
        181133,
        "attention without gradients misreads permuted tensors of at most 8 queries",
        "attention-no-grad",
    ),
    _torch(
        "<2.12",
        176767,
        "attention without gradients has the wrong width where values are narrower than keys",
        "attention-no-grad",
    ),
    _torch(
        ">=2.8,<2.11",
        174861,
        "attention without gradients over 1,024 keys or more is corrupted in float16 and bfloat16",
        "attention-no-grad",
    ),
    _torch(
        "<2.9",
        156707,
        "attention without gradients is NaN for queries that may attend to nothing (prompts padded on the left)",
        "attention-no-grad",
    ),
    _torch(
        "==2.13.*",
        191794,
        "attention without gradients over a whole prompt is corrupted on macOS 26",
        "attention-no-grad",
        macos=">=26",
        links=PULLS,
    ),
    _torch(
        "<2.15",
        175189,
        "activations, and gradients of more and of batch norm, are wrong on permuted and channels_last tensors",
        "permuted-activations",
        macos="<15",
    ),
    _torch(
        "<2.12",
        180776,
        "linear layers in float16 and bfloat16 give other results at each call, on input of more than two dimensions",
        chips=("Apple M5",),
    ),
    _torch(
        "<2.13",
        181936,
        "linear layers in float16 and bfloat16 give other gradients at each call, on input of more than two dimensions",
        chips=("Apple M5",),
    ),
    _torch(
        "<2.14",
        187201,
        "the backward pass of a linear layer ends the program where its input has five dimensions or more",
        "linear-shapes",
        macos=">=27",
    ),
    _torch("<2.14", 197796, "F.linear by a transposed bfloat16 weight ends the program", macos=">=27"),
    # Of 768 to 3,072 rows. macOS chooses between two kernels when a process first runs a graph: no fix in PyTorch.
    _torch(">=2.8", 182815, "products may run 2 to 3 times slower in 4 of 10 runs", macos=">=26", chips=("Apple M5",)),
    _torch(
        "<2.14",
        187988,
        "the backward pass of F.linear ends the program where the weight has one dimension",
        "linear-shapes",
    ),
    _torch(
        "<2.14",
        144824,
        "ids and labels out of range raise no error: zeros are read and the training goes on",
        "index-range",
    ),
    _torch(
        ">=2.14",
        187109,
        "ids and labels out of range are an AcceleratorError that comes late and names no place",
        "index-range",
        links=PULLS,
    ),
    _torch(
        "<2.14",
        189563,
        "copies to the CPU that also change the dtype overwrite their source or read beside it",
        "dtype-copies",
    ),
    _torch("==2.14.0", 197715, "copies to the CPU that also make float64 write nothing", "dtype-copies"),
    _torch(
        "<2.14",
        193385,
        "matrix products into a slice, or a part of each row, are never written",
        "sliced-products",
        macos="<15",
        links=PULLS,
    ),
    _torch(
        "<2.14",
        104832,
        "matrix products into a part of each row are written beside their place",
        "sliced-products",
        macos=">=15,<26",
    ),
    KnownFault(
        "torch",
        ">=2.8",
        "baddbmm into a slice is never written",
        PRODUCTS,
        "sliced-products",
        "<15",
    ),
    KnownFault(
        "torch",
        ">=2.8",
        "baddbmm into a part of each row is written beside its place",
        PRODUCTS,
        "sliced-products",
        ">=15,<26",
    ),
    _torch(
        ">=2.8",
        180201,
        "matrix products of an expanded tensor, as the gradient of a sum is, compute every 16th row alone",
        "expanded-operands",
        macos=FAULTS["expanded-operands"].macos,
    ),
    _torch(
        "<2.14",
        188438,
        "F.linear forgets the bias for a single row on macOS 26",
        "linear-bias",
        macos=">=26,<27",
        chips=("Apple M1",),
    ),
    _torch(
        ">=2.12,<2.14",
        189495,
        "F.linear with a bias is wrong for more than 65,536 matrices",
        "linear-bias",
        macos=">=15",
    ),
    KnownFault(
        "torch",
        ">=2.8,<2.14",
        "MPSGraph of macOS 26 gives other results than that of macOS 15 for some models (SAM2)",
        "https://github.com/actions/runner-images/issues/14380",
        macos=">=26",
    ),
    KnownFault(
        "accelerate",
        ">=0",
        "sets PYTORCH_ENABLE_MPS_FALLBACK after PyTorch has read it, so that it has no effect",
        "https://github.com/huggingface/accelerate/issues/3294",
        "the fallback",
    ),
)


def here() -> list[tuple[KnownFault, str]]:
    """The known faults of the installed versions on this machine, each with its package's version."""
    this = machine.present()
    chip = this.chip if this.mac else "Apple"
    faults = [(fault, version(fault.package)) for fault in KNOWN if fault.package != "torch" or this.mac]
    return [(fault, text) for fault, text in faults if text is not None and fault.concerns(text, chip, this.macos)]


def listed(guard: str) -> bool:
    """Whether the installed torch is known to have the fault that `guard` cures, on this machine."""
    import torch

    this, release = machine.present(), str(torch.__version__)
    return any(
        fault.guard == guard and fault.concerns(release, this.chip, this.macos)
        for fault in KNOWN
        if fault.package == "torch"
    )


def version(package: str) -> str | None:
    """The installed version of a package, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
