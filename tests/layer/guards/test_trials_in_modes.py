"""A guard's trial says the same wherever the program stands that needs it first."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_mps.core.releases import torch_release
from hf_mps.layer import guards
from hf_mps.layer.guards.catalogue import registry
from tests import modes


def verdicts() -> dict[str, bool]:
    return {guard.name: guard.tried().value for guard in registry().each("guard")}


@pytest.fixture(scope="module")
def expected() -> dict[str, bool]:
    import accelerate  # noqa: F401
    import transformers.trainer  # noqa: F401  some trials ask what these have

    return verdicts()


@pytest.mark.parametrize("mode", modes.WAYS)
def test_every_guard_finds_what_it_finds_in_no_mode(mode: str, expected: dict[str, bool]) -> None:
    assert modes.WAYS[mode](verdicts) == expected


@pytest.mark.skipif(torch_release() >= (2, 14), reason="2.14 reads the weights in their own dtype")
def test_a_float32_norm_is_right_in_a_program_whose_default_is_float16() -> None:
    given = torch.linspace(-1, 2, 8, dtype=torch.float16).view(2, 4)

    def normed() -> torch.Tensor:
        with modes.default_dtype(torch.float16):
            norm = torch.nn.LayerNorm(4, device="mps", dtype=torch.float32)
            layer = torch.nn.Linear(4, 4, device="mps")
            torch.optim.SGD([*norm.parameters(), *layer.parameters()], lr=0.1)  # here the guard tries the device
            return norm(given.to("mps")).float().cpu()

    right = torch.layer_norm(given.float(), (4,))
    with guards.suspended("mixed-dtypes"):
        assert not torch.allclose(normed(), right, atol=0.01, equal_nan=False)
    torch.testing.assert_close(normed(), right, rtol=0, atol=0.01)


def test_a_model_of_fake_tensors_leaves_every_guard_on() -> None:
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = torch.nn.Linear(3, 2, device="mps")
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(torch.ones(4, 3, device="mps")).sum().backward()
        optimizer.step()
    assert [guard.name for guard in registry().each("guard") if guard.broken] == []
