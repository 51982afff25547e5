"""What a Mac refuses is refused here too, with the same exception and the same words."""

from __future__ import annotations

import pytest
import torch

from hf_mps.core.errors import UserError
from hf_mps.metal import simulator
from hf_mps.metal.device import profiles
from hf_mps.metal.operators.table import table

pytestmark = pytest.mark.usefixtures("mps")

FLOAT64 = (
    r"Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64\. "
    r"Please use float32 instead\."
)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.ones(2, dtype=torch.float64, device="mps"),
        lambda: torch.ones(2, dtype=torch.float64).to("mps"),
        lambda: torch.ones(2, device="mps").double(),
        lambda: torch.ones(2, device="mps").to(torch.float64),
        lambda: torch.empty_strided((2,), (1,), dtype=torch.float64, device="mps"),
        lambda: torch.nn.Linear(2, 2).double().to("mps"),
        lambda: torch.tensor([1.0], dtype=torch.float64, device="mps"),
    ],
    ids=["factory", "copy", "double", "to", "strided", "module", "tensor"],
)
def test_float64_is_refused_in_metals_words(call) -> None:
    with pytest.raises(TypeError, match=FLOAT64):
        call()


def test_a_python_float_is_no_float64() -> None:
    x = torch.ones(2, device="mps") * 0.1
    assert x.dtype == torch.float32
    assert torch.tensor(0.5, device="mps").dtype == torch.float32
    assert (torch.ones(2, device="mps") + torch.tensor(0.1, dtype=torch.float64)).dtype == torch.float32


# The device without the layer's own fallback.
BARE = {"HF_MPS_SIMULATE": "1", "PYTORCH_ENABLE_MPS_FALLBACK": None, "HF_MPS_FALLBACK": "error"}
MISSING = {
    "aten::multi_margin_loss": "torch.nn.functional.multi_margin_loss(x, torch.arange(4, device='mps'))",
    "aten::mode": "x.mode()",
    "aten::_linalg_eigh.eigenvalues": "torch.linalg.eigh(x)",
    "aten::adaptive_max_pool3d.out": "torch.nn.functional.adaptive_max_pool3d(x.view(1, 1, 1, 4, 4), 1)",
    "aten::_ctc_loss": "torch.ctc_loss(x.view(4, 1, 4), torch.ones(1, 1, device='mps').int(), (4,), (1,))",
}


def test_a_missing_operator_is_refused_and_named_in_metals_words(run_python) -> None:
    missing = {name: call for name, call in MISSING.items() if table().kind(name) == "missing"}
    assert len(missing) >= 3
    lines = ["import torch", "x = torch.eye(4, device='mps')"]
    for call in missing.values():
        lines += [
            "try:",
            f"    {call}",
            "except NotImplementedError as error:",
            "    print(str(error).splitlines()[0])",
        ]
    done = run_python("-c", "\n".join(lines), env=BARE)
    assert done.stdout.splitlines() == [
        f"The operator '{name}' is not currently implemented for the MPS device. If you want this op to be "
        "considered for addition please comment on https://github.com/pytorch/pytorch/issues/141287 and mention "
        f"use-case, that resulted in missing op as well as commit hash {torch.version.git_version}. As a temporary "
        "fix, you can set the environment variable `PYTORCH_ENABLE_MPS_FALLBACK=1` to use the CPU as a fallback for "
        "this op. WARNING: this will be slower than running natively on MPS."
        for name in missing
    ], done.stderr


def test_tensors_on_two_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(2, device="mps") + torch.ones(2)
    with pytest.raises(RuntimeError):
        torch.nn.Linear(2, 2).to("mps")(torch.ones(1, 2))
    assert (torch.ones(2, device="mps") + torch.tensor(1.0)).tolist() == [2.0, 2.0], "a scalar on the CPU is allowed"


def test_another_profile_in_the_same_process_is_refused() -> None:
    present = simulator.loaded()
    other = next(profile for profile in profiles.PROFILES.values() if profile != present)
    with pytest.raises(UserError, match=f"the simulated device {present.name} is loaded already; start a new process"):
        simulator.load(other.name)
    assert simulator.load(present.name) is present


FALLBACK = """
import warnings, torch
from hf_mps.metal.fallback import registration as register
register.stop()
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    x = torch.tensor([3., 1., 2.], device="mps", requires_grad=True)
    loss = torch.nn.functional.multi_margin_loss(x, torch.tensor(2, device="mps"))
    values, where = torch.tensor([[1, 2, 2]], device="mps").mode()
    loss.backward()
print(loss.item(), values.tolist(), loss.device, x.grad.tolist())
for warning in seen:
    if "MPS" in str(warning.message):
        print(str(warning.message).split(" (Triggered")[0])
"""


def test_the_fallback_variable_sends_them_to_the_cpu_with_one_warning_for_the_first(run_python) -> None:
    done = run_python("-c", FALLBACK, env={**BARE, "PYTORCH_ENABLE_MPS_FALLBACK": "1", "HF_MPS_FALLBACK": None})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "0.6666666865348816 [2] mps:0 [0.3333333432674408, 0.0, -0.3333333432674408]"
    assert lines[1:] == [
        "The operator 'aten::multi_margin_loss' is not currently supported on the MPS backend and will fall back to "
        "run on the CPU. This may have performance implications."
    ]


def test_setting_the_variable_after_torch_is_imported_changes_nothing(run_python) -> None:
    code = (
        "import os, torch; os.environ['PYTORCH_ENABLE_MPS_FALLBACK'] = '1'\n"
        "try: torch.ones(2, device='mps').mode()\n"
        "except NotImplementedError: print('refused')"
    )
    done = run_python("-c", code, env=BARE)
    assert done.stdout.strip() == "refused", done.stderr


def test_some_operators_are_always_on_the_cpu(run_python) -> None:
    code = (
        "import torch; x = torch.ones(1, 1, 1, 1, 1, device='mps')\n"
        "print(torch.nn.functional.interpolate(x, scale_factor=2).sum().item())"
    )
    done = run_python("-W", "error::DeprecationWarning", "-c", code, env=BARE)
    assert done.stdout.strip() == "8.0", done.stderr
    assert "The operator 'aten::upsample_nearest3d.vec' is not currently supported on the MPS backend" in done.stderr


def test_memory_ends_where_the_profiles_memory_ends(run_python) -> None:
    code = (
        "import torch\n"
        "held = []\n"
        "for size in (5, 3, 3, 3, 2):\n"
        "    try: held.append(torch.empty(size * 2**30, dtype=torch.uint8, device='mps'))\n"
        "    except RuntimeError as e: print(str(e).splitlines()[0])"
    )
    done = run_python("-c", code, env={"HF_MPS_SIMULATE": "m1-8gb", "PYTORCH_MPS_HIGH_WATERMARK_RATIO": None})
    single, whole = done.stdout.splitlines()
    # One buffer may take three quarters of the recommended maximum: 4 GiB of 5.33.
    assert single == "Invalid buffer size: 5.00 GiB", done.stderr
    # 1.7 times the recommended maximum, PyTorch's high watermark: 9.07 GiB.
    assert whole.startswith("MPS backend out of memory (MPS allocated: 9.00 GiB, other allocations: ")
    assert "max allowed: 9.07 GiB). Tried to allocate 2.00 GiB on " in whole
    assert whole.endswith("(may cause system failure).")


def test_a_real_mac_is_not_touched(run_python) -> None:
    code = (
        "import torch, hf_mps.metal.simulator as s\nfrom hf_mps.core.errors import UserError\n"
        "torch._C._has_mps = True\n"
        "try: s.load()\nexcept UserError as e: print(e)\n"
        "print(s.loaded(), torch._C._dispatch_has_kernel_for_dispatch_key('aten::add.Tensor', 'MPS'))"
    )
    done = run_python("-c", code, env={"HF_MPS": "0", "HF_MPS_SIMULATE": None})
    assert done.stdout.splitlines() == [
        "this PyTorch has real Metal support, so the simulated device is not loaded; unset HF_MPS_SIMULATE",
        "None False",
    ], done.stderr


def test_a_pytorch_for_another_accelerator_is_refused(run_python) -> None:
    code = (
        "import torch, hf_mps.metal.simulator as s\nfrom hf_mps.core.errors import UserError\n"
        "torch.version.cuda = '12.8'\n"
        "try: s.load()\nexcept UserError as e: print(e)"
    )
    done = run_python("-c", code, env={"HF_MPS": "0", "HF_MPS_SIMULATE": None})
    assert done.stdout.strip() == (
        "the simulated device needs a PyTorch built for the CPU alone, and this one is built for CUDA 12.8: "
        "pip install torch --index-url https://download.pytorch.org/whl/cpu"
    ), done.stderr


def test_a_program_that_ends_in_a_backward_pass_ends_well(run_python) -> None:
    code = "import torch; x = torch.ones(3, device='mps', requires_grad=True); x.sum().backward()"
    for _ in range(4):
        done = run_python("-c", code, env={"HF_MPS_SIMULATE": "1"})
        assert (done.returncode, done.stderr) == (0, "")


TORCHVISION = """
import torch
library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "box_iou_rotated"):
    library.define(name + "(Tensor boxes, Tensor others) -> Tensor")
    library.impl(name, lambda boxes, others: boxes + others, "CPU")
boxes = torch.ones(2, device="mps")
print(torch.ops.torchvision.nms(boxes, boxes))
try: torch.ops.torchvision.box_iou_rotated(boxes, boxes)
except NotImplementedError as error: print(str(error).split(" is ")[0])
"""


def test_torchvision_s_operators_are_on_metal_where_its_macos_wheel_has_them(run_python) -> None:
    """Whose Linux wheel, which the simulated device has beside it, has none of these kernels."""
    done = run_python("-c", TORCHVISION, env={"HF_MPS_SIMULATE": "1", "HF_MPS_FALLBACK": "error"})
    assert done.stdout.splitlines() == [
        "tensor([2., 2.], device='mps:0')",
        "The operator 'torchvision::box_iou_rotated'",
    ], done.stderr[-3000:]
