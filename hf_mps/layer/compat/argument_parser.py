"""HfArgumentParser accepts the flags that TrainingArguments lost, and asks "did you mean" about others.

Replaced by today's flags, see `hf_mps.layer.compat.removed_arguments`. Only parsers with a dataclass that derives from
TrainingArguments are concerned, and only flags that no dataclass and no argument of the parser has; with none missing
it is a no-op.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hf_mps.core.errors import nearest
from hf_mps.core.notices import print_notice
from hf_mps.layer.compat import removed_arguments, training_arguments, translate


def _parse_known_args(
    stock: Callable[..., Any], self: Any, args: Any = None, namespace: Any = None, **kwargs: Any
) -> Any:
    removed, values = _missing(self)
    if not removed and not values:
        return stock(self, args, namespace, **kwargs)
    given = list(sys.argv[1:] if args is None else args)
    try:
        result = translate.command_line(given, removed, values)
    except ValueError as error:
        self.error(str(error))
    for line in result.lines:
        if not line.startswith("--overwrite_output_dir"):  # told by `keep`, which knows the folder
            print_notice(line)
    self._hf_mps_kept = result.kept
    return stock(self, result.given, namespace, **kwargs)


def _parse_args_into_dataclasses(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    self._hf_mps_kept = {}
    with _did_you_mean(self):
        outputs = stock(self, *args, **kwargs)
    return _keep(self, outputs, self._hf_mps_kept)


def _parse_dict(stock: Callable[..., Any], self: Any, args: Any, *more: Any, **kwargs: Any) -> Any:
    removed, values = _missing(self)
    result = translate.keywords(args, removed, values) if removed or values else translate.Translated(args)
    training_arguments.tell_each("", result.lines)
    with _did_you_mean(self):
        outputs = stock(self, result.given, *more, **kwargs)
    return _keep(self, outputs, result.kept)


def _missing(parser: Any) -> tuple[dict[str, removed_arguments.Removed], dict[str, Any]]:
    """The removed flags to translate for `parser`, and the values that its training dataclass knows."""
    training = _training(parser)
    if training is None:
        return {}, {}
    own = {name for kind in parser.dataclass_types for name in kind.__dataclass_fields__}
    own |= {option.lstrip("-").replace("-", "_") for option in parser._option_string_actions}
    return removed_arguments.missing(own), training_arguments.values_of(training)


def _training(parser: Any) -> Any:
    module: Any = sys.modules.get("transformers.training_args")  # not imported: no dataclass can derive from it
    base = getattr(module, "TrainingArguments", None)
    if base is None:
        return None
    return next((kind for kind in parser.dataclass_types if isinstance(kind, type) and issubclass(kind, base)), None)


def _keep(parser: Any, outputs: Any, kept: dict[str, Any]) -> Any:
    training = _training(parser)
    for output in outputs if kept and training is not None else ():
        if isinstance(output, training):
            training_arguments.keep(output, kept)
    return outputs


@contextmanager
def _did_you_mean(parser: Any) -> Iterator[None]:
    """Add the nearest flag to the parser's own error about arguments that nobody uses."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        if "not used by the HfArgumentParser" in text:
            error.args = (text + _nearest(text, parser),)
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


patches = {
    "transformers.hf_argparser:HfArgumentParser.parse_known_args": _parse_known_args,
    "transformers.hf_argparser:HfArgumentParser.parse_args_into_dataclasses": _parse_args_into_dataclasses,
    "transformers.hf_argparser:HfArgumentParser.parse_dict": _parse_dict,
}
