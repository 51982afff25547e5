"""torch.compile on the simulated device: Inductor's Metal source is compiled and runs, with eager's results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.layer.guards import loops
from tests.metal.simulator.test_compile import Words, losses, model, step

pytestmark = pytest.mark.usefixtures("mps")


@pytest.fixture(autouse=True)
def _fresh_dynamo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with loops.own_compiler():
        yield


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The Metal source that was compiled."""
    sources: list[str] = []
    compile_source = torch._C._mps_compileShader

    def noted(source: str) -> Any:
        sources.append(source)
        return compile_source(source)

    monkeypatch.setattr(torch._C, "_mps_compileShader", noted)
    return sources


def test_results_and_gradients_are_those_without(written: list[str]) -> None:
    plain, net = model().to("mps"), model().to("mps")
    # Inductor's own random numbers are others, on a Mac too.
    with torch._inductor.config.patch(fallback_random=True):
        found = step(net, torch.compile(net, fullgraph=True))
    for one, other in zip(found, step(plain, plain), strict=True):
        torch.testing.assert_close(one, other)
    kernels = [source.partition("generated_kernel")[2] for source in written]
    assert any("rsqrt" in kernel for kernel in kernels), "the norm was no kernel of Inductor's"


@pytest.mark.slow
def test_a_small_gpt_trains_with_the_losses_that_it_has_without(written: list[str]) -> None:
    assert losses(torch.compile, (12,) * 4) == pytest.approx(losses(lambda net: net, (12,) * 4), rel=1e-5)
    assert written


def test_trainer_trains_with_it(tmp_path: Path, written: list[str]) -> None:
    plain = loops.trained(tmp_path, model=Words())
    assert loops.close(loops.trained(tmp_path, model=Words(), torch_compile=True), plain)
    assert written


def test_an_index_out_of_range_is_reported_as_inductor_s_kernels_do() -> None:
    table = torch.randn(4, 2, device="mps")
    gather = torch.compile(lambda ids: table[ids] * 2)
    torch.testing.assert_close(gather(torch.tensor([3, 0]).to("mps")).cpu(), table.cpu()[[3, 0]] * 2)
    with pytest.raises(torch.AcceleratorError, match=r"out of range \[0, 4\)"):
        gather(torch.tensor([4, 0]).to("mps"))


def test_what_inductor_writes_wrongly_fails_as_on_a_mac() -> None:
    """docs/upstream/inductor-bounds-check.md: a check of a name that the kernel does not declare."""
    table = nn.Embedding(12, 16).to("mps")

    @torch.compile(dynamic=True)
    def places(ids: Tensor) -> Tensor:
        return table(torch.arange(ids.shape[1], device="mps"))

    with pytest.raises(Exception, match=r"program_source:.*use of undeclared identifier 'x1'"):
        places(torch.zeros(4, 8, dtype=torch.long, device="mps"))
