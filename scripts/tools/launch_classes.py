"""Write hf_mps/metal/operators/launch_classes.json: what each operator launches on a release, read from its macOS
wheel.

    python scripts/tools/launch_classes.py torch-2.14.1-…-macosx_14_0_arm64.whl torch-2.15.0-…

Releases that are in the file already stay. The file groups the names of operators that have the same classes. A name
without a dot is for all overloads that are not listed, one with a dot for one ("add.Tensor", "add." for the first).
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from collections import defaultdict
from pathlib import Path

from packaging.version import Version

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hf_mps.core.errors import run_command
from hf_mps.metal.kernels import fetch
from hf_mps.metal.operators import launch_class
from hf_mps.metal.operators.launch_class import ABSENT, FACTS
from scripts.tools.launch_class_reader import read

FUNCTIONS = "torchgen/packaged/ATen/native/native_functions.yaml"


def of_wheel(path: Path) -> tuple[str, dict[str, str]]:
    """A wheel's release, and the class of each of its operators. Raises UserError for what is no such wheel."""
    contents = fetch.read_wheel(path)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
        found = read(Path(archive.extract(contents.file, folder)), archive.read(FUNCTIONS))
    return contents.release, {name.removeprefix("aten::"): kind for name, kind in found.items()}


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


def merged(fresh: dict[str, dict[str, str]]) -> tuple[list[str], dict[str, str]]:
    """All releases, those of `fresh` anew, and each operator's classes on them: {"mm": "graph+metal graph+metal"}."""
    kept = {release: launch_class.of_release(release) for release in launch_class.known() if release not in fresh}
    releases = sorted({*kept, *fresh}, key=Version)
    names = {name for classes in fresh.values() for name in classes}
    bases = {name.partition(".")[0] for name in names}
    for table in kept.values():  # whose names without an overload say nothing about which overloads there are
        stored = {name.removeprefix("aten::") for name in table.names()}
        names |= {name for name in stored if "." in name or name not in bases}

    def kind(release: str, name: str) -> str:
        found = "+".join(kept[release].ways(f"aten::{name}")) if release in kept else fresh[release].get(name)
        return found or ABSENT

    return releases, {name: " ".join(kind(release, name) for release in releases) for name in sorted(names)}


def main(wheels: list[str]) -> int:
    """Read the wheels and write the file."""

    def work() -> None:
        releases, joined = merged(dict(of_wheel(Path(path)) for path in wheels))
        groups: dict[str, list[str]] = defaultdict(list)
        for name, kinds in sorted(compact(joined).items()):
            groups[kinds].append(name)
        content = {
            "releases": releases,
            "classes": {kinds: " ".join(found) for kinds, found in sorted(groups.items())},
        }
        FACTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"{FACTS.name}: {len(joined)} operators of {', '.join(releases)}, {FACTS.stat().st_size:,} bytes")

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
