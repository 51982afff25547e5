"""What a kernel says of itself in its module's metadata: bindings, thread attributes, structs, limits.

`!air.kernel` of a module names the function and describes each parameter in order: a buffer with its location (the
index at which the host binds it), address space, access, size and type, or an attribute of the thread
(`thread_position_in_grid`, …). Only the text of the module is read, so that this needs no LLVM.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

DEVICE, CONSTANT, THREADGROUP = 1, 2, 3
LOCATIONS = 32
"""Buffers are bound at 0 to 30 (Metal's limit is 31); offsets of threadgroup memory follow at LOCATIONS + location."""
SPACES = {DEVICE: "device", CONSTANT: "constant", THREADGROUP: "threadgroup"}

_NODE = re.compile(r"^!(\d+) = (?:distinct )?!\{(.*)\}$", re.MULTILINE)
_KERNELS = re.compile(r"^!air\.kernel = !\{(.*)\}$", re.MULTILINE)
_ATOM = re.compile(r'!"((?:[^"\\]|\\.)*)"|!(\d+)|ptr @("[^"]*"|[\w.$]+)|i\d+ (-?\d+)|null')
_CALLED = re.compile(r"@(air\.[\w.]+)\(")


@dataclass(frozen=True)
class Member:
    """A member of a bound struct: its offset and size in bytes, number of elements (0: no array), type and name."""

    offset: int
    size: int
    count: int
    type: str
    name: str
    indirect: int | None = None
    """The location of a pointer inside an indirect (argument) buffer, or None for plain data."""


class Node(NamedTuple):
    """A reference to another node of the metadata."""

    number: int


@dataclass(frozen=True)
class Binding:
    """A buffer that the host binds, or threadgroup memory whose size the host sets."""

    parameter: int
    location: int
    space: int
    type: str
    name: str
    size: int = 0
    """Bytes of one element of the declared type."""
    whole: int | None = None
    """Bytes of the whole buffer where the kernel fixes it (a reference to a scalar or struct), else None."""
    writes: bool = False
    used: bool = True
    indirect: bool = False
    """The buffer holds pointers to other buffers (an argument buffer)."""
    members: tuple[Member, ...] = ()
    present: bool = True
    """False where a function constant that was stated leaves the buffer out (constants.py): nothing is bound."""


@dataclass(frozen=True)
class Attribute:
    """A parameter that Metal fills: its name (`thread_position_in_grid`, …) and type (`uint`, `uint3`, …)."""

    parameter: int
    name: str
    type: str

    @property
    def width(self) -> int:
        """The number of dimensions that the kernel asks for, 1 to 3."""
        return int(self.type[-1]) if self.type[-1].isdigit() else 1


@dataclass(frozen=True)
class Signature:
    """A kernel's bindings by location, its thread attributes, and the largest threadgroup it allows."""

    name: str
    bindings: tuple[Binding, ...]
    attributes: tuple[Attribute, ...]
    intrinsics: frozenset[str] = field(default_factory=frozenset)
    largest_group: int = 1024
    """`[[max_total_threads_per_threadgroup]]` where the kernel states it, else Metal's own limit."""

    def at(self, location: int) -> Binding | None:
        """The buffer bound at a location; None where the kernel has none."""
        return next((each for each in self.bindings if each.location == location and each.space != THREADGROUP), None)

    @property
    def dimensions(self) -> int:
        """Dimensions of the grid that the kernel reads its thread's place in, 1 to 3; 0 where it reads none."""
        return next((each.width for each in self.attributes if each.name == "thread_position_in_grid"), 0)


@dataclass(frozen=True)
class Compiled:
    """A kernel's object file for this CPU, and what a launch must know of it."""

    signature: Signature
    threadgroup_bytes: int
    """Threadgroup memory that the kernel declares; what the host asks for follows it."""
    code: bytes


def read(text: str, name: str) -> Signature:
    """The signature of the kernel `name` in a module's LLVM assembly.

    Raises:
        ValueError: the module declares no such kernel.
    """
    nodes = {int(number): body for number, body in _NODE.findall(text)}
    for reference in re.findall(r"!(\d+)", "".join(_KERNELS.findall(text))):
        function, _, parameters = _atoms(nodes[int(reference)])[:3]
        if function == name:
            return _signature(name, text, nodes, parameters)
    raise ValueError(f"the module declares no kernel {name}")


def _signature(name: str, text: str, nodes: dict[int, str], parameters: Node) -> Signature:
    bindings: list[Binding] = []
    attributes: list[Attribute] = []
    for reference in _atoms(nodes[parameters.number]):
        atoms = _atoms(nodes[reference.number])
        if atoms[1] == "air.function_constant":  # whether it is bound follows from a constant, the node after it
            del atoms[1:3]
        if atoms[1] in ("air.buffer", "air.indirect_buffer"):
            bindings.append(_binding(atoms, nodes))
        else:
            attributes.append(Attribute(atoms[0], atoms[1].removeprefix("air."), _after(atoms, "air.arg_type_name")))
    largest = min([1024, *map(int, re.findall(r'!\{!"air\.max_work_group_size", i32 (\d+)\}', text))])
    return Signature(name, tuple(bindings), tuple(attributes), frozenset(_CALLED.findall(text)), largest)


def _binding(atoms: list[Any], nodes: dict[int, str]) -> Binding:
    members = _after(atoms, "air.struct_type_info")
    return Binding(
        parameter=atoms[0],
        location=_after(atoms, "air.location_index"),
        space=_after(atoms, "air.address_space"),
        type=_after(atoms, "air.arg_type_name", ""),
        name=_after(atoms, "air.arg_name", ""),
        size=_after(atoms, "air.arg_type_size", 0),
        whole=_after(atoms, "air.buffer_size"),
        writes="air.read_write" in atoms or "air.write" in atoms,
        used="air.arg_unused" not in atoms,
        indirect=atoms[1] == "air.indirect_buffer",
        members=tuple(_members(_atoms(nodes[members.number]), nodes)) if members else (),
        present="air.absent" not in atoms,
    )


def _members(atoms: list[Any], nodes: dict[int, str]) -> list[Member]:
    """The members that a struct's description lists: offset, size, count, type and name of each, then its details."""
    members: list[Member] = []
    # A struct_type_info in the list, with its node, describes the member that follows it.
    plain = [atom for at, atom in enumerate(atoms) if "air.struct_type_info" not in atoms[max(at - 1, 0) : at + 1]]
    at = 0
    while at + 4 < len(plain):
        offset, size, count, kind, name = plain[at : at + 5]
        at += 5
        indirect = None
        if at < len(plain) and plain[at] == "air.indirect_argument":
            argument = plain[at + 1]
            node = _atoms(nodes[argument.number]) if isinstance(argument, Node) else None
            indirect = int(argument if node is None else _after(node, "air.location_index", 0))
            at += 2
        members.append(Member(offset, size, count, kind, name, indirect))
    return members


def _after(atoms: list[Any], tag: str, otherwise: Any = None) -> Any:
    # A location is followed by its array length, which is 1 throughout.
    return atoms[atoms.index(tag) + 1] if tag in atoms else otherwise


_MADE: tuple[Callable[[str], Any], ...] = (str, lambda node: Node(int(node)), lambda name: name.strip('"'), int)
"""What becomes of each group of _ATOM, one of which has matched; none has where the atom is null."""


def _atoms(body: str) -> list[Any]:
    places = ((match, match.lastindex) for match in _ATOM.finditer(body))
    return [_MADE[place - 1](match[place]) if place else None for match, place in places]
