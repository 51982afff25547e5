"""`hf-mps config`: Accelerate's configuration file for a Mac, written with reasons and repaired where it is wrong."""

from __future__ import annotations

import json as jsons
import re
import shlex
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import typer
import yaml

from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError, UserError
from hf_mps.core.files import plain, write_atomic
from hf_mps.metal.device import choice, facts, precision, simulated

Values = dict[str, Any]

# Keys that older releases wrote: accelerate itself converts the first two (commands/config/config_args.py,
# process_config) and refuses the others as unknown.
OLDER = ("fp16", "dynamo_backend", "use_mps_device", "mps")

# What belongs to a configuration for other machines: this wizard knows one process on each Mac.
FOR_OTHERS = (
    *("deepspeed_config", "fsdp_config", "megatron_lm_config", "parallelism_config", "mpirun_config", "fp8_config"),
    *("tpu_name", "tpu_zone", "tpu_vm", "tpu_env"),
)
OF_SEVERAL = ("main_process_ip", "main_process_port")
"""Keys that mean nothing for one machine."""
OF_MACHINES = ("machine_rank", *OF_SEVERAL)
BARE_NO = {"distributed_type": "NO", "mixed_precision": "no"}
ONE_PROCESS = ("NO", "MPS")
SEVERAL = (*ONE_PROCESS, "MULTI_GPU", "MULTI_CPU")
"""The kinds that a file for several Macs may say; `accelerate config` writes MULTI_GPU for several machines."""


def default_place() -> Path:
    """Where `accelerate launch` looks without --config_file; follows HF_HOME and XDG_CACHE_HOME as accelerate does."""
    from accelerate.commands.config.config_args import default_config_file

    return Path(default_config_file)


def read(path: Path) -> Values | None:
    """Return what the file at `path` says, or None where there is none or it is empty.

    Raises UserError where it is not understood: no YAML, unknown keys, or a configuration for other machines.
    """
    if not path.exists():
        return None
    from accelerate.commands.config.config_args import ClusterConfig

    def refused(what: str) -> UserError:
        return UserError(f"{path}: {what}; it stays as it is; {_elsewhere(path)}")

    try:
        # JSON is YAML: `accelerate config default` writes it.
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    # A ValueError is of bytes that are no UTF-8, and of a date that is no day.
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise refused(f"cannot be read as YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return None
    if not isinstance(values, dict):
        raise refused(f"holds a {type(values).__name__}, not keys")
    # YAML 1.1 reads a bare NO as false.
    values |= {key: word for key, word in BARE_NO.items() if values.get(key) is False}
    where, kind = values.get("compute_environment", "LOCAL_MACHINE"), values.get("distributed_type", "NO")
    machines = values.get("num_machines", 1)
    for key in ("num_machines", "machine_rank", "main_process_port"):
        if not isinstance(values.get(key), int | None):
            raise refused(f"{key} is no whole number ({values[key]!r})")
    several = (machines or 1) > 1
    others = [key for key in (*FOR_OTHERS, *(() if several else OF_SEVERAL)) if values.get(key)]
    words = ""
    if where != "LOCAL_MACHINE":
        words = f"compute_environment {where}"
    elif kind not in (SEVERAL if several else ONE_PROCESS):
        words = f"distributed_type {kind}"
    elif machines != 1 and not several:
        words = f"num_machines {machines}"
    elif others:
        words = others[0]
    if words:
        raise refused(f"is for other machines ({words})")
    if unknown := sorted(set(map(str, values)) - set(ClusterConfig.__dataclass_fields__) - set(OLDER)):
        raise refused(f"has keys that the installed accelerate does not know ({', '.join(unknown)})")
    return values


def write(path: Path, values: Values) -> Path | None:
    """Write `values` as accelerate itself does, and return the backup of what was there, or None.

    The file is read back through accelerate. Raises UserError where the place cannot be written.
    """
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    content = ClusterConfig(**values).to_dict()
    text = jsons.dumps(content, indent=2, sort_keys=True) + "\n" if path.suffix == ".json" else yaml.safe_dump(content)
    backup, number = path.with_name(f"{path.name}.bak"), 2
    while backup.exists():  # a backup never replaces another
        backup, number = path.with_name(f"{path.name}.bak-{number}"), number + 1
    existed = path.exists()
    try:
        if existed:
            shutil.copy2(path, backup)
        write_atomic(path, text)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}; {_elsewhere(path)}") from error
    load_config_from_file(str(path))
    return backup if existed else None


def _elsewhere(path: Path) -> str:
    return f"next: hf-mps config --config_file {shlex.quote(str(path.with_name('mac.yaml')))}"


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
        return replace(other, **{key: value for key, value in vars(self).items() if value is not None})

    def choices(self, before: Machines) -> dict[str, Choice[Any]]:
        """The keys of the file, which says `before` now, with their reasons. Raises UserError for what cannot be."""
        count, several = self.num_machines or 1, (before.num_machines or 1) > 1
        if count == 1:
            if self.machine_rank or self.main_process_ip:
                given = f"--main_process_ip {self.main_process_ip}" if self.main_process_ip else "--machine_rank"
                raise UserError(f"{given} is for several Macs; next: hf-mps config --num_machines 2 …")
            gone = [key for key in OF_MACHINES if several and getattr(before, key) is not None]
            return {
                **dict.fromkeys(gone, Choice(None, "for several Macs alone")),
                **({"num_machines": Choice(1, "this Mac alone")} if before.num_machines not in (None, 1) else {}),
                "num_processes": Choice(1, "there is one Metal device"),
                "distributed_type": Choice("NO", "one process; accelerate takes mps by itself"),
            }
        rank = self.machine_rank or 0
        if count < 1:
            raise UserError(f"--num_machines {count}: allowed: 1, 2, …")
        if not 0 <= rank < count:
            raise UserError(f"--machine_rank {rank} is none of {count} Macs; allowed: 0 to {count - 1}")
        if not self.main_process_ip or not re.fullmatch(r"[\w.:%-]+", str(self.main_process_ip)):
            came = f"{self.main_process_ip!r} is no address" if self.main_process_ip else "there is no address"
            raise UserError(
                f"{count} Macs meet at the main one, and {came}; next: --main_process_ip with its address on the "
                f"Thunderbolt bridge or the network, as `ipconfig getifaddr bridge0` or `en0` prints it there"
            )
        port = self.main_process_port or PORT
        if not 0 < port < 65536:
            raise UserError(f"--main_process_port {port}: allowed: 1 to 65535")
        return {
            "num_machines": Choice(count, "the Macs that train together"),
            "num_processes": Choice(count, "one Metal device on each Mac, so one process"),
            "machine_rank": Choice(rank, "this Mac; each has its own number, and 0 is the main one"),
            "main_process_ip": Choice(self.main_process_ip, "where the others reach the main one"),
            "main_process_port": Choice(port, "the port there, the same in every file"),
            "distributed_type": Choice(KIND, "accelerate launch starts one process alone for the kind NO"),
            "rdzv_backend": Choice("static", "each Mac has its number"),
            "same_network": Choice(True, "the Macs reach each other by that address"),
        }


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


def find(values: Values) -> list[Repair]:
    """Return what is to be changed in `values`."""
    becomes: dict[str, tuple[Any, str]] = {}
    machines, kind = values.get("num_machines") or 1, values.get("distributed_type")
    if values.get("use_cpu"):
        becomes["use_cpu"] = False, ON_THE_CPU
    if machines > 1 and kind != KIND:
        reason = "accelerate launch starts one process, which trains alone, for any other kind without a GPU of CUDA"
        becomes["distributed_type"] = KIND, reason
    elif kind == "MPS":
        becomes["distributed_type"] = "NO", "accelerate retired the type; mps is taken by itself without one"
    for key in ("use_mps_device", "mps"):
        if key in values:
            becomes[key] = None, "accelerate knows no such key any more; mps is the default"
    processes = values.get("num_processes")
    if machines > 1 and processes != machines:
        becomes["num_processes"] = machines, f"one Metal device on each of {machines} Macs"
    elif machines == 1 and processes not in (None, 1, -1):
        becomes["num_processes"] = 1, "there is one Metal device, and each process would train the whole model"
    asked = values.get("mixed_precision")
    if asked not in (None, "no"):
        try:
            precision.requested(str(asked), "mps")
        except UserError as error:
            becomes["mixed_precision"] = "no", "float8 kernels are for CUDA" if asked == "fp8" else str(error)
    return [Repair(key, values.get(key), *change) for key, change in becomes.items()]


def reasons(needed: list[Repair]) -> str:
    """Return the repairs and their reasons in one line."""
    return "; ".join(f"{repair}: {repair.reason}" for repair in needed)


def apply(values: Values, needed: list[Repair]) -> Values:
    """`values` with every repair made, older keys in today's form and the needed ones added, as accelerate does it."""
    from accelerate.commands.config.config_args import ClusterConfig

    changed: Values = {"distributed_type": "NO", "num_processes": 1, **values}
    for repair in needed:
        if repair.value is None:
            changed.pop(repair.key, None)
        else:
            changed[repair.key] = repair.value
    changed = dict(ClusterConfig.process_config(changed))
    return changed | {"mixed_precision": changed["mixed_precision"] or "no"}


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Outcome:
    """What `hf-mps config` found in the file at `path` and did with it."""

    path: Path
    existing: Values | None
    repairs: list[Repair]
    choices: dict[str, Choice[Any]] = field(default_factory=dict)
    written: bool = False
    backup: Path | None = None

    def print_json(self) -> None:
        """Print it as one JSON object."""
        values = {"config_file": self.path, "existed": self.existing is not None, "simulated": simulated()}
        values |= {name: getattr(self, name) for name in ("repairs", "choices", "written", "backup")}
        print(jsons.dumps(plain(values), indent=2))

    def print(self) -> None:
        """Print for people what was done, and what to type next."""
        if self.written:
            print(f"written: {self.path}" + (f"; the old one is {self.backup}" if self.backup else ""))
        else:
            print(f"{self.path}: nothing to repair")
        where = "" if self.path == default_place() else f" --config_file {shlex.quote(str(self.path))}"
        if "main_process_ip" in self.choices and self.choices["num_machines"].value > 1:
            words = {key: self.choices[key].value for key in ("num_machines", *OF_MACHINES)}
            count, rank = words["num_machines"], words["machine_rank"]
            words["machine_rank"] = ", ".join(str(other) for other in range(count) if other != rank)
            said = " ".join(f"--{key} {value}" for key, value in words.items())
            print(f"next: on the other Macs hf-mps config {said}, then on each accelerate launch{where} script.py")
            return
        print(f"next: accelerate test{where}, then accelerate launch{where} script.py")


def check(path: Path, *, json: bool = False) -> None:
    """Look at the file and change nothing. Raises RunError (exit 1) where something is to be repaired.

    Raises UserError for a file that is not understood.
    """
    existing = read(path)
    needed = find(existing) if existing is not None else []
    if json:
        Outcome(path, existing, needed).print_json()
    elif existing is None:
        print(f"{path}: there is {NO_FILE}")
    elif not needed:
        print(f"{path}: nothing to repair")
    if needed:
        raise RunError(f"{path}: {reasons(needed)}; next: hf-mps config --config_file {shlex.quote(str(path))}")


def run(path: Path, *, yes: bool, json: bool = False, said: Machines | None = None) -> None:
    """Settle every key, show what changes, write the file once that is confirmed and say what to type next.

    `yes` asks nothing; `said` is what the command line says of several Macs. Raises UserError where there is no Metal
    to configure for, where the file is not understood, and where nobody can be asked.
    """
    on_metal = choice.metal(owned=True)
    if not on_metal.value:
        raise UserError(f"config writes for Metal, and there is none: {on_metal.reason}")
    existing = read(path)
    if not yes and not (sys.stdin and sys.stdin.isatty()):
        raise UserError("config asks on a terminal before it writes, and stdin is none; next: hf-mps config --yes")
    if not json:
        print(*facts.facts("mps").lines(), sep="\n")
    before = existing or {}
    needed, of_file = find(before), Machines.of(before)
    values = apply(before, needed)
    metal = Choice(False, "train on the Metal GPU; Trainer, Accelerate and Lightning then agree on mps")
    default = precision.default("mps")
    used = Choice("no" if default.value == "fp32" else default.value, default.reason)
    if existing is not None:
        used = Choice(values["mixed_precision"] or "no", "the file says so")
    choices: dict[str, Choice[Any]] = {"use_cpu": metal, "mixed_precision": used}
    choices |= (said or Machines()).over(of_file).choices(of_file)
    values |= {key: choice.value for key, choice in choices.items()}
    values = {key: value for key, value in values.items() if key not in choices or value is not None}
    outcome = Outcome(path, existing, needed)
    if existing is None or values != apply(existing, []) or needed:
        if not json:
            # The difference to the file that is there, or the whole of a new one; each line with its reason.
            why = {key: choice.reason for key, choice in choices.items()}
            why |= {repair.key: repair.reason for repair in needed}
            print(f"{path} ({'new' if existing is None else 'changes'}):")
            for key in sorted(key for key in before | values if key not in before or before[key] != values.get(key)):
                if key in before:
                    print(f"  - {key}: {jsons.dumps(before[key])}")
                if key in values:
                    print(f"  + {key}: {jsons.dumps(values[key])}" + (f"    # {why[key]}" if key in why else ""))
        if not yes and not typer.confirm("Write it?", default=True):
            print(f"{path} stays as it is")
            return
        outcome = Outcome(path, existing, needed, choices, written=True, backup=write(path, values))
    outcome.print_json() if json else outcome.print()
