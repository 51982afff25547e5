"""What in an existing configuration keeps training off Metal or is refused by accelerate, and what it becomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_mps.tools.doctor.accelerate_config.file import Values
from hf_mps.tools.doctor.accelerate_config.machines import KIND

# YAML 1.1 reads a bare NO as false.
BARE_NO = {"distributed_type": "NO", "mixed_precision": "no"}
NO_FILE = "none; Accelerate asks the machine itself, and takes Metal"
ON_THE_CPU = (
    "it sends Accelerate to the CPU while TrainingArguments stays on mps; `accelerate config default` "
    "writes it on a Mac (accelerate#3453)"
)


@dataclass(frozen=True)
class Repair:
    """One key: what came, what it becomes (None: the key goes), and why."""

    key: str
    came: Any
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {_yaml(self.came)} -> {'left out' if self.value is None else _yaml(self.value)}"


def find(values: Values, *, on_metal: bool = True) -> list[Repair]:
    """What is to be changed in `values`; with `on_metal` False a CPU-only file is the user's word and stays."""
    needed = []
    if values.get("use_cpu") and on_metal:
        needed.append(Repair("use_cpu", values["use_cpu"], False, ON_THE_CPU))
    machines = values.get("num_machines") or 1
    kind = values.get("distributed_type")
    if machines > 1 and kind != KIND:
        reason = "accelerate launch starts one process, which trains alone, for any other kind without a GPU of CUDA"
        needed.append(Repair("distributed_type", BARE_NO["distributed_type"] if kind is False else kind, KIND, reason))
    elif kind == "MPS":
        reason = "accelerate retired the type; mps is taken by itself without one"
        needed.append(Repair("distributed_type", "MPS", "NO", reason))
    for key in ("use_mps_device", "mps"):
        if key in values:
            needed.append(Repair(key, values[key], None, "accelerate knows no such key any more; mps is the default"))
    needed += _older(values)
    processes = values.get("num_processes")
    if machines > 1 and processes != machines:
        reason = f"one Metal device on each of {machines} Macs"
        needed.append(Repair("num_processes", processes, machines, reason))
    elif machines == 1 and processes not in (None, 1, -1):
        reason = "there is one Metal device, and each process would train the whole model"
        needed.append(Repair("num_processes", processes, 1, reason))
    return needed + _precision(values, on_metal)


def reasons(needed: list[Repair]) -> str:
    """The repairs and their reasons in one line."""
    return "; ".join(f"{repair}: {repair.reason}" for repair in needed)


def apply(values: Values, needed: list[Repair]) -> Values:
    """`values` with every repair made; the keys that accelerate needs are added as it adds them itself."""
    changed = dict(values)
    for repair in needed:
        if repair.value is None:
            changed.pop(repair.key, None)
        else:
            changed[repair.key] = repair.value
    for key, word in BARE_NO.items():
        if changed.get(key) is False:
            changed[key] = word
    defaults = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_processes": 1}
    return defaults | {"use_cpu": False, "debug": False, "mixed_precision": "no"} | changed


def _older(values: Values) -> list[Repair]:
    """Keys that accelerate still converts: written in today's form."""
    needed = []
    if "fp16" in values:
        today = "fp16" if values["fp16"] else "no"
        needed.append(Repair("fp16", values["fp16"], None, "older form of mixed_precision"))
        if "mixed_precision" not in values:
            needed.append(Repair("mixed_precision", "no", today, f"what fp16: {_yaml(values['fp16'])} said"))
    if "dynamo_backend" in values:
        backend = values["dynamo_backend"]
        needed.append(Repair("dynamo_backend", backend, None, "older form of dynamo_config"))
        if backend != "NO":
            needed.append(Repair("dynamo_config", None, {"dynamo_backend": backend}, "what dynamo_backend said"))
    return needed


def _precision(values: Values, on_metal: bool) -> list[Repair]:
    """A precision that the device cannot train in becomes `no`."""
    from hf_mps.core.errors import UserError
    from hf_mps.metal.device import precision

    asked = values.get("mixed_precision")
    if asked in (None, "no", False) or not on_metal:
        return []
    if asked == "fp8":
        return [Repair("mixed_precision", asked, "no", "float8 kernels are for CUDA")]
    try:
        precision.requested(str(asked), "mps")
    except UserError as error:
        return [Repair("mixed_precision", asked, "no", str(error))]
    return []


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
