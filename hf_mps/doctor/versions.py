"""The stack's versions, what they need of each other, and the problems known for exactly these versions."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hf_mps.device import machine
from hf_mps.doctor.finding import Finding, note, ok, problem

OPTIONAL = ("lightning", "peft", "trl", "sentence-transformers", "safetensors", "tokenizers", "huggingface-hub")
ISSUES = "https://github.com/pytorch/pytorch/issues"


@dataclass(frozen=True)
class Known:
    """A problem of some versions of a package on Metal; `macos` is the oldest macOS that has it, `chips` its GPUs."""

    package: str
    versions: str
    says: str
    link: str
    guard: str = ""
    macos: int = 0
    chips: tuple[str, ...] = ()


# Read in the threads behind the links; what a guard of ours already cures is a note, the others are problems.
KNOWN = (
    Known(
        "torch",
        ">=2.8,<2.9",
        "F.linear is wrong on non-contiguous tensors",
        f"{ISSUES}/161640",
        guard="non-contiguous",
    ),
    Known(
        "torch",
        ">=2.8,<2.13",
        "fused Adam, AdamW and SGD apply the steps that fp16's GradScaler wants skipped",
        f"{ISSUES}/186360",
        guard="fp16-fused-adam",
    ),
    Known(
        "torch",
        "<2.13",
        "torch.compile gives wrong LayerNorm results",
        f"{ISSUES}/191976",
    ),
    Known(
        "torch",
        ">=2.7,<2.14",
        "matrix products that sum over more than 32,766 values are wrong (below a large vocabulary, of large batches)",
        f"{ISSUES}/193487",
        guard="large-k",
        chips=("Apple M1", "Apple M2"),
    ),
    Known(
        "torch",
        "<2.13",
        "causal attention without gradients (evaluation, generation) lets float16 and bfloat16 see later tokens",
        f"{ISSUES}/195910",
        guard="attention-no-grad",
    ),
    Known(
        "torch",
        "<2.12",
        "attention without gradients misreads permuted tensors of at most 8 queries",
        f"{ISSUES}/181133",
        guard="attention-no-grad",
    ),
    Known(
        "torch",
        "<2.12",
        "attention without gradients has the wrong width where values are narrower than keys",
        f"{ISSUES}/176767",
        guard="attention-no-grad",
    ),
    Known(
        "torch",
        ">=2.8,<2.11",
        "attention without gradients over 1,024 keys or more is corrupted in float16 and bfloat16",
        f"{ISSUES}/174861",
        guard="attention-no-grad",
    ),
    Known(
        "torch",
        "<2.9",
        "attention without gradients is NaN for queries that may attend to nothing (prompts padded on the left)",
        f"{ISSUES}/156707",
        guard="attention-no-grad",
    ),
    Known(
        "torch",
        "<2.12",
        "linear layers in float16 and bfloat16 give other results at each call, on input of more than two dimensions",
        f"{ISSUES}/180776",
        chips=("Apple M5",),
    ),
    Known(
        "torch",
        "<2.13",
        "linear layers in float16 and bfloat16 give other gradients at each call, on input of more than two dimensions",
        f"{ISSUES}/181936",
        chips=("Apple M5",),
    ),
    Known(
        "torch",
        ">=2.8,<2.14",
        "ids and labels out of range raise no error: zeros are read and the training goes on",
        f"{ISSUES}/144824",
        guard="index-range",
    ),
    Known(
        "torch",
        ">=2.8,<2.14",
        "copies to the CPU that also change the dtype overwrite their source or read beside it",
        f"{ISSUES}/189563",
        guard="dtype-copies",
    ),
    Known(
        "torch",
        "==2.14.0",
        "copies to the CPU that also make float64 write nothing",
        f"{ISSUES}/197715",
        guard="dtype-copies",
    ),
    Known(
        "torch",
        ">=2.9,<2.14",
        "F.linear forgets the bias for a single row on macOS 26",
        f"{ISSUES}/188438",
        guard="linear-bias",
        macos=26,
        chips=("Apple M1",),
    ),
    Known(
        "torch",
        ">=2.12,<2.14",
        "F.linear with a bias is wrong for more than 65,536 matrices",
        f"{ISSUES}/189495",
        guard="linear-bias",
        macos=15,
    ),
    Known(
        "torch",
        ">=2.8,<2.14",
        "MPSGraph of macOS 26 gives other results than that of macOS 15 for some models (SAM2)",
        "https://github.com/actions/runner-images/issues/14380",
        macos=26,
    ),
    Known(
        "accelerate",
        ">=0",
        "sets PYTORCH_ENABLE_MPS_FALLBACK after PyTorch has read it, so that it has no effect",
        "https://github.com/huggingface/accelerate/issues/3294",
        guard="the fallback",
    ),
)


def examine() -> list[Finding]:
    """Every package of the stack with its version; what does not fit; the known problems of these versions."""
    needed = [Requirement(line) for line in metadata.requires("hf-mps") or ()]
    wanted = {each.name: each for each in needed if each.marker is None}
    found = [_installed(name, wanted.get(name)) for name in (*wanted, *OPTIONAL)]
    return [each for each in found if each is not None] + _known()


def _installed(name: str, wanted: Requirement | None) -> Finding | None:
    version = _version(name)
    if version is None:
        return problem(name, "not installed", f"pip install '{wanted}'") if wanted else None
    if wanted and not wanted.specifier.contains(version, prereleases=True):
        return problem(name, f"{version}; hf_mps needs {wanted.specifier}", f"pip install --upgrade '{wanted}'")
    return ok(name, version)


def _known() -> list[Finding]:
    here = machine.present()
    found = []
    for each in KNOWN:
        version = _version(each.package)
        if version is None or not SpecifierSet(each.versions).contains(version, prereleases=True):
            continue
        if each.macos and not here.macos_at_least(each.macos):
            continue
        if each.chips and not here.chip.startswith(each.chips):
            continue
        says = f"{each.package} {version}: {each.says}"
        cured = f" (cured here by {each.guard})" if each.guard else ""
        found.append(note("known problem", says + cured, each.link))
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
