"""What in accelerate's configuration keeps training off Metal, what it becomes, and how several Macs are asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import typer

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.tools.doctor.accelerate_config.file import Values

PORT = 29500
"""Accelerate's own default (utils/launch.py, prepare_multi_gpu_env)."""
KIND = "MULTI_GPU"
"""The kind for which `accelerate launch` starts torchrun; for NO and MULTI_CPU it starts one process, which would train
alone (commands/launch.py, launch_command). What runs on mps is the process group's choice, not this word's."""


@dataclass(frozen=True)
class Machines:
    """What was said of several Macs: accelerate's four keys, None where nothing was."""

    num_machines: int | None = None
    machine_rank: int | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None

    @classmethod
    def of(cls, values: Values) -> Machines:
        """Return what a file says."""
        return cls(**{key: values.get(key) for key in cls.__dataclass_fields__})

    def over(self, other: Machines) -> Machines:
        """Return the same, with the other's where this has nothing; of one Mac there is nothing else to say."""
        if self == Machines(1):
            return self
        mine = {key: value for key, value in vars(self).items() if value is not None}
        return Machines(**{**vars(other), **mine})

    def asked(self) -> Machines:
        """Ask on the terminal, proposing what is known, and return the same with the answers."""
        count = typer.prompt("How many Macs train together", default=self.num_machines or 1)
        if count <= 1:
            return Machines(1)
        which = f"Which of them is this (0 to {count - 1}, 0 is the main one)"
        rank = typer.prompt(which, default=self.machine_rank or 0)
        address = typer.prompt("Address of the main one, as the others reach it", default=self.main_process_ip or "")
        port = typer.prompt("Port there", default=self.main_process_port or PORT)
        return Machines(count, rank, address, port)

    @staticmethod
    def gone(before: Machines) -> list[str]:
        """Return the keys of a file for several Macs that one for a single Mac has not."""
        keys = ("machine_rank", "main_process_ip", "main_process_port")
        return [key for key in keys if getattr(before, key) is not None] if (before.num_machines or 1) > 1 else []

    def choices(self, before: Machines) -> dict[str, Choice[Any]]:
        """The keys of the file, which says `before` now, with their reasons. Raises UserError for what cannot be."""
        count = self.num_machines or 1
        if count == 1:
            if self.machine_rank or self.main_process_ip:
                given = f"--main_process_ip {self.main_process_ip}" if self.main_process_ip else "--machine_rank"
                raise UserError(f"{given} is for several Macs; next: hf-mps config --num_machines 2 …")
            return {
                **dict.fromkeys(self.gone(before), Choice(None, "for several Macs alone")),
                **({"num_machines": Choice(1, "this Mac alone")} if before.num_machines not in (None, 1) else {}),
                "num_processes": Choice(1, "there is one Metal device"),
                "distributed_type": Choice("NO", "one process; accelerate takes mps by itself"),
            }
        self._refuse(count)
        return {
            "num_machines": Choice(count, "the Macs that train together"),
            "num_processes": Choice(count, "one Metal device on each Mac, so one process"),
            "machine_rank": Choice(self.machine_rank or 0, "this Mac; each has a number of its own, 0 is the main one"),
            "main_process_ip": Choice(self.main_process_ip, "where the others reach the main one"),
            "main_process_port": Choice(self.main_process_port or PORT, "the port there, the same in every file"),
            "distributed_type": Choice(KIND, "accelerate launch starts one process alone for the kind NO"),
            "rdzv_backend": Choice("static", "each Mac has its number"),
            "same_network": Choice(True, "the Macs reach each other by that address"),
        }

    def _refuse(self, count: int) -> None:
        rank = self.machine_rank or 0
        if count < 1:
            raise UserError(f"--num_machines {count}: allowed: 1, 2, …")
        if not 0 <= rank < count:
            raise UserError(f"--machine_rank {rank} is none of {count} Macs; allowed: 0 to {count - 1}")
        if not self.main_process_ip or not re.fullmatch(r"[\w.:%-]+", self.main_process_ip):
            came = f"{self.main_process_ip!r} is no address" if self.main_process_ip else "there is no address"
            raise UserError(
                f"{count} Macs meet at the main one, and {came}; next: --main_process_ip with its address on the "
                f"Thunderbolt bridge or the network, as `ipconfig getifaddr bridge0` or `en0` prints it there"
            )
        port = self.main_process_port or PORT
        if not 0 < port < 65536:
            raise UserError(f"--main_process_port {port}: allowed: 1 to 65535")


def next_words(choices: dict[str, Choice[Any]]) -> str:
    """Return what is to be typed on the other Macs, or "" where there are none."""
    if "main_process_ip" not in choices or choices["num_machines"].value == 1:
        return ""
    count, rank = choices["num_machines"].value, choices["machine_rank"].value
    others = ", ".join(str(other) for other in range(count) if other != rank)
    address, port = choices["main_process_ip"].value, choices["main_process_port"].value
    return (
        f"next: on the other Macs hf-mps config --num_machines {count} --machine_rank {others} "
        f"--main_process_ip {address} --main_process_port {port}, then on each accelerate launch"
    )


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
    """Return what is to be changed in `values`; with `on_metal` False a CPU-only file is the user's word and stays."""
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
    """Return the repairs and their reasons in one line."""
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
    """Return the repair of a precision that the device cannot train in: it becomes `no`."""
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
