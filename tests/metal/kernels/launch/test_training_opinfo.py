"""PyTorch's own samples of embeddings agree with the CPU; those of what draws random numbers draw them by rules."""

from __future__ import annotations

import pytest
import torch

from hf_mps.metal.kernels.rules import Dispatch
from scripts.conformance.opinfo import operators
from tests.metal.kernels.launch.samples import compared

pytestmark = pytest.mark.slow

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DRAWING = (
    "bernoulli",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "multinomial",
    "nn.functional.alpha_dropout",
    "nn.functional.dropout",
    "nn.functional.dropout2d",
    "nn.functional.feature_alpha_dropout",
    "normal",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "uniform",
)


@pytest.mark.rotated
@pytest.mark.parametrize("operator", ["nn.functional.embedding", "nn.functional.embedding_bag"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_samples_of_embeddings_agree(kernels: Dispatch, operator: str, dtype: torch.dtype) -> None:
    samples = compared(kernels, operator, dtype)
    assert samples.differ == []
    assert samples.ran > samples.taken * 0.9


@pytest.mark.rotated
@pytest.mark.parametrize("operator", DRAWING)
def test_samples_that_draw_have_the_cpus_shape_and_repeat(kernels: Dispatch, operator: str) -> None:
    ran = 0
    for info in (each for each in operators() if each.name == operator):
        for dtype in (each for each in FLOATS if info.supports_dtype(each, "cpu")):
            for sample in info.sample_inputs("mps", dtype):
                on_cpu = sample.transform(lambda each: each.cpu() if isinstance(each, torch.Tensor) else each)
                if "device" in on_cpu.kwargs:
                    on_cpu.kwargs["device"] = "cpu"
                kernels.ledger.clear()
                found = []
                for _ in range(2):
                    torch.mps.manual_seed(3)
                    found.append(info(sample.input, *sample.args, **sample.kwargs))
                wanted = info(on_cpu.input, *on_cpu.args, **on_cpu.kwargs)
                ran += bool(kernels.ledger.operators)
                assert torch.equal(found[0].cpu(), found[1].cpu())
                assert (found[0].shape, found[0].dtype) == (wanted.shape, wanted.dtype)
    assert ran
