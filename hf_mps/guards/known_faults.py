"""The problems of single releases on Metal, as their own threads and release notes have them; read up to torch 2.15."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from hf_mps.device import machine
from hf_mps.device.faults import FIRST_FAMILIES, ISSUES

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


# What a guard of ours cures is a note all the same: it says which release needs no cure.
KNOWN = (
    KnownFault(
        "torch", ">=2.8,<2.9", "F.linear is wrong on non-contiguous tensors", f"{ISSUES}/161640", guard="non-contiguous"
    ),
    KnownFault(
        "torch",
        "<2.14",
        "convolutions are wrong with non-contiguous weights",
        f"{ISSUES}/192212",
        guard="non-contiguous",
    ),
    KnownFault(
        "torch",
        "<2.13",
        "fused Adam, AdamW and SGD apply the steps that fp16's GradScaler wants skipped",
        f"{PULLS}/186360",
        guard="fp16-fused-adam",
    ),
    KnownFault(
        "torch",
        "<2.13",
        "GradScaler sets float16 and bfloat16 gradients to zero (of half-precision parameters)",
        f"{PULLS}/184286",
        guard="half-unscale",
    ),
    KnownFault(
        "torch",
        "<2.13",
        "LayerNorm's weights get wrong gradients behind a frozen part of the model",
        f"{ISSUES}/183825",
        guard="layernorm-frozen",
    ),
    KnownFault(
        "torch",
        "<2.14",
        "the gradients of an LSTM of two or more layers are computed as if there were no dropout",
        f"{ISSUES}/190056",
        guard="lstm-dropout",
    ),
    KnownFault(
        "torch",
        "<2.14",
        "layer norms of float32 weights over half-precision input give garbage",
        f"{ISSUES}/190054",
        guard="mixed-dtypes",
    ),
    KnownFault(
        "torch",
        ">=2.8",
        "gradient checkpointing replays other random numbers: wrong gradients with dropout",
        f"{ISSUES}/127676",
        guard="checkpoint-rng",
    ),
    KnownFault(
        "torch",
        ">=2.8",
        "copies with non_blocking=True to the CPU are read before they are there (up to 2.12 those to the device too)",
        f"{ISSUES}/189690",
        guard="non-blocking",
    ),
    KnownFault("torch", "<2.10", "torch.compile cannot compile the backward pass of a ResNet", f"{ISSUES}/161905"),
    # Inductor's codegen/mps.py up to 2.10: a loop in a loop for each of two dimensions that are summed over.
    KnownFault("torch", "<2.11", "torch.compile gives sums of broadcast tensors twice as large", f"{ISSUES}/170360"),
    KnownFault("torch", "<2.13", "torch.compile gives wrong LayerNorm results", f"{ISSUES}/191976"),
    KnownFault(
        "torch",
        "==2.13.*",
        "torch.compile forces channels_last on convolutions, which trains four to nine times slower",
        f"{ISSUES}/192551",
        guard="compile",
    ),
    KnownFault(
        "torch",
        "==2.13.*",
        "torch.compile ends the process on deep float16 models in its modes reduce-overhead and max-autotune",
        f"{ISSUES}/188970",
        guard="cuda-graphs",
    ),
    KnownFault(
        "torch",
        ">=2.7,<2.14",
        "matrix products that sum over more than 32,766 values are wrong (below a large vocabulary, of large batches)",
        f"{ISSUES}/193487",
        guard="large-k",
        chips=FIRST_FAMILIES,
    ),
    KnownFault(
        "torch",
        ">=2.7",
        "batched matrix products that sum over more than 32,766 values are wrong",
        f"{ISSUES}/195163",
        guard="large-k",
        chips=FIRST_FAMILIES,
    ),
    KnownFault(
        "torch",
        "<2.14",
        "looking up rows in a tensor of 2^31 or more elements gives zeros",
        f"{ISSUES}/188756",
        guard="huge-embedding",
    ),
    KnownFault(
        "torch",
        ">=2.8",
        "batched matrix products of more than 2^32 elements are wrong, their gradients too",
        f"{ISSUES}/197636",
        guard="huge-products",
    ),
    KnownFault(
        "torch",
        ">=2.8",
        "two runs with one seed differ in their last bits: where an index repeats (embedding's backward, scatter_add,"
        " index_put_) Metal adds in any order; in one under torch.use_deterministic_algorithms(True)",
        f"{ISSUES}/195404",
        guard="atomic-order",
    ),
    KnownFault(
        "torch",
        ">=2.10,<2.15",
        "torch.cat to more than 2^31 elements loses rows and writes over other tensors",
        f"{ISSUES}/189960",
        guard="huge-cat",
    ),
    KnownFault(
        "torch",
        ">=2.13",
        "the backward pass of an embedding of 2^31 elements or more ends in an error",
        EMBEDDING,
        guard="embedding-grad",
    ),
    KnownFault(
        "torch",
        ">=2.8",
        "weights of 1-D and 2-D convolutions get wrong gradients of a batch of 65,536 or more",
        f"{ISSUES}/96225",
        guard="conv-batch",
    ),
    KnownFault(
        "torch",
        ">=2.14",
        "3-D convolutions are wrong on macOS 26.0 to 26.2",
        f"{ISSUES}/197114",
        guard="conv3d-layout",
        macos=">=26,<26.3",
    ),
    # MPSGraph's sum, which wheels up to 2.12.1 have; that of 2.13.0 brings its own (pull request #180709). Nobody knows
    # what sets the fault off, so no guard can do anything about it.
    KnownFault(
        "torch",
        "<2.13",
        "sums and means are wrong, rarely, when they are asked for in rapid succession",
        f"{ISSUES}/178497",
    ),
    KnownFault(
        "torch",
        "<2.10",
        "binary_cross_entropy of probabilities ends the program or has wrong gradients where a dimension has size 1",
        f"{ISSUES}/166746",
    ),
    KnownFault(
        "torch", ">=2.9,<2.11", "grid_sample of volumes is wrong with a grid that is not contiguous", f"{ISSUES}/171602"
    ),
    KnownFault("torch", "<2.13", "fold (col2im) is wrong for more than 2^32 values", f"{ISSUES}/185663"),
    KnownFault(
        "torch",
        "<2.13",
        "causal attention without gradients (evaluation, generation) lets float16 and bfloat16 see later tokens",
        f"{ISSUES}/195910",
        guard="attention-no-grad",
    ),
    KnownFault(
        "torch",
        "<2.12",
        "attention without gradients misreads permuted tensors of at most 8 queries",
        f"{ISSUES}/181133",
        guard="attention-no-grad",
    ),
    KnownFault(
        "torch",
        "<2.12",
        "attention without gradients has the wrong width where values are narrower than keys",
        f"{ISSUES}/176767",
        guard="attention-no-grad",
    ),
    KnownFault(
        "torch",
        ">=2.8,<2.11",
        "attention without gradients over 1,024 keys or more is corrupted in float16 and bfloat16",
        f"{ISSUES}/174861",
        guard="attention-no-grad",
    ),
    KnownFault(
        "torch",
        "<2.9",
        "attention without gradients is NaN for queries that may attend to nothing (prompts padded on the left)",
        f"{ISSUES}/156707",
        guard="attention-no-grad",
    ),
    KnownFault(
        "torch",
        "==2.13.*",
        "attention without gradients over a whole prompt is corrupted on macOS 26",
        f"{PULLS}/191794",
        guard="attention-no-grad",
        macos=">=26",
    ),
    KnownFault(
        "torch",
        "<2.14",
        "gradients of activations and batch norm are wrong on permuted and channels_last tensors",
        f"{ISSUES}/175189",
        guard="permuted-activations",
        macos="<15",
    ),
    KnownFault(
        "torch",
        "<2.12",
        "linear layers in float16 and bfloat16 give other results at each call, on input of more than two dimensions",
        f"{ISSUES}/180776",
        chips=("Apple M5",),
    ),
    KnownFault(
        "torch",
        "<2.13",
        "linear layers in float16 and bfloat16 give other gradients at each call, on input of more than two dimensions",
        f"{ISSUES}/181936",
        chips=("Apple M5",),
    ),
    KnownFault(
        "torch",
        "<2.14",
        "the backward pass of a linear layer ends the program where its input has five dimensions or more",
        f"{ISSUES}/187201",
        guard="linear-shapes",
        macos=">=27",
    ),
    KnownFault(
        "torch",
        "<2.14",
        "the backward pass of F.linear ends the program where the weight has one dimension",
        f"{ISSUES}/187988",
        guard="linear-shapes",
    ),
    KnownFault(
        "torch",
        "<2.14",
        "ids and labels out of range raise no error: zeros are read and the training goes on",
        f"{ISSUES}/144824",
        guard="index-range",
    ),
    KnownFault(
        "torch",
        ">=2.14",
        "ids and labels out of range are an AcceleratorError that comes late and names no place",
        f"{PULLS}/187109",
        guard="index-range",
    ),
    KnownFault(
        "torch",
        "<2.14",
        "copies to the CPU that also change the dtype overwrite their source or read beside it",
        f"{ISSUES}/189563",
        guard="dtype-copies",
    ),
    KnownFault(
        "torch",
        "==2.14.0",
        "copies to the CPU that also make float64 write nothing",
        f"{ISSUES}/197715",
        guard="dtype-copies",
    ),
    KnownFault(
        "torch",
        "<2.14",
        "F.linear forgets the bias for a single row on macOS 26",
        f"{ISSUES}/188438",
        guard="linear-bias",
        macos=">=26,<27",
        chips=("Apple M1",),
    ),
    KnownFault(
        "torch",
        ">=2.12,<2.14",
        "F.linear with a bias is wrong for more than 65,536 matrices",
        f"{ISSUES}/189495",
        guard="linear-bias",
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
        guard="the fallback",
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
