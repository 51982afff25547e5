"""nn.LSTM on the simulated device is the one operator that it is on Metal, with its refusals and the CPU's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hf_mps.metal import simulator
from hf_mps.metal.simulator import strictness

pytestmark = pytest.mark.usefixtures("mps")


@pytest.fixture(autouse=True)
def _without_faults(mps: None) -> Iterator[None]:
    with strictness.off("lstm-dropout"):
        yield


def stack(**options: Any) -> nn.LSTM:
    torch.manual_seed(0)
    return nn.LSTM(5, 6, **options).to("mps")


def functional(layer: nn.LSTM, x: torch.Tensor) -> torch.Tensor:
    """What nn.LSTM calls, below any guard."""
    zeros = torch.zeros(layer.num_layers, x.shape[1], layer.hidden_size, device="mps")
    weights = [weight for each in layer.all_weights for weight in each]
    options = (True, layer.num_layers, layer.dropout, layer.training, False, False)
    output: torch.Tensor = torch.ops.aten.lstm.input(x, [zeros, zeros], weights, *options)[0]
    return output


def test_it_is_metals_operator_and_gradient() -> None:
    layer, x = stack(), torch.randn(4, 3, 5, device="mps")
    output, _ = layer(x)
    assert type(output.grad_fn).__name__ == "LstmMpsBackward0"
    with simulator.counted() as counts:
        layer(x)
    assert counts.figures.launches < 8, "one for all steps, and the zeros of its states"


def test_packed_sequences_take_the_composite_form_as_on_a_mac() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(4, 3, 5, device="mps"), torch.tensor([4, 2, 1]))
    output, _ = stack()(packed)
    assert type(output.data.grad_fn).__name__ != "LstmMpsBackward0"


def test_projections_are_refused_in_metals_words() -> None:
    with pytest.raises(RuntimeError, match="LSTM with projections is not currently supported with MPS"):
        stack(proj_size=2)(torch.randn(4, 3, 5, device="mps"))


def test_a_gradient_of_its_gradient_is_refused_as_on_a_mac() -> None:
    x = torch.randn(4, 3, 5, device="mps", requires_grad=True)
    (gradient,) = torch.autograd.grad(stack()(x)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="derivative for lstm_mps_backward is not implemented"):
        gradient.sum().backward()


def test_dropout_is_drawn_by_the_devices_generator_and_kept_for_the_gradient() -> None:
    layer, x = stack(num_layers=2, dropout=0.5), torch.randn(4, 3, 5, device="mps", requires_grad=True)

    def gradient(seed: int) -> torch.Tensor:
        torch.mps.manual_seed(seed)
        (found,) = torch.autograd.grad(functional(layer, x).sum(), x)
        return found

    before = torch.get_rng_state()
    assert torch.equal(gradient(1), gradient(1))
    assert not torch.equal(gradient(1), gradient(2))
    assert torch.equal(torch.get_rng_state(), before), "the CPU's generator is another"
    # Against the difference of two outputs with the same draw.
    step = torch.zeros_like(x)
    step[0, 0, 0] = 1e-2
    outputs = []
    for moved in (x + step, x - step):
        torch.mps.manual_seed(1)
        outputs.append(functional(layer, moved).sum().item())
    assert gradient(1)[0, 0, 0].item() == pytest.approx((outputs[0] - outputs[1]) / 2e-2, rel=0.02, abs=1e-4)


def test_a_dropout_of_one_lets_no_gradient_through() -> None:
    x = torch.randn(4, 3, 5, device="mps", requires_grad=True)
    (gradient,) = torch.autograd.grad(functional(stack(num_layers=2, dropout=1.0), x).sum(), x)
    assert not gradient.any()


def test_without_training_nothing_is_dropped() -> None:
    layer, x = stack(num_layers=3, dropout=0.9).eval(), torch.randn(4, 3, 5)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x.to("mps"))[0].cpu(), layer.cpu()(x)[0])
