"""The LLVM module that clang wrote, as the one that Apple's compiler would have written, and its kernels."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from hf_mps.metal.kernels.signature import DEVICE, THREADGROUP, Attribute, Binding, Signature

_SHARED = re.compile(
    r"^(  %\S+ = )(?:tail )?call spir_func [^@\n]*?dereferenceable\((\d+)\) ptr addrspace\(3\) "
    r"@(\"?_ZN5metal7_shared\S*?\"?)\(\).*$",
    re.MULTILINE,
)
_PART = re.compile(
    r"^(?:define [^@\n]*@\"?(?P<function>[^\"(]+)\"?\(.*?^\}|@\"?(?P<variable>[^\"\s=]+)\"? = .*?)$", re.M | re.S
)
_NAMES = re.compile(r"@\"?([\w.$]+)")
_USED = re.compile(r"@(\"[^\"]*\"|[\w.$]+)")
_INTEGER = re.compile(r"= fpto([su])i (half|bfloat|float) (\S+) to (i8|i16|i32|i64)\b")
_CHOICE = re.compile(r"(= icmp )slt( .*, zeroinitializer\n  (%\S+) = )zext( .*\n  %\S+ = xor .* \3, splat \(i\d+ -1\))")
_SUFFIX = {"half": "f16", "bfloat": "bf16", "float": "f32"}
# spir's words, and what clang knows of a parameter: the lowering reads types there. A generic pointer is a plain one.
_WORDS = re.compile(
    r"\b(?:spir_func|spir_kernel|noundef|dso_local|addrspace\(4\)|local_unnamed_addr|zeroext|signext|nonnull|noalias|returned"
    r"|dereferenceable(?:_or_null)?\(\d+\)|captures\([^)]*\)|(?<=ptr )align \d+|(?<=ptr addrspace\(\d\) )align \d+) ?"
)
_LEFT_OUT = ("source_filename", "target ", "!", "@llvm.global.annotations", "$", ";", "    #dbg_")


class Described(NamedTuple):
    """A kernel's function in the module (as the assembly spells it, quotes included), and its signature."""

    function: str
    signature: Signature


@dataclass(frozen=True)
class Module:
    """LLVM assembly in the vocabulary of Apple's compiler, and its kernels by the host's names."""

    text: str
    described: dict[str, Described]

    def signature(self, kernel: str) -> Signature:
        """Return what a kernel binds."""
        return self.described[kernel].signature

    def only(self, kernel: str) -> str:
        """Return the assembly of one kernel, named as the host does: its function, and what that calls and reads."""
        parts = {found["function"] or found["variable"]: found[0] for found in _PART.finditer(self.text)}
        rest = _PART.sub("", self.text).splitlines()
        function = self.described[kernel].function
        waiting, reached = [function.strip('"'), "llvm.global_ctors"], set[str]()
        while waiting:
            name = waiting.pop()
            if name in parts and name not in reached:
                reached.add(name)
                waiting += [used.strip('"') for used in _USED.findall(parts[name])]
        kept = [part for name, part in parts.items() if name in reached]
        called = {used.strip('"') for part in kept for used in _USED.findall(part)}
        # A declaration that nothing calls would ask for an intrinsic's meaning.
        rest = [line for line in rest if not line.startswith("declare ") or called.intersection(_NAMES.findall(line))]
        text = "\n".join([*rest, *kept]) + "\n"
        return text.replace(f"@{function}(", f'@"{kernel}"(')


def read(text: str) -> Module:
    """Return the module that clang's assembly is.

    Raises:
        ValueError: a parameter is nothing that a host binds or Metal fills; the line names it.
    """
    return Module(_plain(text), Facts(text).kernels())


def _plain(text: str) -> str:
    """The module without debug information, annotations and spir's words, and with threadgroup variables."""
    text, variables = _variables(text)
    lines = []
    for line in text.splitlines():
        if line.startswith(_LEFT_OUT) or "@llvm.var.annotation" in line or 'section "llvm.metadata"' in line:
            continue
        if line.startswith("attributes #"):
            line = re.sub(r'"[^"]*"(?:="[^"]*")?', "", line)
        else:
            line = re.sub(r", !\w[\w.]* !\d+", "", line)
            line = re.sub(r" (?:comdat(?:\(\$[^)]*\))?|!dbg !\d+|!kernel_\w+ !\d+)(?= |$)", "", line)
            line = re.sub(r"\bptr ([,)])", r"ptr\1", _WORDS.sub("", line))
        lines.append(line)
    plain = "\n".join([*variables, *lines]) + "\n"
    # The thread's own pointer made generic, or the other way, is the same pointer now.
    plain = re.sub(r"\baddrspacecast ptr (\S+) to ptr(?! addrspace)", r"bitcast ptr \1 to ptr", plain)
    plain = re.sub(r"addrspacecast \(ptr (@[\w.$\"]+) to ptr ?\)", r"\1", plain)
    plain = _INTEGER.sub(_converted, plain)
    # True is 1 in Metal's vectors and -1 in OpenCL's, where a choice by a vector looks at the sign.
    plain = _CHOICE.sub(r"\1ne\2sext\4", re.sub(r"= sext (<\d+ x i1>)", r"= zext \1", plain))
    called = sorted(set(re.findall(r"call (i\d+) (@air\.convert\.[\w.]+)\((half|bfloat|float) ", plain)))
    return plain + "".join(f"declare {integer} {name}({kind})\n" for integer, name, kind in called)


def _variables(text: str) -> tuple[str, list[str]]:
    """The calls that rewrite.py wrote for threadgroup variables as those variables: one for each function called."""
    names: dict[str, str] = {}
    made: list[str] = []

    def variable(call: re.Match[str]) -> str:
        assigned, size, function = call.groups()
        if function not in names:
            names[function] = f"@_shared.{len(names)}"
            made.append(f"{names[function]} = internal addrspace(3) global [{size} x i8] undef, align 16")
        return f"{assigned}getelementptr i8, ptr addrspace(3) {names[function]}, i64 0"

    return _SHARED.sub(variable, text), made


def _converted(found: re.Match[str]) -> str:
    """A conversion to an integer as the intrinsic of Apple's compiler: on Metal it has a value for each float."""
    sign, kind, value, integer = found.groups()
    return f"= call {integer} @air.convert.{sign}.{integer}.f.{_SUFFIX[kind]}({kind} {value})"


_STRING = re.compile(r'^@([\w.]+) = private unnamed_addr addrspace\(2\) constant \[\d+ x i8\] c"([^"]*?)\\00"', re.M)
_ARGUMENTS = re.compile(r"^@([\w.]+) = private unnamed_addr addrspace\(1\) constant \{[^}]*\} (.*?), section", re.M)
_NOTE = r"ptr addrspace\(2\) @(?P<name>[\w.]+), [^,]*, i32 \d+, ptr addrspace\(\d\) (?:@(?P<given>[\w.]+)|null)"
_OF_FUNCTION = re.compile(rf"addrspacecast \(ptr @(?P<function>\"[^\"]*\"|[\w.$]+) to ptr addrspace\(1\)\), {_NOTE}")
_OF_PARAMETER = re.compile(rf"call void @llvm\.var\.annotation\S*\(ptr (?P<slot>%\S+), {_NOTE}\)")
_SLOT = re.compile(r"#dbg_declare\(ptr (%[^,]+), !(\d+),")
_BODY = re.compile(r"^define [^@\n]*@(\"[^\"]*\"|[\w.$]+)\(.*?\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_NODE = re.compile(r"^!(\d+) = (?:distinct )?(!DI\w+\(.*\)|!\{.*\})$", re.MULTILINE)
_FIELD = re.compile(r'(\w+): (?:"([^"]*)"|(!\d+|[\w| ]+))')
_POINTERS = ("DW_TAG_pointer_type", "DW_TAG_reference_type")
_QUALIFIERS = ("DW_TAG_typedef", "DW_TAG_const_type", "DW_TAG_volatile_type", "DW_TAG_member")
_POSITIONS = {"unsigned int": "uint", "int": "int", "unsigned short": "ushort", "short": "short"}
LARGEST_GROUP = 1024
"""Threads, Metal's own limit."""

Notes = dict[str, list[Any]]


class Facts:
    """What clang's debug information and annotations say of a module's kernels.

    clang writes opaque pointers, so that the assembly alone does not tell a `device float*` from a `device half*`.
    """

    def __init__(self, text: str) -> None:
        self._nodes = {number: _fields(body) for number, body in _NODE.findall(text)}
        self._elements = {number: re.findall(r"!(\d+)", body) for number, body in _NODE.findall(text) if body[1] == "{"}
        self._strings = dict(_STRING.findall(text))
        self._given = {name: self._values(body) for name, body in _ARGUMENTS.findall(text)}
        self._bodies = dict(_BODY.findall(text))
        self._functions: dict[str, Notes] = {}
        for found in _OF_FUNCTION.finditer(text):
            self._note(self._functions.setdefault(found["function"], {}), found)

    def _values(self, body: str) -> list[Any]:
        strings = [self._strings.get(name, "") for name in re.findall(r"@([\w.]+)", body)]
        return strings or [int(number) for number in re.findall(r"i\d+ (-?\d+)", body)] or [0]

    def _note(self, notes: Notes, found: re.Match[str]) -> None:
        notes[self._strings[found["name"]]] = self._given.get(found["given"] or "", [0])

    def kernels(self) -> dict[str, Described]:
        """Return the kernels by the name that the host calls them."""
        # A function that starts constants has a unit and no name.
        named = [each for each in self._nodes.values() if "unit" in each and "name" in each]
        plain = {each.get("linkageName", each["name"]): each["name"] for each in named}
        found = {}
        for function, notes in self._functions.items():
            if "kernel" in notes and function in self._bodies:
                host = notes["host_name"][0] if "host_name" in notes else plain[function.strip('"')]
                found[host] = Described(function, self._signature(host, function, notes))
        return found

    def _signature(self, host: str, function: str, notes: Notes) -> Signature:
        bindings: list[Binding] = []
        attributes: list[Attribute] = []
        taken: dict[int, set[int]] = {DEVICE: set(), THREADGROUP: set()}
        for place, (name, kind, given) in self._parameters(self._bodies[function]).items():
            if self._nodes[kind].get("tag") in _POINTERS:
                bindings.append(self._binding(place, name, kind, given, taken))
            elif given:
                attributes.append(Attribute(place, next(iter(given)), self._position(kind, name)))
            else:
                raise ValueError(f"the kernel {host}: the parameter {name!r} is no buffer and has no attribute")
        largest = int(notes.get("max_total_threads_per_threadgroup", [LARGEST_GROUP])[0])
        return Signature(host, tuple(bindings), tuple(attributes), largest_group=min(largest, LARGEST_GROUP))

    def _parameters(self, body: str) -> dict[int, tuple[str, str, Notes]]:
        """Each parameter's name, node of its type and annotations, by its place."""
        slots: dict[str, int] = {}
        found: dict[int, tuple[str, str, Notes]] = {}
        for slot, number in _SLOT.findall(body):
            variable = self._nodes[number]
            if "arg" in variable:
                slots[slot] = int(variable["arg"]) - 1
                found[slots[slot]] = variable.get("name", ""), variable["type"], {}
        for note in _OF_PARAMETER.finditer(body):
            if note["slot"] in slots:
                self._note(found[slots[note["slot"]]][2], note)
        return dict(sorted(found.items()))

    def _binding(self, place: int, name: str, kind: str, given: Notes, taken: dict[int, set[int]]) -> Binding:
        pointer = self._nodes[kind]
        space = int(pointer.get("dwarfAddressSpace", 0))
        if space not in taken:
            raise ValueError(f"the parameter {name!r} names no address space; next: device, constant or threadgroup")
        target, constant = self._plain(pointer.get("baseType", ""))
        stated = given.get("threadgroup" if space == THREADGROUP else "buffer")
        # As Metal numbers them: an argument without a place gets the first that is free.
        location = stated[0] if stated else next(free for free in range(32) if free not in taken[space])
        taken[space].add(location)
        size = int(self._nodes.get(target, {}).get("size", 8)) // 8
        fixed = constant and space == DEVICE and pointer["tag"] == "DW_TAG_reference_type"
        return Binding(
            place, location, space, self._nodes.get(target, {}).get("name", "void"), name, size=size,
            whole=size if fixed else None, writes=not constant, indirect=self._holds_pointers(target),
        )  # fmt: skip

    def _plain(self, node: str) -> tuple[str, bool]:
        """A type without names and qualifiers, and whether it is constant."""
        constant = False
        while (fields := self._nodes.get(node, {})).get("tag") in _QUALIFIERS:
            constant |= fields["tag"] == "DW_TAG_const_type"
            node = fields.get("baseType", "")
        return node, constant

    def _holds_pointers(self, node: str) -> bool:
        """Whether a struct's members, or an array's elements, are pointers: an argument buffer."""
        node, _ = self._plain(node)
        fields = self._nodes.get(node, {})
        tag = fields.get("tag")
        if tag == "DW_TAG_array_type":
            return self._holds_pointers(fields["baseType"])
        members = self._elements.get(fields.get("elements", ""), []) if tag == "DW_TAG_structure_type" else []
        kinds = [each for each in members if self._nodes.get(each, {}).get("tag") == "DW_TAG_member"]
        return tag == "DW_TAG_pointer_type" or any(map(self._holds_pointers, kinds))

    def _position(self, kind: str, name: str) -> str:
        """A position's type in Metal's words: "uint3"."""
        node, _ = self._plain(kind)
        count = ""
        if self._nodes[node].get("tag") == "DW_TAG_array_type":
            count = self._nodes[self._elements[self._nodes[node]["elements"]][0]]["count"]
            node, _ = self._plain(self._nodes[node]["baseType"])
        element = self._nodes[node].get("name", "")
        if element not in _POSITIONS:
            raise ValueError(f"the parameter {name!r} is of type {element}; a position is of uint or ushort")
        return _POSITIONS[element] + count


def _fields(body: str) -> dict[str, str]:
    """The fields of a node; a reference to another one is its number."""
    return {key: quoted or plain.lstrip("!") for key, quoted, plain in _FIELD.findall(body)}
