"""Runs definitions of intrinsics on this machine: a loop over numpy arrays, compiled as kernels are, at level 3."""

import ctypes
import re
from collections.abc import Iterable
from functools import cache

import llvmlite.binding as llvm
import numpy as np

from hf_mps.kernels.intrinsics import Definition, define, lanes

DTYPES = {"half": np.float16, "bfloat": np.uint16, "float": np.float32, "double": np.float64, "i1": np.bool_} | {
    f"i{n}": getattr(np, f"int{n}") for n in (8, 16, 32, 64)
}


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
    return "\n".join([*sorted(declares), *texts])


@cache
def machine(features: str | None = None) -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    if features is not None:
        return target.create_target_machine(cpu="x86-64", features=features, opt=3)
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )


def compiled(text: str, features: str | None = None) -> llvm.ExecutionEngine:
    """An engine that holds a module, optimised as kernels are."""
    here = machine(features)
    module = llvm.parse_assembly(text)
    module.verify()
    module.triple, module.data_layout = llvm.get_default_triple(), str(here.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = True
    builder = llvm.create_pass_builder(here, options)
    builder.getModulePassManager().run(module, builder)
    engine = llvm.create_mcjit_compiler(module, here)
    engine.finalize_object()
    return engine


def signature(definition: Definition) -> tuple[str, list[str]]:
    """(return type, parameter types) of a definition."""
    found = re.match(r"define internal (.+?) @[\w.]+\((.*)\) ", definition.text)
    assert found
    depth, parts, current = 0, [], ""
    for letter in found[2]:
        depth += (letter in "<({") - (letter in ">)}")
        if letter == "," and not depth:
            parts.append(current)
            current = ""
        else:
            current += letter
    return found[1], [part.strip().rsplit(" %", 1)[0] for part in [*parts, current] if part.strip()]


def shape_of(kind: str) -> tuple[tuple[int, ...], str]:
    """(shape of one value, scalar type): <2 x float> is ((2,), "float")."""
    found = re.fullmatch(r"<(\d+) x (\w+)>", kind)
    return ((int(found[1]),), found[2]) if found else ((), kind)


def _memory(kind: str) -> str:
    return kind.replace("i1", "i8") if kind.rstrip(">").endswith("i1") else kind


def loop(name: str) -> str:
    """A function that applies an intrinsic to arrays: run.NAME(ptr for each argument, ptr result, count)."""
    definition = define(name)
    assert definition, name
    returns, kinds = signature(definition)
    lines = []
    for i, kind in enumerate([*kinds, returns]):
        (*size,), scalar = shape_of(_memory(kind))
        step = f"[{size[0]} x {scalar}]" if size else scalar
        lines.append(f"%p{i} = getelementptr {step}, ptr %a{i}, i64 %i")
        if i < len(kinds):
            lines.append(f"%m{i} = load {_memory(kind)}, ptr %p{i}, align 1")
            lines.append(
                f"%v{i} = trunc {_memory(kind)} %m{i} to {kind}"
                if _memory(kind) != kind
                else f"%v{i} = bitcast {kind} %m{i} to {kind}"
            )
    arguments = ", ".join(f"{kind} %v{i}" for i, kind in enumerate(kinds))
    lines.append(f"%r = call {returns} @{name}({arguments})")
    wide = _memory(returns)
    lines.append(f"%w = {'zext' if wide != returns else 'bitcast'} {returns} %r to {wide}")
    lines.append(f"store {wide} %w, ptr %p{len(kinds)}, align 1")
    parameters = ", ".join(f"ptr noalias %a{i}" for i in range(len(kinds) + 1))
    body = "\n  ".join(lines)
    return f"""
define void @"run.{name}"({parameters}, i64 %n) {{
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
def _engine(name: str, features: str | None = None) -> llvm.ExecutionEngine:
    definition = define(name)
    assert definition, name
    return compiled(linked([definition]) + loop(name), features)


def run(name: str, *arguments: np.ndarray, features: str | None = None) -> np.ndarray:
    """The intrinsic applied to arrays whose first dimension counts the values; bfloats are uint16."""
    definition = define(name)
    assert definition, name
    returns, kinds = signature(definition)
    arrays = []
    for array, kind in zip(arguments, kinds, strict=True):
        size, scalar = shape_of(kind)
        array = np.ascontiguousarray(array)
        if array.dtype.itemsize == np.dtype(DTYPES[scalar]).itemsize:
            array = array.view(DTYPES[scalar])
        assert (array.dtype, array.shape[1:]) == (DTYPES[scalar], size), (name, kind, array.dtype, array.shape)
        arrays.append(array)
    size, scalar = shape_of(returns)
    result = np.zeros((len(arrays[0]), *size), DTYPES[scalar])
    address = _engine(name, features).get_function_address(f"run.{name}")
    pointers = [array.ctypes.data for array in [*arrays, result]]
    ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(pointers), ctypes.c_int64)(address)(*pointers, len(result))
    return result


@cache
def _lanes_engine(name: str) -> llvm.ExecutionEngine:
    definition = lanes(name)
    assert definition, name
    call = f'call void @"lanes.{name}"(ptr %i, ptr %o, i32 %m)'
    return compiled(linked([definition]) + f"\ndefine void @run(ptr %i, ptr %o, i32 %m) {{\n  {call}\n  ret void\n}}\n")


def run_lanes(name: str, slots: np.ndarray, result: np.ndarray, mask: int) -> np.ndarray:
    """A cross-lane definition on 32 slots; `result` is written where the mask has a bit."""
    address = _lanes_engine(name).get_function_address("run")
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)(address)(
        slots.ctypes.data, result.ctypes.data, mask
    )
    return result
