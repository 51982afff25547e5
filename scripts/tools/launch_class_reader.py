"""What the Mac's host launches for each aten operator of a release, read from the code of its macOS wheel.

A wheel's library keeps the names of all its functions. From the function that is registered for an operator this walks
along calls, addresses of functions and PyTorch's dispatch stubs, and notes which encoder of Metal it can come to. Where
one operator of aten calls another, the other's class counts. Nothing is run, and no Mac is needed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from hf_mps.core.errors import UserError
from hf_mps.metal.operators.table import Table, loader, parse
from scripts.tools.macho import Library, code_names

# Where the host hands work to the GPU. The linker names a stub after each Objective-C method.
ENCODERS = (
    (re.compile(r"^objc_msgSend\$dispatchThread"), "metal"),  # MTLComputeCommandEncoder
    (re.compile(r"^objc_msgSend\$(copyFromBuffer|fillBuffer)"), "blit"),  # MTLBlitCommandEncoder
    # MPSMatrixSolve…, MPSMatrixDecomposition…, MPSNDArrayMatrixMultiplication
    (re.compile(r"^objc_msgSend\$encodeTo(CommandBuffer:(source|left)|CommandEncoder:)"), "framework"),
    (re.compile(r"^_ZN2at3mps9MPSStream15executeMPSGraph"), "graph"),
)
# The host's own bookkeeping, which every graph needs and which launches a copy for a strided operand alone
# (aten/src/ATen/native/mps/OperationUtils.mm), and Autograd, which is above a device's kernels.
BESIDE = re.compile(r"3mps11PlaceholderC|16gatherViewTensor|17scatterViewTensor|10Dispatcher|13torch5autograd")
COPIES = re.compile(r"9mps_copy_|13copy_cast_mps")
COPYING = frozenset({"copy_", "_copy_from", "_copy_from_and_resize", "_local_scalar_dense"})
OPERATOR = re.compile(r"^_ZN2at4_ops(\d+)(\w+)")
WRAPPER = re.compile(r"12_GLOBAL__N_1L?(\d+)(wrapper_(\w+))")
WRAPPED = ("MPS", "CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
NO_KERNEL = ("make_boxed_from_unboxed_functor", ".cold", "D0Ev", "D1Ev", "D2Ev")
"""Parts of symbols that carry a wrapper's name and hold none of its code."""
STUBS_MPS = 24
"""Where a dispatch stub keeps its kernel for MPS, in bytes (aten/src/ATen/native/DispatchStub.h, DispatchStubImpl)."""

# What other kernels call to make room or to bring an operand into shape: it decides where nothing else is called.
HELPERS = re.compile(
    r"^(copy_|contiguous|clone|to[._].*|to|_to_copy|empty.*|resize_.*|fill_.*|zero_|zeros.*|new_.*|full.*|scalar_tensor"
    r"|result_type.*|can_cast|resolve_conj|resolve_neg|item|_local_scalar_dense)$"
)
# What composite kernels call for tensors of another kind than Metal's dense ones.
OTHERS = re.compile(r"sparse|mkldnn|cudnn|miopen|nested|quantize|^q_|^_?(values|indices|nnz)$|^(is_)?_?coalesce")
NO_LAUNCH = re.compile(r"^(empty(_.*)?|new_empty(_strided)?|_?resize_.*|set_|is_set_to|_efficientzerotensor|_to_cpu)$")
"""Base names of operators that make or change a tensor's memory, and fill it in deterministic mode alone."""


def read(dylib: Path, native_functions: bytes) -> dict[str, str]:
    """What each aten operator of a release launches on a Mac: {name: class}.

    `dylib` is torch/lib/libtorch_cpu.dylib of the release's macOS wheel, `native_functions` the content of
    its torchgen/packaged/ATen/native/native_functions.yaml. Names are the dispatcher's ("aten::add.Tensor"). A class is
    "metal", "graph", "framework" (Apple's own kernels), "blit", "view" (no launch), "cpu" (no kernel for MPS), or
    several of them joined by "+", of which the host takes one. Takes some seconds.

    Raises UserError where a file is not what it should be.
    """
    return Reader(Library(dylib), native_functions).classes()


class Reader:
    """The walk through one library's code."""

    def __init__(self, library: Library, functions: bytes) -> None:
        import yaml

        self._library, self._table = library, parse(functions)
        self._entries = {entry["func"].split("(", 1)[0]: entry for entry in yaml.load(functions, Loader=loader())}
        self._encoders = dict(_encoders(library.symbols))
        self._wrappers = _wrappers(library)
        self._stubs = dict(_stubs(library))
        self._operators = {name.replace(".", "_"): name for name in _names(self._table)}
        self._neighbours = lru_cache(maxsize=None)(self._find_neighbours)
        if not any(key == "MPS" for key, _ in self._wrappers):
            raise UserError("the library registers no operator for MPS; allowed: libtorch_cpu.dylib of a macOS wheel")

    def classes(self) -> dict[str, str]:
        """The class of every operator, by the dispatcher's name."""
        own: dict[str, set[str]] = {}
        calls: dict[str, set[str]] = {}
        for name in _names(self._table):
            own[name], calls[name] = self._walk(name)
        found = {name: self._class(name, own, calls) for name in own}
        return {f"aten::{name}": found[name] for name in sorted(found)}

    def _class(self, name: str, own: Mapping[str, set[str]], calls: Mapping[str, set[str]]) -> str:
        if f"aten::{name}" in self._table.missing | self._table.cpu:
            return "cpu"
        return "+".join(sorted(self._launches(name, own, calls, frozenset()))) or "view"

    def _launches(
        self, name: str, own: Mapping[str, set[str]], calls: Mapping[str, set[str]], above: frozenset[str]
    ) -> set[str]:
        """What an operator launches itself, or where it launches nothing, what the operators do that it calls."""
        if self._is_view(name):
            return set()
        if own[name] or name in above:
            return own[name]
        dense = {called for called in calls[name] if not OTHERS.search(called)}
        work = {called for called in dense if not HELPERS.match(called)}
        launched: set[str] = set()
        for group in (work, dense - work):
            for called in group:
                if f"aten::{called}" in self._table.missing | self._table.cpu:
                    launched.add("cpu")
                else:
                    launched |= self._launches(called, own, calls, above | {name})
            if launched:
                break
        return launched

    def _is_view(self, name: str) -> bool:
        """Whether the schema says that the result lies in an argument's memory, unwritten, or nothing is computed."""
        returns = self._entries.get(name, {"func": ""})["func"].rpartition("->")[2]
        return bool(NO_LAUNCH.match(name.partition(".")[0]) or re.search(r"\(\w+\)", returns))

    def _walk(self, name: str) -> tuple[set[str], set[str]]:
        """The encoders that an operator's host function can come to, and the operators that it calls by dispatch."""
        todo = list(self._host(name))
        seen, launched, called = set(todo), set[str](), set[str]()
        copies = name.partition(".")[0] in COPYING
        while todo:
            for target in self._neighbours(todo.pop()):
                if target in self._encoders:
                    launched.add(self._encoders[target])
                    continue
                names = self._library.symbols.get(target, [])
                matches = filter(None, map(OPERATOR.match, names))
                operators = {self._operators.get(match[2][: int(match[1])]) for match in matches}
                if operators:
                    # The linker folds equal functions: then the address does not tell which operator is meant.
                    called |= {only for only in operators if only and len(operators) == 1}
                elif target not in seen and not self._is_beside(names, copies):
                    seen.add(target)
                    todo.append(target)
        return launched, called - {name}

    @staticmethod
    def _is_beside(names: list[str], copies: bool) -> bool:
        if not names or all(".cold" in name for name in names):
            return True
        return any(BESIDE.search(name) or (COPIES.search(name) and not copies) for name in names)

    def _host(self, name: str) -> set[int]:
        """Where the code lies that is registered for an operator, for MPS or as a composite."""
        base, _, overload = name.partition(".")
        for key in WRAPPED:
            for cpp in (base, f"{base}_out"):
                for wrapper in (f"{overload}_{cpp}", f"{cpp}_{overload}" if overload else cpp):
                    if (key, wrapper) in self._wrappers and (cpp == base) != self._is_out(name):
                        return self._wrappers[key, wrapper]
        return set()

    def _is_out(self, name: str) -> bool:
        """Whether an operator writes into keyword arguments, for which C++ has the name `…_out`."""
        entry = self._entries.get(name)
        if entry is None:  # torchgen's own variants: "add.out", "_foreach_add.List_out", "sort" beside "sort.out"
            return name.endswith("out")
        return bool(re.search(r"\*,.*\(\w!\)", entry["func"].rpartition("->")[0]))

    def _find_neighbours(self, start: int) -> frozenset[int]:
        found = self._library.references(start)
        code = {place for place in found.data if self._library.is_code(place)}
        stubs = {self._stubs[place] for place in found.data if place in self._stubs}
        return (found.calls | code | stubs) - {start}


def _names(table: Table) -> list[str]:
    """Every operator of a release without its namespace."""
    every = table.native | table.composite | table.missing | table.cpu | table.python
    return sorted(name.removeprefix("aten::") for name in every if name.startswith("aten::"))


def _encoders(symbols: Mapping[int, Iterable[str]]) -> Iterator[tuple[int, str]]:
    for address, names in symbols.items():
        for name in names:
            for pattern, kind in ENCODERS:
                if pattern.match(name):
                    yield address, kind


def _wrappers(library: Library) -> dict[tuple[str, str], set[int]]:
    """The functions that torchgen writes around each kernel ("wrapper_MPS_add_Tensor"), by key and name."""
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    for address, name in code_names(library):
        match = WRAPPER.search(name) if "wrapper_" in name else None
        if match is None or any(part in name for part in NO_KERNEL):
            continue
        wrapper = match[2][: int(match[1])].removeprefix("wrapper_")
        for key in WRAPPED:
            if wrapper.startswith(f"{key}_"):
                found[key, wrapper.removeprefix(f"{key}_")].add(address)
                break
    return dict(found)


def _stubs(library: Library) -> Iterator[tuple[int, int]]:
    """Each dispatch stub (where it lies) and its kernel for MPS, from the initialisers of the Metal backend's files."""
    for address, name in code_names(library):
        if name.startswith("_GLOBAL__sub_I_") and name.endswith(".mm"):
            for place, kernel in library.references(address).stored.items():
                if library.is_code(kernel) and place - STUBS_MPS in library.symbols:
                    yield place - STUBS_MPS, kernel
