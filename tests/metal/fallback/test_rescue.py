"""HF_MPS_FALLBACK=rescue: a call that a Metal kernel refuses is done by the CPU, that call alone."""

from __future__ import annotations

RESCUE = {"HF_MPS_FALLBACK": "rescue", "PYTORCH_ENABLE_MPS_FALLBACK": None}
SIMULATED = {"HF_MPS_SIMULATE": "1"}


def lines(run_python, code: str) -> list[str]:
    done = run_python("-c", code, env={**SIMULATED, **RESCUE})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines() + done.stderr.splitlines()


def test_float64_inside_an_operator_is_rescued_in_float32(run_python) -> None:
    code = """
import threading, torch
from hf_mps.metal import fallback
x = torch.tensor([1.0, 2.0], device="mps", requires_grad=True)
y = torch.cumsum(x, 0, dtype=torch.float64)
y.sum().backward()
print(y.dtype, y.tolist(), x.grad.tolist())
print(x.detach().double().dtype)
thread = threading.Thread(target=lambda: print("thread", torch.cumsum(x.detach(), 0, dtype=torch.float64).tolist()))
thread.start(); thread.join()
print(sorted(entry.operator for entry in fallback.report().operators))
"""
    got = lines(run_python, code)
    assert "torch.float32 [1.0, 3.0] [2.0, 1.0]" in got
    assert "torch.float32" in got
    assert "thread [1.0, 3.0]" in got
    assert any("aten::cumsum" in line and "refused on Metal" in line for line in got)
    assert sum("gave float64" in line for line in got) == 1


def test_a_convolution_over_integers_is_rescued(run_python) -> None:
    code = """
import torch
x = torch.ones(1, 1, 3, 3, dtype=torch.int64, device="mps")
found = torch.nn.functional.conv2d(x, x)
print(found.device.type, found.tolist())
"""
    assert "mps [[[[9]]]]" in lines(run_python, code)


def test_an_error_of_the_users_own_stays_what_it_is(run_python) -> None:
    code = """
import torch
from hf_mps.metal import fallback
for call in (lambda: torch.ones(2, 3, device="mps") @ torch.ones(2, 3, device="mps"),
             lambda: torch.ones(2, dtype=torch.float64, device="mps"),
             lambda: torch.ones(2, dtype=torch.float64).to("mps")):
    try: call()
    except (RuntimeError, TypeError) as error: print(type(error).__name__)
print(fallback.report().calls)
"""
    assert lines(run_python, code)[:4] == ["RuntimeError", "TypeError", "TypeError", "0"]


def test_a_compiled_model_trains_under_it(run_python) -> None:
    code = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to("mps")
step = torch.compile(lambda x: model(x).square().mean(), backend="aot_eager")
x = torch.randn(16, 4, device="mps")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
losses = []
for _ in range(5):
    optimizer.zero_grad(); loss = step(x); loss.backward(); optimizer.step(); losses.append(loss.item())
print(losses[-1] < losses[0])
"""
    assert "True" in lines(run_python, code)
