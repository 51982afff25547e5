"""TrainingArguments and HfArgumentParser take what transformers 4 had, and older script bodies read it from them.

Replaced by the fields of `hf_mps.layer.compat.removed_arguments`; needless for each name that the installed class has
as a field. A subclass that declares a field, or an argument of its own __init__, of the same name keeps it. The
parsers concerned have a dataclass that derives from TrainingArguments; their errors ask "did you mean" about others.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from hf_mps.core.errors import nearest
from hf_mps.core.notices import asked_by_a_library, print_notice
from hf_mps.core.patching import Give, plainly, replace
from hf_mps.layer.compat import removed_arguments


def values_of(arguments: type) -> dict[str, Collection[str]]:
    """Return what the fields of `removed_arguments.VALUES` may be in the installed version."""
    module = inspect.getmodule(next(base for base in arguments.__mro__ if base.__name__ == "TrainingArguments"))
    return {"optim": [str(name.value) for name in getattr(module, "OptimizerNames", ())]}


def keep(arguments: Any, kept: dict[str, Any]) -> None:
    """Note on `arguments` what the user said in removed names, so that the script reads it as it was given."""
    vars(arguments).update(kept)
    if kept.get("overwrite_output_dir"):
        folder = Path(arguments.output_dir)
        earlier = sorted(path.name for path in folder.glob("checkpoint-*") if path.is_dir())
        counted = "; save_total_limit counts them too" if arguments.save_total_limit else ""
        stays = f"; of an earlier run stay {', '.join(earlier)}{counted}" if earlier else ""
        line = f"files of the same name in {folder} are written over, nothing is deleted{stays}"
        print_notice(f"overwrite_output_dir: {line}")


def tell_each(prefix: str, lines: Iterable[str]) -> None:
    """Print the lines of a translation, each with `prefix` before it."""
    for line in lines:
        if not line.lstrip("-").startswith("overwrite_output_dir"):  # told by `keep`, which knows the folder
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
        old, fields = self._old, type(arguments).__dataclass_fields__
        if old.name in fields:  # a subclass's own, set by its __init__
            vars(arguments)[old.name] = value
            return
        result = removed_arguments.keywords({old.name: value}, {old.name: old}, {})
        if not result.given and old.read and old.default is not None and old.read(arguments) != old.default:
            (name,) = old.convert(True)  # what it has set goes back to its default
            made = fields[name].default_factory
            result.given[name] = fields[name].default if made is MISSING else made()
            result.lines = [f"{old.name}={value!r}: {name}={result.given[name]!r} takes its place"]
        for name, new in result.given.items():
            setattr(arguments, name, new)
        vars(arguments)[old.name] = value
        tell_each("training_args.", result.lines)


def _init(stock: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    removed = removed_arguments.missing(self.__dataclass_fields__)
    if "optim" not in kwargs and not any(name in removed for name in kwargs):
        return stock(self, *args, **kwargs)
    own = inspect.signature(stock).parameters
    removed = {name: old for name, old in removed.items() if name not in own}
    result = removed_arguments.keywords(kwargs, removed, values_of(type(self)))
    tell_each("", result.lines)
    stock(self, *args, **result.given)
    keep(self, result.kept)
    return None


def _new(stock: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
    # A dataclass that derives from TrainingArguments has its own __init__, written after it was derived.
    for base in cls.__mro__:
        if "__init__" in base.__dict__ and hasattr(base, "__dataclass_fields__"):
            replace("training_arguments", base, "__init__", lambda stock: plainly(stock, _init))
    return stock(cls) if stock is object.__new__ else stock(cls, *args, **kwargs)


FRAMEWORK = "pt"
"""Always PyTorch's since transformers 5."""
_CLASS = "transformers.training_args:TrainingArguments"
patches = {
    f"{_CLASS}.__init__": _init,
    **{f"{_CLASS}.{name}": Give(Gone(old)) for name, old in removed_arguments.missing(()).items()},
    f"{_CLASS}.framework": Give("FRAMEWORK"),
    f"{_CLASS}.__new__": _new,
}


def _parse_known_args(
    stock: Callable[..., Any], self: Any, args: Any = None, namespace: Any = None, **kwargs: Any
) -> Any:
    removed, values = _missing(self)
    if not removed and not values:
        return stock(self, args, namespace, **kwargs)
    given = list(sys.argv[1:] if args is None else args)
    try:
        result = removed_arguments.command_line(given, removed, values)
    except ValueError as error:
        self.error(str(error))
    tell_each("", result.lines)
    self._hf_mps_kept = result.kept
    return stock(self, result.given, namespace, **kwargs)


def _parse_args_into_dataclasses(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    self._hf_mps_kept = {}
    with _did_you_mean(self):
        outputs = stock(self, *args, **kwargs)
    return _keep_parsed(self, outputs, self._hf_mps_kept)


def _parse_dict(stock: Callable[..., Any], self: Any, args: Any, *more: Any, **kwargs: Any) -> Any:
    result = removed_arguments.keywords(args, *_missing(self))
    tell_each("", result.lines)
    with _did_you_mean(self):
        outputs = stock(self, result.given, *more, **kwargs)
    return _keep_parsed(self, outputs, result.kept)


def _missing(parser: Any) -> tuple[dict[str, removed_arguments.Removed], dict[str, Any]]:
    """Return the removed flags to translate for `parser`, and the values that its training dataclass knows."""
    training = _training(parser)
    if training is None:
        return {}, {}
    own = {name for kind in parser.dataclass_types for name in kind.__dataclass_fields__}
    # argparse has no public list of the options that a parser knows.
    own |= {option.lstrip("-").replace("-", "_") for option in parser._option_string_actions}
    return removed_arguments.missing(own), values_of(training)


def _training(parser: Any) -> Any:
    module: Any = sys.modules.get("transformers.training_args")  # not imported: no dataclass can derive from it
    base = getattr(module, "TrainingArguments", None)
    if base is None:
        return None
    return next((kind for kind in parser.dataclass_types if isinstance(kind, type) and issubclass(kind, base)), None)


def _keep_parsed(parser: Any, outputs: Any, kept: dict[str, Any]) -> Any:
    training = _training(parser)
    for output in outputs if kept and training is not None else ():
        if isinstance(output, training):
            keep(output, kept)
    return outputs


@contextmanager
def _did_you_mean(parser: Any) -> Iterator[None]:
    """Add the nearest flag to the parser's own error about arguments that nobody uses."""
    try:
        yield
    except ValueError as error:
        if "not used by the HfArgumentParser" in str(error):
            error.args = (f"{error}{_nearest(str(error), parser)}",)
        raise


def _nearest(text: str, parser: Any) -> str:
    listed = text.partition("[")[2].rpartition("]")[0]
    known = [option for option in parser._option_string_actions if option.startswith("--")]
    for word in (part.strip(" '\"").partition("=")[0] for part in listed.split(",")):
        flag = word if word.startswith("--") else f"--{word}"
        hint = nearest(flag, known)
        if hint and (word.startswith("--") or " " not in word):
            return hint
    return ""


patches |= {
    "transformers.hf_argparser:HfArgumentParser.parse_known_args": _parse_known_args,
    "transformers.hf_argparser:HfArgumentParser.parse_args_into_dataclasses": _parse_args_into_dataclasses,
    "transformers.hf_argparser:HfArgumentParser.parse_dict": _parse_dict,
}
