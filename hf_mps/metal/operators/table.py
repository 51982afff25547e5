"""Which PyTorch operators have a Metal kernel, and what Metal makes of the others, read from the installed torch.

Every torch wheel carries the file that its dispatcher is generated from, `native_functions.yaml`. Reading it takes
about a quarter of a second, so what was read is kept as JSON in the simulator's cache under a hash of the file.
Names are the dispatcher's: `aten::add.Tensor`. torch itself is not imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from hf_mps.core import cache
from hf_mps.core.errors import UserError
from hf_mps.core.files import write_atomic
from hf_mps.metal.operators.dispatcher import ALWAYS_ON_CPU, COMPOSITE, MADE_OF_OTHERS, is_missing
from hf_mps.metal.operators.launch_class import LaunchTable

TableKind = Literal["native", "composite", "missing", "cpu", "python"]

# Registered in C++ with an error of its own ("input(device=…) and weight(device=…) must be on the same device"): it has
# an MPS kernel, which never computes anything (aten/src/ATen/mps/MPSFallback.mm).
ONLY_AN_ERROR = frozenset({"aten::_slow_conv2d_forward"})
# A singular value decomposition stays on the GPU from the release on that has a kernel for what it is made of: 2.14,
# pytorch PR 185954.
NO_LONGER_WITH = {"aten::linalg_svd": "aten::_linalg_svd.U", "aten::linalg_svd.U": "aten::_linalg_svd.U"}

# Where torch's own Python gives an operator an MPS kernel, during `import torch` and on a Linux wheel too: in 2.13,
# `mps_lib.impl("aten::linalg_lu_solve.out", …)`.
IN_PYTHON = "_refs/linalg/__init__.py"
PYTHON_KERNEL = re.compile(rb'mps_lib\.impl\(\s*"(aten::[\w.]+)"')

SETS: tuple[TableKind, ...] = ("native", "composite", "missing", "python", "cpu")
# Each sparse layout on the device has its own dispatch key, and so has its twin on the CPU. COO tensors are
# "Sparse"; the compressed layouts (CSR, CSC, BSR, BSC) are "SparseCsr", and torch 2.13 makes none on Metal.
SPARSE = {"SparseMPS": "SparseCPU", "SparseCsrMPS": "SparseCsrCPU"}
# Raise it when what is stored means something else than before.
FORMAT = 6


@dataclass(frozen=True)
class Table:
    """How each aten operator of the installed torch resolves on the dispatch key MPS (sparse tensors have others).

    `native` has a Metal kernel, `composite` is made of other operators and has no kernel, `missing` has neither
    and raises NotImplementedError on a Mac, `python` has a kernel that torch registers from Python, `cpu` are those of
    ALWAYS_ON_CPU that this release sends there. No operator is in two sets; ONLY_AN_ERROR are in none. `kernel_owners`
    maps a composite form of a structured operator to the out= form that it calls: of "aten::lgamma" it is
    "aten::lgamma.out" that has a kernel or has none.

    `sparse` holds, for each key of SPARSE, the operators that have a kernel for sparse tensors on Metal, each with
    whether that is the very function that serves the CPU's (it calls other operators on indices and values) or one that
    Metal alone has.
    """

    native: frozenset[str]
    composite: frozenset[str]
    missing: frozenset[str]
    python: frozenset[str]
    cpu: frozenset[str] = frozenset()
    kernel_owners: Mapping[str, str] = field(default_factory=dict)
    sparse: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)

    def kind(self, name: str) -> TableKind:
        """Return what `name` ("aten::add.Tensor") is on Metal.

        Raises KeyError for a name that is no aten operator of the installed torch.
        """
        if name in ONLY_AN_ERROR:
            return "native"
        for kind in SETS:
            if name in getattr(self, kind):
                return kind
        raise KeyError(name)


@lru_cache(maxsize=1)
def table() -> Table:
    """The table of the installed torch. Raises UserError where the wheel does not carry the file it is read from."""
    content = functions_file().read_bytes()
    python = b"".join(path.read_bytes() for path in _installed("torch", IN_PYTHON))
    name = f"operators-{hashlib.blake2b(content + python, digest_size=8).hexdigest()}-{FORMAT}.json"
    known = cache.find(name)
    found = None if known is None else _stored(known)
    if found is None:
        found = parse(content, python)
        _store(found, name)
    return found


def functions_file() -> Path:
    """The path of native_functions.yaml in the installed torch (package torchgen, a part of every torch wheel)."""
    for path in _installed("torchgen", "packaged/ATen/native/native_functions.yaml"):
        return path
    raise UserError(
        "the installed torch carries no torchgen/packaged/ATen/native/native_functions.yaml, the list of its "
        "operators; reinstall torch from a wheel of pytorch.org or PyPI"
    )


def _installed(package: str, file: str) -> list[Path]:
    """Return where a package, which is not imported, has a file; empty where it has none."""
    spec = find_spec(package)
    paths = [Path(folder) / file for folder in (spec.submodule_search_locations or [])] if spec else []
    return [path for path in paths if path.is_file()]


def parse(content: bytes, python: bytes = b"") -> Table:
    """Read native_functions.yaml's text into a Table; `python` is the source that registers kernels from Python.

    Source of the rules: torchgen/model.py and torchgen/gen.py.
    """
    import yaml

    every = yaml.load(content, Loader=loader())
    entries = {"aten::" + entry["func"].split("(", 1)[0].strip(): entry for entry in every}
    kinds: dict[str, TableKind] = {name: _kind(entry, entries) for name, entry in entries.items()}
    # The variants that torchgen writes itself are made of the operator they vary (native_function_generation.py:
    # generate_function registers CompositeExplicitAutograd). Those of composite operators are named but not made.
    for entry in list(entries.values()):
        for name in listed(entry.get("autogen")):
            kinds.setdefault(f"aten::{name}", "composite")
    for name in ALWAYS_ON_CPU:
        if kinds.get(name) != "native" and kinds.get(NO_LONGER_WITH.get(name, "")) != "native":
            kinds[name] = "cpu"
    for name in ONLY_AN_ERROR:
        kinds.pop(name, None)
    kinds.update({found.decode(): "python" for found in PYTHON_KERNEL.findall(python)})
    kernel_owners = {
        name: f"aten::{entry['structured_delegate']}"
        for name, entry in entries.items()
        if entry.get("structured_delegate") and kinds.get(name) == "composite"
    }
    functions = {name: _functions(entry) for name, entry in entries.items()}
    return Table(
        **{kind: frozenset(name for name, own in kinds.items() if own == kind) for kind in SETS},
        kernel_owners=kernel_owners,
        sparse={
            key: {name: of[key] == of.get(twin) for name, of in sorted(functions.items()) if key in of}
            for key, twin in SPARSE.items()
        },
    )


def _kind(entry: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]]) -> TableKind:
    keys = _functions(entry).keys()
    delegate = entry.get("structured_delegate")
    if "MPS" in keys or (delegate is not None and "MPS" in _functions(entries[f"aten::{delegate}"])):
        return "native"
    # Of a structured operator the functional and in-place forms also exist as composites over the out= form
    # (torchgen/dest/register_dispatch_key.py, CompositeExplicitAutogradNonFunctional): on a Mac it is
    # `lgamma.out` that is reported as missing, never `lgamma`.
    # An entry without `dispatch:` is CompositeImplicitAutograd; an empty one, `dispatch: {}`, has no kernel at all.
    if delegate is not None or keys & set(COMPOSITE) or "dispatch" not in entry:
        return "composite"
    return "missing"


def _functions(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the C++ function of each key of an entry's `dispatch:`, whose keys are written as "CPU, CUDA, MPS"."""
    return {key: function for keys, function in entry.get("dispatch", {}).items() for key in listed(keys)}


def listed(text: str | None) -> Iterator[str]:
    return (part.strip() for part in (text or "").split(",") if part.strip())


def loader() -> Any:
    import yaml

    # libyaml reads the file in 0.2 s; the loader in Python, for builds without it, takes ten times as long.
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _stored(path: Path) -> Table | None:
    """Return what `_store` wrote, or None where the file cannot be read or is not whole: then it is made anew."""
    try:
        kept: dict[str, Any] = json.loads(path.read_bytes())
        kept |= {kind: frozenset(kept[kind]) for kind in SETS}
        return Table(**{name: kept[name] for name in Table.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _store(fresh: Table, name: str) -> None:
    """Keep `fresh` for the next process, all or nothing. A cache that cannot be written costs time and no error."""
    with contextlib.suppress(OSError):
        folder, _ = cache.writable("")
        # JSON has no sets: `sorted` makes lists of them, in one order for every process.
        write_atomic(folder / name, json.dumps(vars(fresh), default=sorted))


Kind = Literal["native", "composite", "fallback", "refused", "unknown"]
KINDS: dict[Kind, str] = {
    "native": "its own Metal kernel",
    "composite": "made of other operators",
    "fallback": "no Metal kernel: the CPU runs it, and each call waits for the GPU",
    "refused": "a dtype that Metal does not have: it ends in an error",
    "unknown": "that release of PyTorch has no such operator",
}
FINDINGS: tuple[Kind, ...] = ("fallback", "refused")
# What PyTorch calls only while a dispatch mode looks on (areAnyTensorSubclassLike in aten/src/ATen/native/LossCTC.cpp),
# and what it calls otherwise: the same kernels, with lengths in a list.
SEEN_AS = {"aten::_ctc_loss.Tensor": "aten::_ctc_loss", "aten::_ctc_loss_backward.Tensor": "aten::_ctc_loss_backward"}
# Bookkeeping of PyTorch's own, nothing that a device computes.
NO_OPERATORS = ("prim::", "profiler::")


class OperatorSupport:
    """What Metal makes of the operators of one PyTorch: the installed one, or that of a native_functions.yaml.

    With `launches` it is that release's word which of them have a kernel, and the installed one's of what each is.
    """

    def __init__(self, file: Path | None = None, launches: LaunchTable | None = None) -> None:
        self._installed, self._launches = file is None, launches
        self._table = table() if file is None else read(file)

    def kind(self, name: str, refused: Iterable[str] = ()) -> Kind:
        """What Metal makes of `name` ("aten::add.Tensor"); `refused` are dtypes of its calls that Metal lacks."""
        if list(refused):
            return "refused"
        if not name.startswith("aten::"):
            return self._elsewhere(name)
        if self._launches is not None and name not in MADE_OF_OTHERS:
            ways = self._launches.ways(name)
            if not ways or ways == ("cpu",):
                return "fallback" if ways else "unknown"
            here = self._installed_kind(name)
            return here if here == "composite" else "native"
        return self._installed_kind(name)

    def _installed_kind(self, name: str) -> Kind:
        try:
            kind = self._table.kind(name)
        except KeyError:
            return self._elsewhere(name) if self._installed else "unknown"
        if kind == "missing" and name in MADE_OF_OTHERS:
            return "composite"
        return {"missing": "fallback", "cpu": "fallback", "python": "native"}.get(kind, kind)  # type: ignore[return-value]

    def kernel_owner(self, name: str) -> str:
        """Return the operator that has or lacks the kernel: for composite forms of a structured one the out= form."""
        return self._table.kernel_owners.get(name, name)

    def _elsewhere(self, name: str) -> Kind:
        """Return what becomes of an operator of another library, which the running dispatcher knows."""
        return "fallback" if is_missing(name) else "native"


def read(file: Path) -> Table:
    """Return the table of another release. Raises UserError where `file` is no native_functions.yaml."""
    import yaml

    try:
        support_table = parse(file.read_bytes())
    except OSError as error:
        raise UserError(f"--torch-table {file}: {error.strerror}; allowed: a native_functions.yaml") from error
    except (yaml.YAMLError, TypeError, KeyError, AttributeError, UnicodeDecodeError) as error:
        raise UserError(
            f"--torch-table {file}: no list of PyTorch's operators ({type(error).__name__}); allowed: "
            "aten/src/ATen/native/native_functions.yaml of a release"
        ) from error
    if "aten::add.Tensor" not in support_table.native | support_table.composite | support_table.missing:
        raise UserError(f"--torch-table {file}: it lists no add.Tensor; allowed: a release's native_functions.yaml")
    return support_table
