"""torch.compile on the simulated device: aot_eager works, the default backend is refused in one sentence."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hf_mps.errors import UserError
from hf_mps.simulator import compile_refusal

pytestmark = pytest.mark.usefixtures("mps")


@pytest.fixture(autouse=True)
def _fresh_dynamo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Unset, the compiler sets it itself, to a folder below /tmp that it leaves behind.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))


def test_aot_eager_trains_with_the_cpus_numbers() -> None:
    losses = {}
    for device in ("cpu", "mps"):
        net = model().to(device)
        compiled = torch.compile(net, backend="aot_eager")
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        x = torch.linspace(-1, 1, 24).view(6, 4).to(device)
        losses[device] = []
        for _ in range(5):
            loss = compiled(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[device].append(loss.item())
    assert losses["mps"] == pytest.approx(losses["cpu"], rel=1e-5)
    assert losses["mps"][-1] < losses["mps"][0]


@pytest.mark.parametrize(
    "there",
    [
        lambda: torch.backends.mps.is_available(),
        lambda: torch.mps.is_available(),
        lambda: torch.accelerator.is_available(),
        lambda: torch.accelerator.device_count() == 1,
        lambda: torch.accelerator.current_accelerator(check_available=True) is not None,
    ],
)
def test_one_graph_is_made_of_code_that_asks_for_the_device(there: Callable[[], bool]) -> None:
    # Stock torch 2.13 cannot at the first two and the fourth: "torch.* op returned non-Tensor", "marked as skipped".
    compiled = torch.compile(lambda x: x if there() else -x, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2, device="mps")).tolist() == [1.0, 1.0]


def test_the_default_backend_ends_in_one_sentence() -> None:
    with pytest.raises(UserError) as caught:
        torch.compile(model().to("mps"))(torch.ones(2, 4, device="mps"))
    assert str(caught.value) == compile_refusal.SENTENCE
    assert 'backend="aot_eager"' in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_its_traceback_is_short() -> None:
    with pytest.raises(UserError) as caught:
        torch.compile(lambda x: x * 2)(torch.ones(2, device="mps"))
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert len(frames) <= 4, [f"{frame.filename}:{frame.lineno}" for frame in frames]


def test_a_graph_that_makes_its_own_tensor_on_the_device_is_refused_too() -> None:
    with pytest.raises(UserError, match="Metal source"):
        torch.compile(lambda x: x.sum() + torch.ones(2, device="mps").sum().cpu())(torch.ones(2))


def test_a_cpu_graph_reaches_the_default_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.compile_fx as inductor

    called = []
    monkeypatch.setattr(inductor, "compile_fx", lambda graph, inputs, **kwargs: called.append(inputs) or graph.forward)
    assert torch.compile(lambda x: x * 2)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert len(called) == 1


@pytest.mark.slow
def test_a_cpu_graph_compiles_and_runs() -> None:
    code = "import torch; print(torch.compile(lambda x: x.sin() + 1)(torch.zeros(3)).tolist())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.strip() == "[1.0, 1.0, 1.0]", done.stderr


def test_metal_source_of_ones_own_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Metal source cannot be compiled on the simulated device"):
        torch.mps.compile_shader("kernel void nothing() {}")


def test_switching_the_refusal_on_imports_no_compiler(run_python) -> None:
    code = (
        "import sys, torch; from hf_mps.simulator import compile_refusal as c; before = set(sys.modules); "
        "c.install(); c.install(); print(sorted(set(sys.modules) - before))"
    )
    done = run_python("-c", code, env={"HF_MPS": "0", "HF_MPS_SIMULATE": None})
    assert done.stdout.strip() == "[]", done.stderr
