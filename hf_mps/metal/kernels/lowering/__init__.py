"""A kernel's bitcode becomes this CPU's code. The files *.ll are LLVM assembly, which `assembly` fills in."""

from functools import cache
from pathlib import Path
from string import Template


@cache
def _template(file: str) -> Template:
    lines = (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines()
    return Template("\n".join(line for line in lines if not line.startswith(";")))


def assembly(file: str, **values: object) -> str:
    """Return a file's LLVM assembly without its comments, each `$name` replaced. Raises KeyError for one not given."""
    return _template(file).substitute(values)
