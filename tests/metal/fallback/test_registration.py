"""Which operators fall back is asked of the dispatcher: now, and when a library registers more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from inline_snapshot import snapshot

from hf_mps.metal import fallback
from hf_mps.metal.fallback import registration
from hf_mps.metal.operators import dispatcher

pytestmark = pytest.mark.filterwarnings("ignore::hf_mps.metal.fallback.MetalFallbackWarning")

SERVES = ("MPS", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")


def lacking() -> set[str]:
    """Another way to ask than the layer's: each name, one after the other, without the layer's kernels."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    with registration.suspended():
        names = torch._C._dispatch_get_all_op_names()
        return {name for name in names if has(name, "CPU") and not any(has(name, key) for key in SERVES)}


def test_every_operator_that_the_dispatcher_lacks_is_given_or_refused_with_a_reason() -> None:
    given, refused = set(fallback.registered()), fallback.refused()
    assert lacking() <= given | set(refused)
    assert not given & set(refused)
    assert all(reason and reason[0].islower() for reason in refused.values()), "each reason completes a sentence"


def test_beyond_those_only_what_pytorch_itself_sends_to_the_cpu_or_turns_away() -> None:
    dense = {name for name in fallback.registered() if not name.endswith(")")}
    more = dense - lacking()
    always_on_cpu = {
        "aten::col2im",
        "aten::embedding_renorm_",
        "aten::linalg_svd",
        "aten::linalg_svd.U",
        "aten::upsample_nearest3d.vec",
    }
    assert more <= always_on_cpu | set(dispatcher.REFUSE_METAL) | set(dispatcher.MADE_OF_OTHERS)


def test_every_kernel_that_only_sends_to_the_cpu_is_taken_over() -> None:
    """All of Metal's kernels are asked here, as would take too long at each start."""
    with registration.suspended():
        everything = torch._C._dispatch_get_all_op_names()
        sent = {name for name in everything if dispatcher.SENT_TO_CPU.search(torch._C._dispatch_dump(name))}
    assert sent
    assert sent <= set(fallback.registered())


def test_what_has_no_counterpart_on_metal_keeps_metals_error() -> None:
    refused = fallback.refused()
    assert refused["aten::_to_sparse_csr"] == snapshot("its result or an argument is sparse")
    assert refused["aten::quantize_per_tensor"] == snapshot("quantized tensors exist on the CPU only")
    assert "aten::_fused_sdp_choice" in refused
    with pytest.raises(
        NotImplementedError, match=r"aten::quantize_per_tensor' is not currently implemented for the MPS"
    ):
        torch.quantize_per_tensor(torch.ones(2, device="mps"), 0.1, 0, torch.qint8)


def test_suspended_kernels_give_metals_error_and_come_back() -> None:
    x = torch.ones(2, device="mps")
    before = fallback.registered()
    with registration.suspended(), pytest.raises(NotImplementedError, match="aten::mode"):
        x.mode()
    assert fallback.registered() == before
    assert x.mode().values.item() == 1


def test_an_operator_that_a_python_library_registers_later_is_given() -> None:
    with torch.library._scoped_library("hf_mps_later", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        assert "hf_mps_later::twice" not in fallback.registered()
        library.impl("twice", lambda x: x * 2, "CPU")
        assert "hf_mps_later::twice" in fallback.registered()
        assert torch.ops.hf_mps_later.twice(torch.ones(2, device="mps")).tolist() == [2.0, 2.0]


def test_a_custom_op_for_the_cpu_works_on_metal_with_its_gradient() -> None:
    @torch.library.custom_op("hf_mps_later::cube", mutates_args=(), device_types="cpu")
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3

    cube.register_autograd(
        lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    x = torch.tensor([2.0], device="mps", requires_grad=True)
    cube(x).backward()
    assert x.grad.tolist() == [12.0]

    @torch.library.custom_op("hf_mps_later::fill", mutates_args=("x",), device_types="cpu")
    def fill(x: torch.Tensor) -> None:
        x.fill_(7)

    y = torch.zeros(3, device="mps")
    fill(y)
    assert y.tolist() == [7.0] * 3
    assert {"hf_mps_later::cube", "hf_mps_later::fill"} <= {one.operator for one in fallback.report().operators}


def test_a_library_with_a_metal_kernel_of_its_own_keeps_it() -> None:
    with torch.library._scoped_library("hf_mps_later", "FRAGMENT") as library:
        library.define("where(Tensor x) -> Tensor")
        library.impl("where", lambda x: x + 1, "CPU")
        library.impl("where", lambda x: x + 100, "MPS")
        assert "hf_mps_later::where" not in fallback.registered()
        assert torch.ops.hf_mps_later.where(torch.zeros(1, device="mps")).item() == 100


def test_loading_a_library_of_operators_looks_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(registration, "sweep", lambda: found.append("looked"))
    torch.ops.load_library(str(Path(torch.__file__).parent / "lib" / _a_library_of_torch()))
    assert found == ["looked"]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="builds with g++")
def test_an_extension_module_brings_its_operators(tmp_path: Path, run_python) -> None:
    """As torchvision does: an extension module that registers operators when it is loaded."""
    (tmp_path / "build.py").write_text(BUILD)
    done = run_python("build.py", cwd=tmp_path, env={"HF_MPS_SIMULATE": "1", "HF_MPS_FALLBACK": "quiet"})
    assert done.stdout.splitlines()[-2:] == snapshot(["before: False after: True", "[3.0, 3.0]"]), done.stderr[-3000:]


BUILD = '''
import importlib.util, subprocess, sysconfig, torch
from pathlib import Path
from hf_mps.metal import fallback
Path("late.cpp").write_text("""
#include <Python.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <torch/library.h>
static at::Tensor plus_two(const at::Tensor& x) { return at::add(x, 2); }
TORCH_LIBRARY(hf_mps_late, m) { m.def("plus_two(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(hf_mps_late, CPU, m) { m.impl("plus_two", &plus_two); }
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "late", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit_late() { return PyModule_Create(&module); }
""")
root = Path(torch.__file__).parent
subprocess.run(["g++", "-O0", "-std=c++20", "-shared", "-fPIC", "late.cpp", "-o", "late.so",
    f"-I{sysconfig.get_paths()['include']}", f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include",
    f"-L{root}/lib", "-ltorch_cpu", "-lc10", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"],
    check=True)
before = "hf_mps_late::plus_two" in fallback.registered()
spec = importlib.util.spec_from_file_location("late", "late.so")
spec.loader.exec_module(importlib.util.module_from_spec(spec))
print("before:", before, "after:", "hf_mps_late::plus_two" in fallback.registered())
print(torch.ops.hf_mps_late.plus_two(torch.ones(2, device="mps")).tolist())
'''


def _a_library_of_torch() -> str:
    return "libtorch_python.dylib" if sys.platform == "darwin" else "libtorch_python.so"
