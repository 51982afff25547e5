"""Accelerate's configuration file: where it is, what it says, and how it is written; never without a backup."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from hf_mps.core.errors import UserError
from hf_mps.core.files import write_atomic

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
ONE_PROCESS = ("NO", "MPS")
SEVERAL = (*ONE_PROCESS, "MULTI_GPU", "MULTI_CPU")
"""The kinds that a file for several Macs may say; `accelerate config` writes MULTI_GPU for several machines."""


def default_place() -> Path:
    """Where `accelerate launch` looks without --config_file; follows HF_HOME and XDG_CACHE_HOME as accelerate does."""
    from accelerate.commands.config.config_args import default_config_file

    return Path(default_config_file)


def known_keys() -> frozenset[str]:
    """Return every key that the installed accelerate takes in a file for this kind of machine."""
    from accelerate.commands.config.config_args import ClusterConfig

    return frozenset(ClusterConfig.__dataclass_fields__)


def read(path: Path) -> Values | None:
    """Return what the file at `path` says, or None where there is none or it is empty.

    Raises UserError where it is not understood: no YAML, unknown keys, or a configuration for other machines.
    """
    if not path.exists():
        return None
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML: `accelerate config default` writes it
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        first = " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read as YAML: {first}; it stays as it is; {_elsewhere(path)}") from error
    if values is None:
        return None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds a {type(values).__name__}, not keys; it stays as it is; {_elsewhere(path)}")
    where = values.get("compute_environment", "LOCAL_MACHINE")
    kind = values.get("distributed_type", "NO")
    kind = "NO" if kind is False else kind  # YAML 1.1 reads a bare NO as false
    machines = values.get("num_machines", 1)
    several = isinstance(machines, int) and machines > 1
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
        raise UserError(f"{path}: is for other machines ({words}); it stays as it is; {_elsewhere(path)}")
    unknown = sorted(set(map(str, values)) - known_keys() - set(OLDER))
    if unknown:
        raise UserError(
            f"{path}: has keys that the installed accelerate does not know ({', '.join(unknown)}); it stays as it is; "
            f"{_elsewhere(path)}"
        )
    return values


def write(path: Path, values: Values) -> Path | None:
    """Write `values` as accelerate itself does, and return the backup of what was there, or None.

    The file is read back through accelerate. Raises UserError where the place cannot be written.
    """
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    content = ClusterConfig(**values).to_dict()
    text = json.dumps(content, indent=2, sort_keys=True) + "\n" if path.suffix == ".json" else yaml.safe_dump(content)
    try:
        backup = _back_up(path)
        write_atomic(path, text)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}; {_elsewhere(path)}") from error
    load_config_from_file(str(path))
    return backup


def _back_up(path: Path) -> Path | None:
    """Copy the file to NAME.bak, NAME.bak-2, …: the first that is not there."""
    if not path.exists():
        return None
    place, number = path.with_name(f"{path.name}.bak"), 2
    while place.exists():
        place, number = path.with_name(f"{path.name}.bak-{number}"), number + 1
    shutil.copy2(path, place)
    return place


def _elsewhere(path: Path) -> str:
    return f"next: hf-mps config --config_file {path.with_name('mac.yaml')}"
