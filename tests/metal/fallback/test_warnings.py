"""What the user is told: one warning for each operator, at the first line of the user's own code, in each mode."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from inline_snapshot import snapshot
from torch.nn.functional import multi_margin_loss

from hf_mps.core import settings
from hf_mps.core.errors import UserError
from hf_mps.metal import device
from hf_mps.metal.fallback import MetalFallbackWarning

WARN = {"HF_MPS_SIMULATE": "1", "HF_MPS_FALLBACK": None, "PYTORCH_ENABLE_MPS_FALLBACK": None}


def test_one_warning_for_each_operator_with_shapes_line_and_tracker() -> None:
    x = torch.arange(6.0, device="mps").view(2, 3)
    labels = torch.tensor([1, 0], device="mps")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            multi_margin_loss(x, labels)
            x.mode()
    assert [one.category for one in seen] == [MetalFallbackWarning] * 2
    first = seen[0]
    assert str(first.message) == snapshot(
        "hf_mps: aten::multi_margin_loss of float32[2, 3], int64[2] has no Metal kernel and runs on the CPU, as often "
        "as it is called; each call waits for the GPU. Missing operators are tracked in "
        "https://github.com/pytorch/pytorch/issues/141287"
    )
    assert first.filename == __file__
    assert Path(__file__).read_text().splitlines()[first.lineno - 1].strip() == "multi_margin_loss(x, labels)"


def test_the_line_is_the_users_where_a_library_makes_the_call() -> None:
    pool = torch.nn.AdaptiveMaxPool3d(1)
    x = torch.rand(1, 1, 2, 2, 2, device="mps", requires_grad=True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loss = pool(x).sum()
        loss.backward()
    lines = Path(__file__).read_text().splitlines()
    told = {str(one.message).split()[1]: lines[one.lineno - 1].strip() for one in seen if one.filename == __file__}
    assert told == {
        "aten::adaptive_max_pool3d.out": "loss = pool(x).sum()",
        "aten::adaptive_max_pool3d_backward.grad_input": "loss.backward()",
    }, "the backward pass runs in another thread, and the line that waits for it is named"


def test_the_warnings_module_filters_it() -> None:
    x = torch.ones(2, device="mps")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message=".*aten::mode", category=MetalFallbackWarning)
        x.mode()
        multi_margin_loss(x, torch.tensor([0], device="mps"))
    assert [str(one.message).split()[1] for one in seen] == ["aten::multi_margin_loss"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", MetalFallbackWarning)
        with pytest.raises(MetalFallbackWarning, match="aten::logit_"):
            x.logit_()


def test_an_operator_of_another_library_is_not_said_to_be_tracked_by_pytorch() -> None:
    library = torch.library.Library("elsewhere", "DEF")
    library.define("plus(Tensor x) -> Tensor")
    library.impl("plus", lambda x: x + 1, "CPU")
    with pytest.warns(MetalFallbackWarning, match=r"elsewhere::plus of .*; each call waits for the GPU$"):
        torch.ops.elsewhere.plus(torch.ones(2, device="mps"))
    library._destroy()


CODE = """
import torch
from torch.nn.functional import multi_margin_loss
x = torch.ones(4, device="mps")
try: print(x.mode().values.item(), multi_margin_loss(x, torch.tensor([1], device="mps")).item())
except NotImplementedError as error: print(str(error).split(" is ")[0])
from hf_mps.layer.activation import activate
print(*(part for part in activate.activate().parts() if part.name == "fallback"))
"""


def run(run_python, **variables: str) -> tuple[list[str], str]:
    done = run_python("-c", CODE, env={**WARN, **variables})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_by_itself_it_is_on_and_prints_a_table_at_the_end(run_python) -> None:
    out, err = run(run_python)
    assert out[0] == "1.0 0.75"
    assert out[1].startswith("fallback: on (the default: warn; 1")
    assert err.count("MetalFallbackWarning") == 2
    table = err[err.index("hf-mps: 2 operators without a Metal kernel ran on the CPU: ") :].splitlines()
    assert table[0].endswith(", simulated)") is device.simulated()
    assert table[1].split() == ["operator", "calls", "seconds", "share", "copied", "way"]
    assert sorted(line.split()[0] for line in table[2:4]) == ["aten::mode", "aten::multi_margin_loss"]
    assert table[4].startswith("  not in these seconds: ")
    assert all(len(line) <= 100 for line in table)


def test_quiet_says_nothing(run_python) -> None:
    out, err = run(run_python, HF_MPS_FALLBACK="quiet")
    assert out[0] == "1.0 0.75"
    assert err == ""


@pytest.mark.parametrize("name", ["HF_MPS_FALLBACK", "PYTORCH_ENABLE_MPS_FALLBACK"])
def test_error_is_metals_own(run_python, name: str) -> None:
    value = "error" if name == "HF_MPS_FALLBACK" else "0"
    out, err = run(run_python, **{name: value})
    assert out == ["The operator 'aten::mode'", f"fallback: off ({name}={value}: error; 0 operators run on the CPU)"]
    assert err == ""


def test_pytorchs_own_variable_set_to_1_means_warn_and_names_every_operator(run_python) -> None:
    out, err = run(run_python, PYTORCH_ENABLE_MPS_FALLBACK="1")
    assert out[0] == "1.0 0.75"
    assert "PYTORCH_ENABLE_MPS_FALLBACK=1: warn" in out[1]
    assert err.count("MetalFallbackWarning") == 2
    assert "not currently supported on the MPS backend" not in err


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        (
            {"HF_MPS_FALLBACK": "qiet"},
            "HF_MPS_FALLBACK=qiet is not a value it knows; allowed: warn, quiet, error, rescue; did you mean 'quiet'?",
        ),
        (
            {"HF_MPS_FALLBACK": "error", "PYTORCH_ENABLE_MPS_FALLBACK": "1"},
            "HF_MPS_FALLBACK=error and PYTORCH_ENABLE_MPS_FALLBACK=1 contradict each other; unset one",
        ),
        (
            {"HF_MPS_FALLBACK_SHARE": "10 %"},
            "HF_MPS_FALLBACK_SHARE=10 % is no share; allowed: a number from 0 to 1, for example 0.1",
        ),
    ],
    ids=["mode", "both", "share"],
)
def test_a_value_that_nobody_reads_is_refused_in_one_line(
    variables: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_MPS_FALLBACK", "PYTORCH_ENABLE_MPS_FALLBACK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        settings.fallback(), settings.fallback_share()
    assert str(caught.value) == line


def test_a_refused_value_is_one_warning_and_costs_only_this_part(run_python) -> None:
    line = "PYTORCH_ENABLE_MPS_FALLBACK=2 is a value that nobody reads; allowed: 0, 1"
    code = CODE + "print(bool(torch.backends.mps.is_available.hf_mps_patches))"
    done = run_python("-c", code, env={**WARN, "PYTORCH_ENABLE_MPS_FALLBACK": "2"})
    assert done.returncode == 0, done.stderr
    assert f"LayerWarning: hf_mps.metal.fallback stays off: {line}\n" in done.stderr
    assert done.stderr.count("Warning: hf_mps") == 1
    assert f"fallback: off ({line})" in done.stdout
    assert done.stdout.endswith("True\n"), "the rest of the layer is on"


def test_the_users_0_survives_accelerate(run_python) -> None:
    code = (
        "import os, torch\nfrom accelerate import Accelerator, notebook_launcher\nprint(Accelerator().device.type)\n"
        "def show(): print(os.environ['PYTORCH_ENABLE_MPS_FALLBACK'])\n"
        "show(); notebook_launcher(show, num_processes=1); show()\n"
    )
    done = run_python("-c", code, env={**WARN, "PYTORCH_ENABLE_MPS_FALLBACK": "0"})
    assert done.stdout.splitlines() == snapshot(["mps", "0", "Launching training on MPS.", "0", "0"]), done.stderr
