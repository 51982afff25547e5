"""`hf-mps config`: Accelerate's configuration file for a Mac, written with reasons and repaired where it is wrong.

hf-mps config                      ask two questions and write the default file
hf-mps config --yes                ask nothing
hf-mps config --check              change nothing; exit 1 where the file keeps training off Metal
"""

from __future__ import annotations

from pathlib import Path

from hf_mps.core.errors import RunError

FOUND = 1


def run(config_file: str | None = None, *, yes: bool = False, check: bool = False, json: bool = False) -> None:
    """Write or repair Accelerate's configuration, by default in the place where `accelerate launch` looks.

    `yes` takes every default; `check` only looks and raises RunError (exit 1) where something is to be repaired;
    `json` prints one object and implies `yes`. Raises UserError for a file that it does not understand and where
    questions cannot be asked.
    """
    from hf_mps.doctor.accelerate_config import file, wizard

    path = Path(config_file).expanduser() if config_file else file.default_place()
    if check:
        _check(path, json=json)
    else:
        wizard.run(path, yes=yes or json, json=json)


def _check(path: Path, *, json: bool) -> None:
    from hf_mps.doctor.accelerate_config import file, repairs

    existing = file.read(path)
    found = repairs.find(existing.values) if existing is not None else []
    if json:
        from hf_mps.doctor.accelerate_config import wizard

        wizard.print_json(path, existing, found, written=False)
    elif existing is None:
        print(f"{path}: there is none; Accelerate asks the machine itself, and takes Metal")
    elif not found:
        print(f"{path}: nothing to repair")
    if found:
        words = "; ".join(f"{repair}: {repair.reason}" for repair in found)
        raise RunError(f"{path}: {words}; next: hf-mps config --config_file {path}")
