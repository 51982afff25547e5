"""Runs definitions of intrinsics on this machine: a loop over numpy arrays, compiled as kernels are, at level 3."""

import ctypes
import re
from collections.abc import Iterable
from functools import cache

import llvmlite.binding as llvm
import numpy as np

from hf_mps.metal.kernels.intrinsics import Definition, define, lanes

DTYPES = {"half": np.float16, "bfloat": np.uint16, "float": np.float32, "double": np.float64, "i1": np.bool_} | {
    f"i{n}": getattr(np, f"int{n}") for n in (8, 16, 32, 64)
}
# the loop's own lane: the index of the value, modulo 32
LANE = "@lane = internal global i32 0\ndefine internal i32 @hf.lane() {\n  %l = load i32, ptr @lane\n  ret i32 %l\n}"


def linked(definitions: Iterable[Definition]) -> str:
    """The text of a module with these definitions and all that they need, each once."""
    texts: dict[str, None] = {}
    declares: set[str] = set()
    waiting = list(definitions)
    while waiting:
        definition = waiting.pop()
        texts[definition.text] = None
        declares |= definition.declares
        waiting += [needed for name in definition.needs if (needed := define(name)) and needed.text not in texts]
    lane = "declare i32 @hf.lane()"
    lines = sorted(declares - {lane}) + ([LANE] if lane in declares else [])
    return "\n".join([*lines, *texts, ""])


def machine(features: str | None = None) -> llvm.TargetMachine:
    """This machine; with `features`, an x86-64 that has those alone. A new one each time: an engine frees its own."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    if features is not None:
        return target.create_target_machine(cpu="x86-64", features=features, opt=3)
    here = llvm.get_host_cpu_features().flatten()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=here, opt=3)


def optimised(text: str, features: str | None = None) -> llvm.ModuleRef:
    """A module after the passes of level 3, loops vectorised."""
    here = machine(features)
    module = llvm.parse_assembly(text)
    module.verify()
    module.triple, module.data_layout = llvm.get_default_triple(), str(here.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = True
    builder = llvm.create_pass_builder(here, options)
    builder.getModulePassManager().run(module, builder)
    return module


def compiled(text: str, features: str | None = None) -> llvm.ExecutionEngine:
    """An engine that holds a module."""
    engine = llvm.create_mcjit_compiler(optimised(text, features), machine(features))
    engine.finalize_object()
    return engine


def signature(definition: Definition) -> tuple[str, list[str]]:
    """(return type, parameter types) of a definition."""
    found = re.match(r"define \w+ (.+?) @[\w.]+\((.*)\) ", definition.text)
    assert found
    return found[1], [part.rsplit(" %", 1)[0] for part in re.split(r", (?=[^>]*(?:<|$|%))", found[2]) if part]


def shape_of(kind: str) -> tuple[tuple[int, ...], str]:
    """(shape of one value, scalar type): <2 x float> is ((2,), "float")."""
    found = re.fullmatch(r"<(\d+) x (\w+)>", kind)
    return ((int(found[1]),), found[2]) if found else ((), kind)


def loop(name: str, strides: tuple[int, ...]) -> str:
    """`run`: applies an intrinsic to memory that advances by a stride for each argument, and for the result."""
    definition = define(name)
    assert definition, name
    returns, kinds = signature(definition)
    lines = ["%narrow = trunc i64 %i to i32", "%l = and i32 %narrow, 31"]
    lines += ["store i32 %l, ptr @lane"] if "@hf.lane" in definition.text else []
    for i, stride in enumerate(strides):
        lines += [f"%o{i} = mul i64 %i, {stride}", f"%p{i} = getelementptr i8, ptr %a{i}, i64 %o{i}"]
    for i, kind in enumerate(kinds):
        memory = re.sub(r"\bi1\b", "i8", kind)
        if kind.startswith("ptr"):
            lines.append(f"%v{i} = {'addrspacecast' if kind != 'ptr' else 'bitcast'} ptr %p{i} to {kind}")
        else:
            lines.append(f"%m{i} = load {memory}, ptr %p{i}, align 1")
            lines.append(f"%v{i} = {'trunc' if memory != kind else 'bitcast'} {memory} %m{i} to {kind}")
    call = f"call {returns} @{name}({', '.join(f'{kind} %v{i}' for i, kind in enumerate(kinds))})"
    memory = re.sub(r"\bi1\b", "i8", returns)
    if returns == "void":
        lines.append(call)
    else:
        lines += [f"%r = {call}", f"%w = {'zext' if memory != returns else 'bitcast'} {returns} %r to {memory}"]
        lines.append(f"store {memory} %w, ptr %p{len(kinds)}, align 1")
    return _LOOP.format(
        parameters=", ".join(f"ptr noalias %a{i}" for i in range(len(strides))), body="\n  ".join(lines)
    )


_LOOP = """
define void @run({parameters}, i64 %n) {{
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
  {body}
  %next = add nuw i64 %i, 1
  %end = icmp eq i64 %next, %n
  br i1 %end, label %exit, label %loop
exit:
  ret void
}}
"""


@cache
def _engine(name: str, strides: tuple[int, ...], features: str | None = None) -> llvm.ExecutionEngine:
    definition = define(name)
    assert definition, name
    return compiled(linked([definition]) + loop(name, strides), features)


def run(name: str, *arguments: np.ndarray, count: int | None = None, features: str | None = None) -> np.ndarray:
    """The intrinsic applied to arrays whose first dimension counts the values; bfloats are uint16.

    A pointer argument takes an array of what it points to, changed in place; one row alone serves every value.
    """
    definition = define(name)
    assert definition, name
    returns, kinds = signature(definition)
    arrays = []
    for array, kind in zip(arguments, kinds, strict=True):
        if not kind.startswith("ptr"):
            size, scalar = shape_of(kind)
            array = np.ascontiguousarray(array)
            if array.dtype.itemsize == np.dtype(DTYPES[scalar]).itemsize:
                array = array.view(DTYPES[scalar])
            assert (array.dtype, array.shape[1:]) == (DTYPES[scalar], size), (name, kind, array.dtype, array.shape)
        arrays.append(array)
    count = count or max(map(len, arrays), default=1)
    if returns != "void":
        size, scalar = shape_of(returns)
        arrays.append(np.zeros((count, *size), DTYPES[scalar]))
    strides = tuple(0 if len(array) == 1 else array.nbytes // len(array) for array in arrays)
    address = _engine(name, strides, features).get_function_address("run")
    pointers = [array.ctypes.data for array in arrays]
    ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(pointers), ctypes.c_int64)(address)(*pointers, count)
    return arrays[-1]


@cache
def _lanes_engine(name: str) -> llvm.ExecutionEngine:
    definition = lanes(name)
    assert definition, name
    call = f'call void @"lanes.{name}"(ptr %i, ptr %o, i32 %m)'
    return compiled(linked([definition]) + f"\ndefine void @run(ptr %i, ptr %o, i32 %m) {{\n  {call}\n  ret void\n}}\n")


def run_lanes(name: str, slots: np.ndarray, result: np.ndarray, mask: int = 0xFFFFFFFF) -> np.ndarray:
    """A cross-lane definition on 32 slots; `result` is written where the mask has a bit."""
    address = _lanes_engine(name).get_function_address("run")
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)(address)
    call(slots.ctypes.data, result.ctypes.data, mask)
    return result
