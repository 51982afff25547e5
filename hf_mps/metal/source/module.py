"""The LLVM module that clang wrote, as the one that Apple's compiler would have written, and what its kernels bind.

clang's debug information has each parameter's type, size and address space, and its annotations Metal's attributes.
Both are read from the module's text and then taken out of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hf_mps.metal.kernels.signature import DEVICE, THREADGROUP, Attribute, Binding, Signature

_STRING = re.compile(r'^@([\w.]+) = private unnamed_addr addrspace\(2\) constant \[\d+ x i8\] c"([^"]*?)\\00"', re.M)
_ARGUMENTS = re.compile(r"^@([\w.]+) = private unnamed_addr addrspace\(1\) constant \{[^}]*\} (.*?), section", re.M)
_OF_FUNCTION = re.compile(
    r"addrspacecast \(ptr @(?P<function>\"[^\"]*\"|[\w.$]+) to ptr addrspace\(1\)\), ptr addrspace\(2\) @(?P<name>[\w.]+), "
    r"[^,]*, i32 \d+, ptr addrspace\(\d\) (?:@(?P<given>[\w.]+)|null)"
)
_OF_PARAMETER = re.compile(
    r"^  call void @llvm\.var\.annotation\S*\(ptr (?P<slot>%\S+), ptr addrspace\(2\) @(?P<name>[\w.]+), [^,]*, i32 \d+, "
    r"ptr addrspace\(\d\) (?:@(?P<given>[\w.]+)|null)\)",
    re.MULTILINE,
)
_SLOT = re.compile(r"#dbg_declare\(ptr (%[^,]+), !(\d+),")
_FUNCTION = re.compile(r"^define .*?@(\"[^\"]*\"|[\w.$]+)\((.*?)\).*?\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_NODE = re.compile(r"^!(\d+) = (?:distinct )?(!DI\w+\(.*\)|!\{.*\})$", re.MULTILINE)
_FIELD = re.compile(r'(\w+): (?:"([^"]*)"|(![\d]+|[\w|. ]+))')
_SHARED = re.compile(
    r"^(  %\S+ = )(?:tail )?call spir_func [^@\n]*?dereferenceable\((\d+)\) ptr addrspace\(3\) "
    r"@(\"?_ZN5metal7_shared\S*?\"?)\(\).*$",
    re.MULTILINE,
)
_DEFINED = re.compile(
    r"^(?:define [^@\n]*@\"?(?P<function>[^\"(]+)\"?\(.*?^\}|@\"?(?P<variable>[^\"\s=]+)\"? = .*?)$", re.M | re.S
)
_INTEGER = re.compile(r"= fpto([su])i (half|bfloat|float) (\S+) to (i8|i16|i32|i64)\b")
# spir's words, and what clang knows of parameters: the lowering reads types there.
_ATTRIBUTES = re.compile(
    r"\b(?:spir_func|noundef|dso_local|addrspace\(4\)|local_unnamed_addr|zeroext|signext|nonnull|noalias|returned"
    r"|dereferenceable(?:_or_null)?\(\d+\)|captures\([^)]*\)|(?<=ptr )align \d+|(?<=ptr addrspace\(\d\) )align \d+) ?"
)
_SUFFIX = {"half": "f16", "bfloat": "bf16", "float": "f32"}
_TYPES = {"unsigned int": "uint", "int": "int", "unsigned short": "ushort", "short": "short"}


@dataclass(frozen=True)
class Module:
    """LLVM assembly with the vocabulary of Apple's, and its kernels: their names for the host, and their signatures."""

    text: str
    kernels: dict[str, Signature]
    """By the host's name; the signature's is the function's in the module."""

    def only(self, kernel: str) -> str:
        """Return the assembly of one kernel: its function, and what that calls and reads."""
        parts = {match["function"] or match["variable"]: match[0] for match in _DEFINED.finditer(self.text)}
        rest = [line for line in _DEFINED.sub("", self.text).splitlines() if line]
        waiting, reached = [self.kernels[kernel].name], set[str]()
        while waiting:
            name = waiting.pop()
            if name in parts and name not in reached:
                reached.add(name)
                waiting += [found.strip('"') for found in re.findall(r"@(\"[^\"]*\"|[\w.$]+)", parts[name])]
        return "\n".join([*rest, *(text for name, text in parts.items() if name in reached)]) + "\n"


def read(text: str) -> Module:
    """Return the module that clang's assembly is.

    Raises:
        ValueError: a kernel's parameter is nothing that Metal binds or fills; the line names both.
    """
    facts = _Facts(text)
    kernels = {host: facts.signature(function) for host, function in facts.hosts.items()}
    return Module(_plain(text), kernels)


class _Facts:
    """What the debug information and the annotations of a module say."""

    def __init__(self, text: str) -> None:
        self._nodes = dict(_NODE.findall(text))
        self._strings = dict(_STRING.findall(text))
        self._given = {name: self._values(body) for name, body in _ARGUMENTS.findall(text)}
        self._bodies = {name: body for name, _, body in _FUNCTION.findall(text)}
        self._annotations: dict[str, dict[str, list[Any]]] = {}
        for found in _OF_FUNCTION.finditer(text):
            of = self._annotations.setdefault(found["function"], {})
            of[self._strings[found["name"]]] = self._given.get(found["given"] or "", [])
        names = {
            self._field(number, "linkageName") or self._field(number, "name"): self._field(number, "name")
            for number, body in self._nodes.items()
            if body.startswith("!DISubprogram")
        }
        self.hosts: dict[str, str] = {}
        for function, of in self._annotations.items():
            if "kernel" in of and function in self._bodies:
                given = of.get("host_name")
                self.hosts[given[0] if given else names[function.strip('"')]] = function

    def _values(self, body: str) -> list[Any]:
        strings = [self._strings.get(name, "") for name in re.findall(r"@([\w.]+)", body)]
        return strings or [int(number) for number in re.findall(r"i\d+ (-?\d+)", body)] or [0]

    def signature(self, function: str) -> Signature:
        body = self._bodies[function]
        parameters = self._parameters(body)
        bindings: list[Binding] = []
        attributes: list[Attribute] = []
        used: dict[bool, set[int]] = {False: set(), True: set()}
        for number, (name, kind, given) in parameters.items():
            if kind is None or self._tag(kind) in ("DW_TAG_pointer_type", "DW_TAG_reference_type"):
                bindings.append(self._binding(number, name, kind, given, used))
            else:
                filled = next(iter(given), None)
                if filled is None:
                    raise ValueError(f"the parameter {name!r} is no buffer and has no attribute")
                attributes.append(Attribute(number, filled, self._attribute_type(kind, name)))
        largest = self._annotations[function].get("max_total_threads_per_threadgroup", [1024])[0]
        return Signature(function.strip('"'), tuple(bindings), tuple(attributes), largest_group=int(largest))

    def _parameters(self, body: str) -> dict[int, tuple[str, str | None, dict[str, list[Any]]]]:
        """Each parameter's place, name, type's node and annotations."""
        slots: dict[str, tuple[int, str, str]] = {}
        for slot, node in _SLOT.findall(body):
            place = self._field(node, "arg")
            if place:
                slots[slot] = int(place) - 1, self._field(node, "name"), self._field(node, "type").lstrip("!")
        found: dict[int, tuple[str, str | None, dict[str, list[Any]]]] = {
            place: (name, kind, {}) for place, name, kind in slots.values()
        }
        for note in _OF_PARAMETER.finditer(body):
            if note["slot"] in slots:
                of = found[slots[note["slot"]][0]][2]
                of[self._strings[note["name"]]] = self._given.get(note["given"] or "", [0])
        return dict(sorted(found.items()))

    def _binding(
        self, place: int, name: str, kind: str | None, given: dict[str, list[Any]], used: dict[bool, set[int]]
    ) -> Binding:
        assert kind is not None
        space = int(self._field(kind, "dwarfAddressSpace") or 0)
        if space not in (DEVICE, THREADGROUP):
            raise ValueError(f"the parameter {name!r} points to no address space that the host can bind")
        target, constant = self._target(self._field(kind, "baseType").lstrip("!"))
        size = self._bytes(target)
        own = used[space == THREADGROUP]
        stated = given.get("threadgroup" if space == THREADGROUP else "buffer") or given.get("id")
        location = int(stated[0]) if stated else next(free for free in range(32) if free not in own)
        own.add(location)
        whole = size if self._tag(kind) == "DW_TAG_reference_type" and space == DEVICE and constant else None
        return Binding(
            place, location, space, self._name(target), name, size=size, whole=whole, writes=not constant,
            indirect=self._holds_pointers(target),
        )  # fmt: skip

    def _target(self, node: str) -> tuple[str, bool]:
        """Return a type without names and qualifiers, and whether it is constant."""
        constant = False
        while self._tag(node) in ("DW_TAG_typedef", "DW_TAG_const_type", "DW_TAG_volatile_type"):
            constant |= self._tag(node) == "DW_TAG_const_type"
            node = self._field(node, "baseType").lstrip("!")
        return node, constant

    def _bytes(self, node: str) -> int:
        return int(self._field(node, "size") or 8) // 8

    def _name(self, node: str) -> str:
        name = self._field(node, "name") or self._tag(node)
        return _TYPES.get(name, name)

    def _holds_pointers(self, node: str, depth: int = 0) -> bool:
        node, _ = self._target(node)
        if self._tag(node) == "DW_TAG_pointer_type":
            return True
        members = self._nodes.get(self._field(node, "elements").lstrip("!"), "") if depth < 4 else ""
        inner = [each for each in re.findall(r"!(\d+)", members) if self._tag(each) == "DW_TAG_member"]
        if self._tag(node) == "DW_TAG_array_type":
            inner = [node]
        return any(self._holds_pointers(self._field(each, "baseType").lstrip("!"), depth + 1) for each in inner)

    def _attribute_type(self, kind: str, name: str) -> str:
        node, _ = self._target(kind)
        count = ""
        if "DIFlagVector" in self._nodes[node]:
            elements = self._nodes[self._field(node, "elements").lstrip("!")]
            count = self._field(re.findall(r"!(\d+)", elements)[0], "count")
            node, _ = self._target(self._field(node, "baseType").lstrip("!"))
        element = self._field(node, "name")
        if element not in _TYPES:
            raise ValueError(f"the parameter {name!r} is a {element}; a position is of uint or ushort")
        return _TYPES[element] + count

    def _tag(self, node: str) -> str:
        body = self._nodes.get(node, "")
        return self._field(node, "tag") or ("basic" if body.startswith("!DIBasicType") else "")

    def _field(self, node: str, name: str) -> str:
        for key, quoted, plain in _FIELD.findall(self._nodes.get(node, "")):
            if key == name:
                return str(quoted or plain)
        return ""


def _plain(text: str) -> str:
    """The module without debug information, annotations and spir's words, its generic pointers plain ones."""
    variables: list[str] = []

    def variable(call: re.Match[str]) -> str:
        name = f"@_shared.{len(variables)}"
        # The same call in one function, inlined twice, is one variable; each call is one place of the source.
        known = f'; {call[3]}'
        for at, line in enumerate(variables):
            if line.endswith(known):
                name = f"@_shared.{at}"
                break
        else:
            variables.append(f"{name} = internal addrspace(3) global [{call[2]} x i8] undef, align 16{known}")
        return f"{call[1]}getelementptr i8, ptr addrspace(3) {name}, i64 0"

    text = _SHARED.sub(variable, text)
    lines = []
    for line in text.splitlines():
        if line.startswith(("source_filename", "target ", "!", "@llvm.global.annotations", "$", ";")):
            continue
        if line.startswith("    #dbg_") or "@llvm.var.annotation" in line or 'section "llvm.metadata"' in line:
            continue
        if line.startswith("attributes #"):
            line = re.sub(r'"[^"]*"(?:="[^"]*")?', "", line)
        else:
            line = re.sub(r", !\w[\w.]* !\d+", "", line)
            line = re.sub(r" (?:comdat(?:\(\$[^)]*\))?|!dbg !\d+)(?= |$)", "", line)
            line = _ATTRIBUTES.sub("", line)
            line = line.replace("ptr  ", "ptr ").replace("ptr ,", "ptr,").replace("ptr )", "ptr)")
        lines.append(line)
    plain = "\n".join([*variables, *lines]) + "\n"
    # A private pointer made generic, and back, is the same pointer now.
    plain = re.sub(r"\baddrspacecast ptr (\S+) to ptr(?! addrspace)", r"bitcast ptr \1 to ptr", plain)
    plain = re.sub(r"addrspacecast \(ptr (@[\w.$\"]+) to ptr ?\)", r"\1", plain)
    plain = _INTEGER.sub(_converted, plain)
    called = set(re.findall(r"call (i\d+) (@air\.convert\.[\w.]+)\((half|bfloat|float) ", plain))
    return plain + "".join(f"declare {integer} {name}({kind})\n" for integer, name, kind in sorted(called))


def _converted(found: re.Match[str]) -> str:
    """A conversion to an integer, which on Metal has a value for each float: an intrinsic's, as Apple's compiler calls."""
    sign, kind, value, integer = found.groups()
    return f"= call {integer} @air.convert.{sign}.{integer}.f.{_SUFFIX[kind]}({kind} {value})"
