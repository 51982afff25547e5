"""The fields of a dataclass of training arguments, read without importing its library.

The installed file is parsed, not imported: names, annotations and values are those of the version that will run, and
neither transformers nor torch is loaded.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from hf_mps.core.errors import UserError

Source = tuple[str, str]
"""A file's path inside site-packages, and the class in it."""

TRAINING_ARGUMENTS: Source = ("transformers/training_args.py", "TrainingArguments")
UTILITIES = "transformers/trainer_utils.py"
PIP = {"transformers": "'transformers>=5.3'", "sentence_transformers": "sentence-transformers"}


@dataclass(frozen=True)
class Field:
    """A field: its name, its annotation as written, and its values where they are listed."""

    name: str
    annotation: str
    values: tuple[str, ...] = ()

    @property
    def types(self) -> list[str]:
        """The names on the top level of its annotation."""
        return types(ast.parse(self.annotation, mode="eval").body)


@lru_cache(maxsize=8)
def fields(source: Source = TRAINING_ARGUMENTS) -> dict[str, Field]:
    """Return every field of the installed class by name, inherited ones first.

    Raises UserError where the library is not installed, or the file no longer has the class or one of its bases.
    """
    path = _file(source[0])
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if source[1] not in classes:
        raise UserError(f"{path} holds no {source[1]}; next: pip install --upgrade hf-mps")
    body = classes[source[1]]
    by_name: dict[str, Field] = {}
    for base in body.bases:
        if (above := _base(base, source[0], tree, classes)) is not None:
            by_name |= fields(above)
    enums = _enums(tree) | _enums(ast.parse(_file(UTILITIES).read_text(encoding="utf-8")))
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = types(node.annotation)
            if "ClassVar" in names:
                continue
            values = [value for name in names for value in enums.get(name, ())] or _choices(node.value)
            by_name[node.target.id] = Field(node.target.id, ast.unparse(node.annotation), tuple(values))
    return by_name


def types(annotation: ast.expr) -> list[str]:
    """The names on the top level of a union: `dict[str, Any] | str | None` gives dict, str and None."""
    if isinstance(annotation, ast.BinOp):
        return types(annotation.left) + types(annotation.right)
    if isinstance(annotation, ast.Subscript):
        outer = types(annotation.value)
        if outer in (["Optional"], ["Union"]):
            inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
            return [name for part in inner for name in types(part)] + (["None"] if outer == ["Optional"] else [])
        return outer
    if isinstance(annotation, ast.Constant):
        if isinstance(annotation.value, str):  # an annotation in quotes
            return types(ast.parse(annotation.value, mode="eval").body)
        return [str(annotation.value)]
    return [annotation.id] if isinstance(annotation, ast.Name) else [ast.unparse(annotation)]


def _base(base: ast.expr, file: str, tree: ast.Module, classes: dict[str, ast.ClassDef]) -> Source | None:
    """Return where a base class is: in the same file, or in the one that it is imported from; None for a builtin."""
    name = ast.unparse(base)
    if name in classes:
        return file, name
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            if (alias.asname or alias.name) != name:
                continue
            assert isinstance(node, ast.ImportFrom)
            if node.module == "transformers" and alias.name == "TrainingArguments":
                return TRAINING_ARGUMENTS  # a lazy package: its __init__ does not say where the class stands
            folder = list(Path(file).parts[: -node.level] if node.level else ())
            return "/".join([*folder, *(node.module or "").split(".")]) + ".py", alias.name
    return None


def _file(place: str) -> Path:
    """Return the installed file at `place`. Raises UserError where its package is not installed or lacks the file."""
    package, _, rest = place.partition("/")
    spec = find_spec(package)  # finds the folder without running the package's code
    if spec is None or spec.origin is None:
        raise UserError(f"{package} is not installed; next: pip install {PIP.get(package, package)}")
    path = Path(spec.origin).parent / rest
    if not path.is_file():
        raise UserError(f"{path} is not there in the installed {package}; next: pip install --upgrade hf-mps")
    return path


def _enums(tree: ast.Module) -> dict[str, list[str]]:
    """Return the string values of each Enum class in a module."""
    return {
        node.name: [
            item.value.value
            for item in node.body
            if isinstance(item, ast.Assign)
            and isinstance(item.value, ast.Constant)
            and isinstance(item.value.value, str)
        ]
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Enum") for base in node.bases)
    }


def _choices(value: ast.expr | None) -> list[str]:
    """Return the `choices` list in a field's metadata, where it is written out."""
    for node in ast.walk(value) if value is not None else ():
        if isinstance(node, ast.Dict):
            for key, item in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "choices" and isinstance(item, ast.List):
                    return [str(choice.value) for choice in item.elts if isinstance(choice, ast.Constant)]
    return []
