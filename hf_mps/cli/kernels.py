"""`hf-mps kernels`: fetch, list, show and remove PyTorch's own Metal kernels; it imports no torch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from hf_mps.cli.options import Json, deferred
from hf_mps.core.errors import UserError
from hf_mps.core.text import aligned, memory

kernels = typer.Typer(no_args_is_help=True, help="PyTorch's own Metal kernels, for the simulated device.")


def _releases(incomplete: str) -> list[str]:
    """Return the fetched releases that begin so, for the shell's completion."""
    from hf_mps.metal.kernels import store

    return [release for release in store.releases() if release.startswith(incomplete)]


def _names(incomplete: str) -> list[str]:
    """Return the kernels of the default release that begin so, for the shell's completion."""
    from hf_mps.metal.kernels import store

    return [name for name in store.open_library(store.chosen(None)) if name.startswith(incomplete)]


Release = Annotated[
    str | None,
    Option(
        "--release",
        metavar="RELEASE",
        help="A fetched release. Default: the installed torch's, or the newest.",
        autocompletion=_releases,
    ),
]


@kernels.command("fetch")
@deferred
def fetch_kernels(
    releases: list[str] | None = Argument(
        None, metavar="[RELEASE]...", help="Releases, such as 2.13.0 or mlx. Default: the installed torch's."
    ),
    wheel: list[Path] | None = Option(
        None, metavar="PATH", help="A macOS arm64 wheel of PyTorch, for a machine without network."
    ),
) -> None:
    """Download the Metal kernels of a release of PyTorch or MLX into your cache.

    pip downloads the release's macOS wheel (about 110 MB), whose sha256 is compared with the package index; the kernels
    (80 MB) are kept, the wheel is not. A release that is there already is not fetched again. `mlx`, or `mlx-0.32.4`, is
    a release of MLX, for `torch.mps.load_metallib`.

    Example: `hf-mps kernels fetch 2.13.0`
    """
    from hf_mps.metal.kernels import fetch, store

    say = functools.partial(print, flush=True)
    if releases and wheel:
        raise UserError("a RELEASE cannot be combined with --wheel, which is a file; give one of them")
    for path in wheel or ():
        fetch.from_wheel(path, say)
    for release in releases or ([] if wheel else [store.installed() or store.EXAMPLE]):
        fetch.fetch(release, say)


@kernels.command("list")
@deferred
def list_kernels(
    family: str | None = Option(None, metavar="FAMILY", help="The kernels of one family, with their buffers."),
    release: Release = None,
    json: Json = False,
) -> None:
    """List the fetched releases, and one release's kernels by family, with their element types.

    Example: `hf-mps kernels list`
    """
    from hf_mps.metal.kernels import describe, store

    release = store.chosen(release)
    library = store.open_library(release)
    if family is not None:
        names = describe.of_family(library, family)
        if json:
            _print_json({"release": release, "family": family, "kernels": names})
            return
        print(*aligned([describe.in_short(library, name) for name in names], widest=100), sep="\n")
        return
    found, table = describe.releases(), describe.table(library)
    if json:
        _print_json({"releases": found, "release": release, "families": [family._asdict() for family in table]})
        return
    heads = (*describe.release_lines(found), f"families of {release}:")
    print(*heads, *describe.family_lines(table), sep="\n")


@kernels.command("show")
@deferred
def show_kernel(
    name: Annotated[
        str,
        Argument(metavar="NAME", help="A kernel's name (hf-mps kernels list --family FAMILY).", autocompletion=_names),
    ],
    release: Release = None,
    ir: bool = Option(False, "--ir", help="Print the kernel's LLVM module instead."),
    json: Json = False,
) -> None:
    """Show a kernel's buffers with their structs, thread attributes, memory and intrinsics.

    Example: `hf-mps kernels show rms_norm_float`
    """
    from hf_mps.metal.kernels import describe, metallib, store

    if ir and json:
        raise UserError("--ir cannot be combined with --json; give one of them")
    release = store.chosen(release)
    library = store.open_library(release)
    if ir:
        print(metallib.parse(library, name))
        return
    known = describe.kernel(library, name, release)
    if json:
        _print_json(known)
        return
    print(*describe.kernel_lines(known), sep="\n")


@kernels.command("remove")
@deferred
def remove_kernels(
    releases: list[str] | None = Argument(
        None, metavar="[RELEASE]...", help="Fetched releases, such as 2.13.0.", autocompletion=_releases
    ),
    everything: bool = Option(False, "--all", help="Remove every fetched release."),
) -> None:
    """Remove fetched releases and what was compiled of them from your cache.

    Example: `hf-mps kernels remove 2.13.0`
    """
    from hf_mps.metal.kernels import store

    if bool(releases) == everything:
        known = ", ".join(store.releases()) or "none"
        raise UserError(f"which releases? fetched: {known}; next: hf-mps kernels remove RELEASE, or --all")
    for release in [store.present(release) for release in releases or store.releases()]:
        print(f"{store.named(release)}: removed, {memory(store.remove(release))}")


def _print_json(value: object) -> None:
    import json

    print(json.dumps(value, indent=2))
