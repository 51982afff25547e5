"""What an extra of hf_mps brings, as a command that also works for who installed a wheel file."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires


def install(extra: str) -> str:
    """The command that installs what `extra` needs: `pip install 'peft>=0.15'`.

    It names the packages, as the installed metadata has them: `pip install 'hf-mps[lora]'` asks an index for hf-mps,
    which fails for who installed it from a wheel file or from its sources. Raises ValueError for an unknown extra.
    """
    try:
        lines = requires("hf-mps") or []
    except PackageNotFoundError:  # run from its sources, without being installed
        return f"pip install '.[{extra}]'"
    return shlex.join(["pip", "install", *dict.fromkeys(_needs(lines, extra))])


def _needs(lines: list[str], extra: str) -> Iterator[str]:
    """The requirements of `extra`; where it names another extra of ours, those of that one."""
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
