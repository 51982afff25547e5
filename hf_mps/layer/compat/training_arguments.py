"""TrainingArguments takes the keywords that transformers 4 had, and older script bodies read them from it.

Replaced by the fields of `hf_mps.layer.compat.removed_arguments`; needless for each name that the installed class has
as a field. A subclass that declares a field, or an argument of its own __init__, of the same name keeps it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from hf_mps.core.notices import asked_by_a_library, print_notice
from hf_mps.core.patching import Give, plainly, replace
from hf_mps.layer.compat import removed_arguments, translate


def values_of(arguments: type) -> dict[str, Collection[str]]:
    """What the fields of `removed_arguments.VALUES` may be in the installed version."""
    module = inspect.getmodule(next(base for base in arguments.__mro__ if base.__name__ == "TrainingArguments"))
    return {"optim": [str(name.value) for name in getattr(module, "OptimizerNames", ())]}


def keep(arguments: Any, kept: dict[str, Any]) -> None:
    """Note on `arguments` what the user said in removed names, so that the script reads it as it was given."""
    vars(arguments).update(kept)
    if kept.get("overwrite_output_dir"):
        print_notice(f"overwrite_output_dir: {_what_stays(arguments)}")


def tell_each(prefix: str, lines: Iterable[str]) -> None:
    """Print the lines of a translation, each with `prefix` before it."""
    for line in lines:
        if not line.startswith("overwrite_output_dir"):  # told by `keep`, which knows the folder
            print_notice(prefix + line)


class Gone:
    """A removed argument as an attribute: reads what was given, or today's word for it; written, it sets today's."""

    def __init__(self, old: removed_arguments.Removed) -> None:
        self._old = old

    def __get__(self, arguments: Any, owner: type | None = None) -> Any:
        old = self._old
        if arguments is None:
            return old.default  # as the class attribute of a field with a default
        if old.name in vars(arguments):
            return vars(arguments)[old.name]
        # An installed library that reads it asked first whether it is there: it is written for both.
        if not asked_by_a_library():
            print_notice(f"training_args.{old.name} is gone from transformers 5; in its place: {old.instead}")
        return old.default if old.read is None else old.read(arguments)

    def __set__(self, arguments: Any, value: Any) -> None:
        if self._old.name in type(arguments).__dataclass_fields__:  # a subclass's own, set by its __init__
            vars(arguments)[self._old.name] = value
            return
        result = translate.keywords({self._old.name: value}, {self._old.name: self._old}, {})
        for name, new in result.given.items():
            setattr(arguments, name, new)
        vars(arguments)[self._old.name] = value
        tell_each("training_args.", result.lines)


def _init(stock: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    removed = removed_arguments.missing(self.__dataclass_fields__)
    if "optim" not in kwargs and not any(name in removed for name in kwargs):
        return stock(self, *args, **kwargs)
    own = inspect.signature(stock).parameters
    removed = {name: old for name, old in removed.items() if name not in own}
    result = translate.keywords(kwargs, removed, values_of(type(self)))
    tell_each("", result.lines)
    stock(self, *args, **result.given)
    keep(self, result.kept)
    return None


def _new(stock: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
    # A dataclass that derives from TrainingArguments has an __init__ of its own, written after it was derived.
    for base in cls.__mro__:
        if "__init__" in base.__dict__ and hasattr(base, "__dataclass_fields__"):
            replace("training_arguments", base, "__init__", lambda stock: plainly(stock, _init))
    return stock(cls) if stock is object.__new__ else stock(cls, *args, **kwargs)


def _what_stays(arguments: Any) -> str:
    folder = Path(arguments.output_dir)
    earlier = sorted(path.name for path in folder.glob("checkpoint-*") if path.is_dir())
    line = f"files of the same name in {folder} are written over, nothing is deleted"
    if not earlier:
        return line
    counted = "; save_total_limit counts them too" if arguments.save_total_limit else ""
    return f"{line}; of an earlier run stay {', '.join(earlier)}{counted}"


FRAMEWORK = "pt"
"""Always PyTorch's since transformers 5."""
_CLASS = "transformers.training_args:TrainingArguments"
patches = {
    f"{_CLASS}.__init__": _init,
    **{f"{_CLASS}.{name}": Give(Gone(old)) for name, old in removed_arguments.missing(()).items()},
    f"{_CLASS}.framework": Give("FRAMEWORK"),
    f"{_CLASS}.__new__": _new,
}
