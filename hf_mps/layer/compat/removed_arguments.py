"""The arguments that transformers removed from TrainingArguments, and what takes the place of each.

Source: the fields of the class in the releases 2.11, 3.5, 4.0 to 4.57 and 5.0, compared with those of 5.23. An entry
is used only where the installed class lacks the field, so 5.0, which still has --warmup_ratio, keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

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
    def convert(value: Any) -> Fields:
        return {} if value is None else {new: value}

    return Removed(name, new, kind, None, convert, lambda args: getattr(args, new, None), secret)


def _dropped(name: str, why: str, kind: type = bool, default: Any = False) -> Removed:
    return Removed(name, f"nothing: {why}", kind, default, lambda value: {})


def _warmup(ratio: float | None) -> Fields:
    if not ratio:
        return {}
    if not 0 <= ratio <= 1:
        raise ValueError(f"{ratio} is no share of all steps; allowed: 0 to 1")
    # warmup_steps=1.0 would be one step, not all of them.
    return {"warmup_steps": min(float(ratio), math.nextafter(1.0, 0.0))}


def _if_true(**fields: Any) -> Callable[[Any], Fields]:
    return lambda value: dict(fields) if value else {}


def _inside(field: str, key: str, unset: Any = None) -> Callable[[Any], Fields]:
    return lambda value: {} if value is None or value == unset else {field: {key: value}}


def _organization(name: str | None) -> Fields:
    if name is None:
        return {}
    raise ValueError(f"hub_model_id takes its place, as {name}/NAME")


_ONE = "mixed precision is fp16 or bf16 alone"
_ALL = (
    _dropped("use_mps_device", "mps is taken where it works (HF_MPS_DEVICE=mps insists on it)"),
    Removed("no_cuda", "use_cpu", bool, False, _if_true(use_cpu=True), lambda args: args.use_cpu),
    _dropped("overwrite_output_dir", "files of the same name are written over and no file is deleted"),
    _renamed("evaluation_strategy", "eval_strategy"),
    Removed(
        "evaluate_during_training",
        "eval_strategy steps",
        bool,
        False,
        _if_true(eval_strategy="steps"),
        lambda args: args.eval_strategy == "steps",
    ),
    Removed(
        "warmup_ratio",
        "warmup_steps (a number below 1 is the share of all steps)",
        float,
        0.0,
        _warmup,
        lambda args: args.warmup_steps if args.warmup_steps < 1 else 0.0,
    ),
    Removed(
        "group_by_length",
        "train_sampling_strategy: group_by_length",
        bool,
        False,
        _if_true(train_sampling_strategy="group_by_length"),
        lambda args: args.train_sampling_strategy == "group_by_length",
    ),
    Removed("logging_dir", "the environment variable TENSORBOARD_LOGGING_DIR", str, None, lambda value: {}),
    _dropped("save_safetensors", "models are always saved as safetensors", default=True),
    _renamed("per_gpu_train_batch_size", "per_device_train_batch_size", int),
    _renamed("per_gpu_eval_batch_size", "per_device_eval_batch_size", int),
    _dropped("fp16_backend", _ONE, str, "auto"),
    _dropped("half_precision_backend", _ONE, str, "auto"),
    _dropped("fp16_opt_level", _ONE, str, "O1"),
    Removed("adafactor", "optim adafactor", bool, False, _if_true(optim="adafactor"), lambda a: a.optim == "adafactor"),
    _dropped("use_ipex", "IPEX is Intel's"),
    _dropped("jit_mode_eval", "torch_compile took the place of TorchScript"),
    _renamed("torchdynamo", "torch_compile_backend"),
    Removed(
        "include_inputs_for_metrics",
        "include_for_metrics inputs",
        bool,
        False,
        _if_true(include_for_metrics=["inputs"]),
        lambda args: "inputs" in args.include_for_metrics,
    ),
    Removed(
        "include_tokens_per_second",
        "include_num_input_tokens_seen all",
        bool,
        False,
        _if_true(include_num_input_tokens_seen="all"),
        lambda args: args.include_num_input_tokens_seen != "no",
    ),
    _renamed("push_to_hub_model_id", "hub_model_id"),
    Removed("push_to_hub_organization", "hub_model_id ORGANIZATION/NAME", str, None, _organization),
    _renamed("push_to_hub_token", "hub_token", secret=True),
    Removed("dispatch_batches", "accelerator_config", bool, None, _inside("accelerator_config", "dispatch_batches")),
    Removed("split_batches", "accelerator_config", bool, None, _inside("accelerator_config", "split_batches")),
    Removed("fsdp_min_num_params", "fsdp_config", int, 0, _inside("fsdp_config", "min_num_params", 0)),
    Removed(
        "fsdp_transformer_layer_cls_to_wrap",
        "fsdp_config",
        str,
        None,
        _inside("fsdp_config", "transformer_layer_cls_to_wrap"),
    ),
    _renamed("xpu_backend", "ddp_backend"),
    _dropped("sharded_ddp", "fsdp took the place of fairscale", str, ""),
    _dropped("tpu_num_cores", "there is no TPU here", int, None),
    _dropped("tpu_metrics_debug", "there is no TPU here"),
    _dropped("tp_size", "there is one device", int, 0),
    _dropped("mp_parameters", "it belonged to SageMaker", str, ""),
    _dropped("past_index", "models keep their own cache", int, -1),
    _dropped("use_legacy_prediction_loop", "there is one evaluation loop"),
    _dropped("ray_scope", "hyperparameter_search(scope=…) takes it", str, "last"),
)
REMOVED: Mapping[str, Removed] = {old.name: old for old in _ALL}

# Values that are gone from fields that are still there.
VALUES: Mapping[str, Mapping[str, str]] = {
    "optim": {"adamw_hf": "adamw_torch", "adamw_apex_fused": "adamw_torch_fused"}
}


def missing(fields: Collection[str]) -> dict[str, Removed]:
    """The removed arguments that a class with these fields does not know."""
    return {name: old for name, old in REMOVED.items() if name not in fields}
