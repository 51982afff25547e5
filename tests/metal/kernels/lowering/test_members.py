"""An address out of an argument buffer that is only read through is read once; one that is written through is not."""

from __future__ import annotations

from hf_mps.metal.kernels.lowering.flatten import marked

LOADS = """define void @kernel(ptr addrspace(1) %0) {{
  %1 = load ptr addrspace(1), ptr addrspace(1) %0, align 8
  %2 = load float, ptr addrspace(1) %1, align 4
  {other}
  ret void
}}
"""


def test_a_number_read_through_an_address_of_its_own_stays_as_it_is() -> None:
    found = marked(LOADS.format(other="%3 = fadd float %2, %2"))
    assert "%2 = load float, ptr addrspace(1) %1, align 4, !invariant.load !1048576" in found
    assert found.endswith("!1048576 = !{}\n")


def test_what_is_written_or_indexed_may_change() -> None:
    for other in (
        "store float %2, ptr addrspace(1) %1, align 4",
        "%3 = getelementptr inbounds float, ptr addrspace(1) %1, i64 4",
        "call void @air.other(ptr addrspace(1) %1)",
    ):
        text = LOADS.format(other=other)
        assert marked(text) == text


def test_a_number_read_from_a_binding_is_left_alone() -> None:
    text = (
        "define void @kernel(ptr addrspace(1) %0) {\n  %1 = load float, ptr addrspace(1) %0, align 4\n  ret void\n}\n"
    )
    assert marked(text) == text
