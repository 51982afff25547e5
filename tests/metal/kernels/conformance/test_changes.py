"""A kernel changed where its instructions did; names, metadata and debug facts are not looked at."""

from __future__ import annotations

from scripts.conformance.changes import digest

BEFORE = """; ModuleID = 'here'
source_filename = "gelu"

define void @gelu(ptr addrspace(1) %0) #0 {
  %2 = load float, ptr addrspace(1) %0, align 4, !tbaa !22, !noalias !3
  %3 = call fastcc float @_ZN3c105metal3erfIfEEfT_(float %2) #4
  store float %3, ptr addrspace(1) %0, align 4, !tbaa !22
  ret void
}

declare float @air.exp.f32(float) #1

!22 = !{!"float", !3}
"""


def test_names_and_metadata_do_not_count() -> None:
    other = BEFORE.replace("@gelu", "@other").replace("3erfIfEEfT_", "3erfIfEEvT_").replace("!22", "!40")
    assert digest(other.replace("#4", "#9").replace("'here'", "'there'")) == digest(BEFORE)


def test_instructions_and_intrinsics_do() -> None:
    assert digest(BEFORE.replace("align 4", "align 8")) != digest(BEFORE)
    assert digest(BEFORE.replace("air.exp", "air.log")) != digest(BEFORE)
