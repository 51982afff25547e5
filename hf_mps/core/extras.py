"""What an extra of hf_mps brings, as a command that also works for who installed a wheel file."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2]
"""The folder that Python imports hf_mps from; a checkout has its pyproject.toml there."""
INSTALL_SOURCES = shlex.join(["pip", "install", "-e", str(SOURCES)])
"""The command that installs hf_mps itself from there."""


@contextmanager
def unheard(library: str, level: int = logging.ERROR) -> Iterator[None]:
    """Let the logger of that name say what is of this level or above alone, by default errors.

    bitsandbytes warns at its import, which peft makes wherever it is installed, that the package `kernels` is missing,
    whose kernel for x86 it would fetch.
    """
    logger = logging.getLogger(library)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def install(extra: str) -> str:
    """Return the command that installs what `extra` needs: `pip install 'peft>=0.15'`.

    It names the packages, as the installed metadata has them: `pip install 'hf-mps[lora]'` asks an index for hf-mps,
    which fails for who installed it from a wheel file or from its sources. Sources on PYTHONPATH have no metadata:
    there it installs them, with the extra. Raises ValueError for an unknown extra.
    """
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires("hf-mps") or []
    except PackageNotFoundError:
        return shlex.join(["pip", "install", "-e", f"{SOURCES}[{extra}]"])
    return shlex.join(["pip", "install", *dict.fromkeys(_needs(lines, extra))])


def _needs(lines: list[str], extra: str) -> Iterator[str]:
    """Yield the requirements of `extra`; where it names another extra of ours, those of that one."""
    from packaging.requirements import Requirement

    wanted = [
        requirement
        for requirement in map(Requirement, lines)
        if requirement.marker and "extra" in str(requirement.marker) and requirement.marker.evaluate({"extra": extra})
    ]
    if not wanted:
        raise ValueError(f"hf-mps has no extra {extra}")
    for requirement in wanted:
        if requirement.name == "hf-mps":
            for nested in sorted(requirement.extras):
                yield from _needs(lines, nested)
        else:
            yield f"{requirement.name}{requirement.specifier}"
