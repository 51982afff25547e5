"""A kernel's module made one function for the host: intrinsics and helpers inlined, threadgroup memory by offset.

The bitcode is for Apple's AIR target, whose layout of data agrees with that of the 64-bit hosts. What is left to the
next step are calls that need the other lanes (barriers, simd operations) and two calls of ours: `@hf.lane()`, the
lane's index in its simdgroup, and `@hf.threadgroup(i64)`, the threadgroup memory at an offset.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite.binding as llvm

from hf_mps.core.errors import RunError
from hf_mps.metal.kernels import intrinsics
from hf_mps.metal.kernels.intrinsics.body import bytes_of

ALIGNMENT = 16
"""Threadgroup variables begin at multiples of it, in bytes: the largest vector's alignment that kernels use."""

_SHARED = re.compile(r"^(@[^\s=]+) = (?:internal|private|weak|dso_local|(?:local_)?unnamed_addr|\s)*addrspace\(3\)")
# A barrier of the simdgroup without a memory fence (mem_none): a schedule's hint, on which no value may rely.
_UNFENCED = re.compile(r"^  (?:tail )?call void @air\.simdgroup\.barrier\(i32 0, i32 \d+\).*\n", re.MULTILINE)
_CALLED = re.compile(r"@(air\.[\w.]+)\(")
_QUOTED = re.compile(r'"[^"]*"(?:="[^"]*")?')
_LOOP = re.compile(r", !llvm\.loop !\d+")
_VECTOR = re.compile(r"(\b(?:load|store) <\d+ x (\w+)>.* ptr addrspace\([12]\) [^,]+), align \d+")
_LINKAGE = re.compile(r"^define (?:(?:weak_odr|linkonce_odr|weak|linkonce|internal|private|dso_local|hidden) )*")
_HELPERS = "declare i32 @hf.lane() nounwind willreturn memory(none)\n" + (
    "declare ptr addrspace(3) @hf.threadgroup(i64) nounwind willreturn memory(none)\n"
)


@dataclass(frozen=True)
class Flat:
    """One function's module as text, the bytes of threadgroup memory it declares, and the cross-lane calls left."""

    text: str
    threadgroup_bytes: int
    crossing: tuple[str, ...]


@cache
def target() -> Any:
    """This CPU, with all its vector instructions."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple = llvm.Target.from_triple(llvm.get_process_triple())
    return triple.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, codemodel="jitdefault"
    )


def optimised(text: str, *, level: int = 3, vectors: bool = True, unrolled: bool) -> Any:
    """The module of an assembly's text after LLVM's passes for this CPU."""
    module = llvm.parse_assembly(text)
    module.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=level)
    tuning.loop_vectorization = tuning.slp_vectorization = tuning.loop_interleaving = vectors
    tuning.loop_unrolling = unrolled
    builder = llvm.create_pass_builder(target(), tuning)
    builder.getModulePassManager().run(module, builder)
    return module


def flatten(name: str, bitcode: bytes) -> Flat:
    """The kernel as one function `@kernel`, everything that a lane can do alone inlined into it.

    Raises:
        RunError: the kernel calls an intrinsic whose meaning is not known here, which the line names.
    """
    module = llvm.parse_bitcode(bitcode)
    sizes = {
        f"@{each.name}": target().target_data.get_abi_size(each.global_value_type) for each in module.global_variables
    }
    text = _UNFENCED.sub("", intrinsics.narrowed(str(module)))
    called = sorted(set(_CALLED.findall(text)))
    crossing = {each for each in called if intrinsics.kind(each) != "lane"}
    unknown = [each for each in called if each not in crossing and intrinsics.define(each) is None]
    if unknown:
        raise RunError(f"the kernel {name} calls {', '.join(unknown)}, whose meaning hf_mps does not know")
    text, shared = _threadgroup_by_offset(text, sizes)
    text, helpers = intrinsics.explicit(_for_host(text, name))
    needed = intrinsics.gathered(
        [*called, *helpers], lambda each: None if each in crossing else intrinsics.define(each)
    )
    # Inline, and make values of memory: a lane's own variables then need no frame. Vectors come later, when the loop
    # over threads is there: a kernel's inner loop made vectors now would keep that one from it.
    # A loop with a barrier in it is one place to suspend at; unrolled, it is as many as it has turns. Products of
    # matrices that follow one another are one place together, and their tiles are values then.
    unroll = "multiply_accumulate" in text
    module = optimised(joined(text, _HELPERS, *needed), level=3 if unroll else 1, vectors=False, unrolled=unroll)
    # What LLVM found out of a value's range, which the next steps' patterns for arguments do not know.
    flat = re.sub(r" range\(i\d+ -?\d+, -?\d+\)", "", marked(str(module)))
    if re.search(r"^@llvm\.global_ctors = \w+ global \[[1-9]", flat, re.MULTILINE):
        raise RunError(f"the kernel {name} has function constants, of which something is left to compute when it runs")
    start = flat.index("define dso_local void @kernel(")
    body = flat[start : flat.index("\n}\n", start)]
    return Flat(flat, shared, tuple(dict.fromkeys(each for each in _CALLED.findall(body) if each in crossing)))


def _for_host(text: str, name: str) -> str:
    """The module for this CPU's target, its kernel called @kernel and all else ready to be inlined."""
    lines = []
    for line in text.splitlines():
        if line.startswith(("target ", "!air.", "!llvm.", "@llvm.compiler.used")):
            continue
        if line.startswith("!"):
            line = re.sub(r"\bptr @[^,}]+", "ptr null", line)
        if line.startswith("attributes #"):
            line = _QUOTED.sub("", line).replace(" noinline", "").replace(" optnone", "")
        elif line.startswith("define "):
            line = _for_inlining(line, name)
        lines.append(_VECTOR.sub(_aligned_as_elements, _LOOP.sub("", line)))
    layout = f'target datalayout = "{target().target_data}"\ntarget triple = "{target().triple}"\n'
    return layout + "\n".join(lines) + "\n"


def _aligned_as_elements(access: re.Match[str]) -> str:
    """A vector in a buffer may begin at any element: undefined on Metal, and no reason to end a process here."""
    return f"{access[1]}, align {bytes_of(access[2])}"


def _for_inlining(line: str, name: str) -> str:
    """A definition's first line: the kernel renamed and kept, every other function internal and inlined always."""
    for called in (f"@{name}(", f'@"{name}"('):
        if called in line:
            return "define dso_local void @kernel(" + _QUOTED.sub("", line.split(called, 1)[1])
    line = re.sub(r' section "[^"]*"', "", line)
    return _LINKAGE.sub("define internal ", line).removesuffix("{") + "alwaysinline {"


_NAMED = re.compile(r"^(?:declare|define) [^@\n]*@([\w.$]+)\(", re.MULTILINE)


def joined(*texts: str) -> str:
    """Texts of modules as one: a definition takes the place of declarations, and a declaration comes once."""
    whole = "\n".join(texts)
    defined = set(re.findall(r"^define [^@\n]*@([\w.$]+)\(", whole, re.MULTILINE))
    lines = []
    for line in whole.splitlines():
        declared = _NAMED.match(line) if line.startswith("declare ") else None
        if declared is not None:
            if declared.group(1) in defined:
                continue
            defined.add(declared.group(1))
        lines.append(line)
    return "\n".join(lines) + "\n"


def _threadgroup_by_offset(text: str, sizes: dict[str, int]) -> tuple[str, int]:
    """Threadgroup variables become offsets into the group's memory, which a call at each function's head gives."""
    offsets: dict[str, int] = {}
    end, lines = 0, []
    for line in text.splitlines():
        declared = _SHARED.match(line)
        if declared:
            end = -(-end // ALIGNMENT) * ALIGNMENT
            offsets[declared.group(1)] = end
            end += sizes[declared.group(1).replace('"', "")]
        else:
            lines.append(line)
    if not offsets:
        return text, 0
    whole = "\n".join(lines) + "\n" + _HELPERS.splitlines()[1] + "\n"
    return re.sub(r"^define .*?^}$", lambda match: _by_offset(match.group(), offsets), whole, flags=re.M | re.S), end


def _by_offset(function: str, offsets: dict[str, int]) -> str:
    head, *rest = function.splitlines()
    prelude: dict[str, str] = {}

    def named(instruction: str) -> str:
        if instruction not in prelude:
            prelude[instruction] = f"%hf.shared.{len(prelude)}"
        return prelude[instruction]

    body = []
    for line in rest:
        for name, offset in offsets.items():
            if name in line:
                base = named(f"call ptr addrspace(3) @hf.threadgroup(i64 {offset})")
                line = re.sub(re.escape(name) + r"(?![\w.$])", base, line)
        body.append(_without_constant_expressions(line, named) if "%hf.shared." in line else line)
    given = [f"  {value} = {instruction}" for instruction, value in prelude.items()]
    at = 1 if body and re.match(r'^[\w."-]+:', body[0]) else 0
    return "\n".join([head, *body[:at], *given, *body[at:]])


_EXPRESSION = re.compile(r"\b(getelementptr|addrspacecast|ptrtoint|inttoptr|bitcast)((?: \w+)*) \(")


def _without_constant_expressions(line: str, named: Any) -> str:
    """Constant expressions on a variable that is no constant any more become instructions at the function's head."""
    while (inner := _innermost(line)) is not None:
        start, end, instruction = inner
        line = line[:start] + named(instruction) + line[end:]
    return line


def _innermost(line: str) -> tuple[int, int, str] | None:
    for match in reversed(list(_EXPRESSION.finditer(line))):
        depth, at = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(line[at], 0)
            at += 1
        inside = line[match.end() : at - 1]
        if "%hf.shared." in inside:
            return match.start(), at, f"{match.group(1)}{match.group(2)} {inside}"
    return None


_ADDRESS = re.compile(r"^  (%\S+) = load ptr addrspace\(1\), ptr ", re.MULTILINE)
_NODE = 1 << 20
"""A number that no metadata of a kernel has."""


def marked(text: str) -> str:
    """A function with loads marked as invariant whose address was loaded itself, and is used for nothing else.

    Fused optimizers read a parameter's step for each element, through one address of their argument buffer, and write
    the parameter through another. For all that LLVM knows the two are the same memory: it would read the step again,
    and raise two numbers to its power, for each element. A host lists no tensor twice where one of the two is written.
    """
    found = False
    for address in _ADDRESS.findall(text):
        uses = re.findall(rf"^.*[ (]{address}(?=[,)\s]).*$", text, re.MULTILINE)[1:]  # the first one makes it
        if uses and all(re.search(rf" = load [^,]+, ptr addrspace\(1\) {address},", use) for use in uses):
            for use in uses:
                found, text = True, text.replace(use, f"{use}, !invariant.load !{_NODE}")
    return f"{text}\n!{_NODE} = !{{}}\n" if found else text
