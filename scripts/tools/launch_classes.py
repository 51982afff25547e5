"""Write hf_mps/operators/launch_classes.json: what each operator launches on releases whose macOS wheels lie here.

    python scripts/tools/launch_classes.py torch-2.13.0-…-macosx_14_0_arm64.whl torch-2.14.1-… torch-2.15.0-…

The names of operators with the same classes stand together; a name without a dot stands for all its overloads that have
no line of their own, one with a dot for one ("add.Tensor", or "add." for the first).
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from collections import defaultdict
from pathlib import Path

from packaging.version import Version

from hf_mps.kernels import launch_classes, wheel
from hf_mps.operators.launch_class import ABSENT, FACTS

FUNCTIONS = "torchgen/packaged/ATen/native/native_functions.yaml"


def of_wheel(path: Path) -> dict[str, str]:
    """The class of each operator of a wheel's release, without its namespace."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
        library = Path(folder) / "library"
        wheel.extract_library(path, library)
        found = launch_classes.read(library, archive.read(FUNCTIONS))["operators"]
    return {name.removeprefix("aten::"): kind for name, kind in found.items()}


def compact(classes: dict[str, str]) -> dict[str, str]:
    """Overloads that agree under their common name; the others one by one, the first overload as "name."."""
    overloads: dict[str, dict[str, str]] = defaultdict(dict)
    for name, kind in classes.items():
        base, _, overload = name.partition(".")
        overloads[base][f"{base}.{overload}"] = kind
    found: dict[str, str] = {}
    for base, each in overloads.items():
        kinds = list(each.values())
        most = max(kinds, key=kinds.count)
        found[base] = most
        found.update({name: kind for name, kind in each.items() if kind != most})
    return found


def main(wheels: list[str]) -> None:
    """Read the wheels and write the file."""
    read = {wheel.read(Path(path)).release: of_wheel(Path(path)) for path in wheels}
    releases = sorted(read, key=Version)
    names = sorted({name for classes in read.values() for name in classes})
    joined = {name: " ".join(read[release].get(name, ABSENT) for release in releases) for name in names}
    groups: dict[str, list[str]] = defaultdict(list)
    for name, kinds in sorted(compact(joined).items()):
        groups[kinds].append(name)
    content = {
        "releases": releases,
        "classes": {kinds: " ".join(found) for kinds, found in sorted(groups.items())},
    }
    FACTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{FACTS.name}: {len(names)} operators of {', '.join(releases)}, {FACTS.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
