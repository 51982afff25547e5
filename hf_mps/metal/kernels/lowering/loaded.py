"""A compiled kernel in memory."""

from __future__ import annotations

import ctypes
from typing import Any

import llvmlite.binding as llvm

ENTRY = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
)


class Loaded:
    """An object file in memory; `entry` (see entry.py) can be called while this object lives."""

    def __init__(self, code: bytes) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        triple = llvm.get_process_triple()
        # An engine takes its machine over, so that each needs one of its own.
        machine = llvm.Target.from_triple(triple).create_target_machine()
        self._engine: Any = llvm.create_mcjit_compiler(llvm.parse_assembly(f'target triple = "{triple}"\n'), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self.entry = ENTRY(self._engine.get_function_address("entry"))
