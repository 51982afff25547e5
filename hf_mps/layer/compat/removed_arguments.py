"""The arguments that transformers removed from TrainingArguments, and keywords and command lines in today's words.

Source: the fields of the class in the releases 2.11, 3.5, 4.0 to 4.57 and 5.0, compared with those of 5.23. An entry
is used only where the installed class lacks the field, so 5.0, which still has --warmup_ratio, keeps it. Each change is
one line of notice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Fields = dict[str, Any]


@dataclass(frozen=True)
class Removed:
    """An argument that is gone: `instead` in words, `convert` to today's fields ({} where it is dropped).

    `kind` is bool, int, float or str; `default` is what an unset one read as; `read` finds the same in today's
    arguments; a `secret` value is not shown. `convert` raises ValueError for a value that the old argument refused.
    """

    name: str
    instead: str
    kind: type
    default: Any
    convert: Callable[[Any], Fields]
    read: Callable[[Any], Any] | None = None
    secret: bool = False


def _renamed(name: str, new: str, kind: type = str, *, secret: bool = False) -> Removed:
    convert: Callable[[Any], Fields] = lambda value: {} if value is None else {new: value}  # noqa: E731
    return Removed(name, new, kind, None, convert, lambda args: getattr(args, new, None), secret)


def _dropped(name: str, why: str, kind: type = bool, default: Any = False) -> Removed:
    return Removed(name, f"nothing: {why}", kind, default, lambda value: {})


def _switch(name: str, instead: str, **fields: Any) -> Removed:
    """A flag that is one value of a field today."""
    ((field, value),) = fields.items()
    return Removed(name, instead, bool, False, _if_true(**fields), lambda args: getattr(args, field) == value)


def _warmup(ratio: float | None) -> Fields:
    if not ratio:
        return {}
    if not 0 <= ratio <= 1:
        raise ValueError(f"{ratio} is no share of all steps; allowed: 0 to 1")
    # warmup_steps=1.0 would be one step, not all of them.
    return {"warmup_steps": min(float(ratio), math.nextafter(1.0, 0.0))}


def _if_true(**fields: Any) -> Callable[[Any], Fields]:
    return lambda value: dict(fields) if value else {}


def _organization(name: str | None) -> Fields:
    if name is None:
        return {}
    raise ValueError(f"hub_model_id takes its place, as {name}/NAME")


_ONE = "mixed precision is fp16 or bf16 alone"
_ALL = (
    _dropped("use_mps_device", "mps is taken where it works (HF_MPS_DEVICE=mps insists on it)"),
    _switch("no_cuda", "use_cpu", use_cpu=True),
    _dropped("overwrite_output_dir", "files of the same name are written over and no file is deleted"),
    _renamed("evaluation_strategy", "eval_strategy"),
    _switch("evaluate_during_training", "eval_strategy steps", eval_strategy="steps"),
    Removed(
        "warmup_ratio",
        "warmup_steps (a number below 1 is the share of all steps)",
        float,
        0.0,
        _warmup,
        lambda args: args.warmup_steps if args.warmup_steps < 1 else 0.0,
    ),
    _switch("group_by_length", "train_sampling_strategy: group_by_length", train_sampling_strategy="group_by_length"),
    Removed("logging_dir", "the environment variable TENSORBOARD_LOGGING_DIR", str, None, lambda value: {}),
    _dropped("save_safetensors", "models are always saved as safetensors", default=True),
    _renamed("per_gpu_train_batch_size", "per_device_train_batch_size", int),
    _renamed("per_gpu_eval_batch_size", "per_device_eval_batch_size", int),
    _dropped("fp16_backend", _ONE, str, "auto"),
    _dropped("half_precision_backend", _ONE, str, "auto"),
    _dropped("fp16_opt_level", _ONE, str, "O1"),
    _switch("adafactor", "optim adafactor", optim="adafactor"),
    Removed(
        "include_inputs_for_metrics",
        "include_for_metrics inputs",
        bool,
        False,
        _if_true(include_for_metrics=["inputs"]),
        lambda args: "inputs" in args.include_for_metrics,
    ),
    _renamed("push_to_hub_model_id", "hub_model_id"),
    Removed("push_to_hub_organization", "hub_model_id ORGANIZATION/NAME", str, None, _organization),
    _renamed("push_to_hub_token", "hub_token", secret=True),
    _dropped("use_legacy_prediction_loop", "there is one evaluation loop"),
)
REMOVED: Mapping[str, Removed] = {old.name: old for old in _ALL}

# Values that are gone from fields that are still there.
VALUES: Mapping[str, dict[str, str]] = {"optim": {"adamw_hf": "adamw_torch", "adamw_apex_fused": "adamw_torch_fused"}}


def missing(fields: Collection[str]) -> dict[str, Removed]:
    """Return the removed arguments that a class with these fields does not know."""
    return {name: old for name, old in REMOVED.items() if name not in fields}


T = TypeVar("T")
_TRUE, _FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")  # as HfArgumentParser has them


@dataclass
class Translated(Generic[T]):
    """Arguments in today's words, the removed ones by name as they were given, and a line for each change."""

    given: T
    kept: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


def keywords(
    given: Mapping[str, Any], removed: Mapping[str, Removed], values: Mapping[str, Collection[str]]
) -> Translated[dict[str, Any]]:
    """Translate keyword arguments or a JSON or YAML file's keys. Raises ValueError as the old argument did.

    `values` lists what a field of `removed_arguments.VALUES` may be today; the values of other fields are left alone.
    """
    result = Translated({name: value for name, value in given.items() if name not in removed})
    for name in given:
        if name not in removed:
            continue
        new, line = _place(removed[name], given[name], given, shown=lambda name, value: f"{name}={value!r}")
        result.kept[name] = given[name]
        result.given.update(new)
        result.lines.append(line)
    for name, today in values.items():
        old = str(result.given.get(name))
        if old in VALUES.get(name, {}) and old not in today:
            result.given[name] = VALUES[name][old]
            result.lines.append(f"{name}={old!r}: {name}={VALUES[name][old]!r} takes its place")
    return result


def command_line(
    arguments: Sequence[str], removed: Mapping[str, Removed], values: Mapping[str, Collection[str]]
) -> Translated[list[str]]:
    """Translate a command line; flags that are not in `removed` stay as they are, in their places.

    `--flag value`, `--flag=value`, `--flag-name` and booleans without a value are understood as HfArgumentParser does.
    Raises ValueError, in argparse's words, for a value that is absent or no number.
    """
    rest = list(arguments)
    present = {_name(argument) for argument in arguments if argument.startswith("--")}
    result: Translated[list[str]] = Translated([])
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            result.given += [argument, *rest]
            break
        old, negated = _find(argument, removed)
        if old is None:
            result.given += _today(argument, rest, values, result.lines)
            continue
        value = False if negated else _value(old, argument, rest)
        try:
            new, line = _place(old, value, present, shown=_flag)
        except ValueError as error:
            raise ValueError(f"argument --{old.name}: {error}") from error
        result.kept[old.name] = value
        result.given += [f"--{name}={_text(value)}" for name, value in new.items()]
        result.lines.append(line)
    return result


def _place(old: Removed, value: Any, given: Collection[str], *, shown: Any) -> tuple[dict[str, Any], str]:
    """Today's fields for one removed argument, without those that were given themselves, and the line that says it."""
    dashes = "--" if shown is _flag else ""
    was = f"{dashes}{old.name} …" if old.secret else shown(old.name, value)
    new = old.convert(value)
    twice = [name for name in new if name in given]
    if twice:
        return {}, f"{was}: dropped, {dashes}{twice[0]} is given too"
    if new:
        now = f"{dashes}{old.instead}" if old.secret else " ".join(shown(*item) for item in new.items())
        return new, f"{was}: {now} takes its place"
    if old.name == "logging_dir":
        return {}, f"{was}: kept for TensorBoard; transformers 5 has TENSORBOARD_LOGGING_DIR in its place"
    words = old.instead.removeprefix("nothing: ") if old.instead.startswith("nothing") else "it is the default"
    return {}, f"{was}: dropped, {words}"


def _name(argument: str) -> str:
    return argument[2:].partition("=")[0].replace("-", "_")


def _find(argument: str, removed: Mapping[str, Removed]) -> tuple[Removed | None, bool]:
    """Return the removed flag that `argument` is, and whether it is its `--no_` form, which a flag that was on had."""
    if not argument.startswith("--"):
        return None, False
    name = _name(argument)
    if name in removed:
        return removed[name], False
    opposite = removed.get(name.removeprefix("no_"))
    if opposite is not None and opposite.default is True and "=" not in argument:
        return opposite, True
    return None, False


def _value(old: Removed, argument: str, rest: list[str]) -> Any:
    """Return the value of a removed flag, taken off `rest` where it is there."""
    _, equals, word = argument.partition("=")
    if old.kind is bool:
        if not equals:
            if not (rest and rest[0].lower() in (*_TRUE, *_FALSE)):
                return True
            word = rest.pop(0)
        if word.lower() not in (*_TRUE, *_FALSE):
            raise ValueError(f"argument --{old.name}: invalid bool value: {word!r}")
        return word.lower() in _TRUE
    if not equals:
        if not rest or rest[0].startswith("--"):
            raise ValueError(f"argument --{old.name}: expected one argument")
        word = rest.pop(0)
    try:
        return old.kind(word)
    except ValueError:
        raise ValueError(f"argument --{old.name}: invalid {old.kind.__name__} value: {word!r}") from None


def _today(argument: str, rest: list[str], values: Mapping[str, Collection[str]], lines: list[str]) -> list[str]:
    """One argument of today, its value changed where that value is gone."""
    name = _name(argument) if argument.startswith("--") else ""
    if name not in values:
        return [argument]
    equals = "=" in argument
    old = argument.partition("=")[2] if equals else (rest[0] if rest else "")
    if old in values[name] or old not in VALUES.get(name, {}):
        return [argument]
    if not equals:
        rest.pop(0)
    lines.append(f"--{name} {old}: --{name} {VALUES[name][old]} takes its place")
    return [f"--{name}={VALUES[name][old]}"]


def _text(value: Any) -> str:
    return str(value[0]) if isinstance(value, list) else str(value)


def _flag(name: str, value: Any) -> str:
    return f"--{name}" if value is True else f"--{name} {_text(value)}"
