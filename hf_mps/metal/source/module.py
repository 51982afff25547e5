"""The LLVM module that clang wrote, as the one that Apple's compiler would have written, and its kernels."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hf_mps.metal.kernels.signature import Signature
from hf_mps.metal.source import debug_info
from hf_mps.metal.source.debug_info import Described

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
    """Return the module that clang's assembly is. Raises ValueError where `debug_info.kernels` does."""
    return Module(_plain(text), debug_info.kernels(text))


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
