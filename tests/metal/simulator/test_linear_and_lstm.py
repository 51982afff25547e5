"""Linear layers and LSTMs are on the simulated device what they are on a Mac: one operator each way, and its refusals.

On a Mac F.linear has a kernel of its own (Linear.mm) and so has nn.LSTM (RnnOps.mm, which RNN.cpp calls); autograd's
formulas for them (derivatives.yaml) call linear_backward and lstm_mps_backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hf_mps.core.releases import torch_release
from hf_mps.layer import guards
from hf_mps.metal.operators.table import OperatorSupport
from hf_mps.metal.simulator import strictness
from tests.metal.simulator.test_training import agree

pytestmark = pytest.mark.usefixtures("mps")


class Names(TorchDispatchMode):
    """The operators that multiply or are a layer, in the order in which they are called."""

    LAYERS = ("linear", "lstm", "mm", "matmul", "sigmoid", "tanh")

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        if any(each in name for each in self.LAYERS):
            self.called.append(name)
        return function(*args, **(kwargs or {}))


def step(layer: nn.Module, x: Tensor) -> list[str]:
    """The operators of a forward and a backward pass."""
    with Names() as names:
        found = layer(x)
        (found[0] if isinstance(found, tuple) else found).sum().backward()
    return names.called


def test_a_linear_layer_is_one_operator_each_way() -> None:
    x = torch.ones(2, 3, 4, device="mps", requires_grad=True)
    assert step(nn.Linear(4, 5).to("mps"), x) == ["aten::linear", "aten::linear_backward"]


@pytest.mark.parametrize("options", [{}, {"num_layers": 3, "bidirectional": True}], ids=str)
def test_an_lstm_is_one_operator_each_way(options: dict[str, Any]) -> None:
    x = torch.ones(2, 3, 4, device="mps", requires_grad=True)
    assert step(nn.LSTM(4, 5, **options).to("mps"), x) == ["aten::_lstm_mps", "aten::lstm_mps_backward"]


def test_the_audit_calls_them_native() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 5)).to("mps")
    called = step(layers, torch.ones(2, 3, 4, device="mps", requires_grad=True))
    assert len(called) == 4
    assert {OperatorSupport().kind(name) for name in called} == {"native"}


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": layers, "bidirectional": both, "batch_first": first, "bias": bias}
        for layers, both, first, bias in itertools.product((1, 3), (False, True), (False, True), (False, True))
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_an_lstm_has_the_cpus_results_and_gradients(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    agree(nn.LSTM(5, 6, **options), torch.randn(4, 3, 5))


def test_states_that_are_given_get_gradients_and_states_that_come_out_give_them() -> None:
    torch.manual_seed(0)
    layer, x, states = nn.LSTM(5, 6, num_layers=2, bidirectional=True), torch.randn(4, 3, 5), torch.randn(2, 4, 3, 6)
    found = []
    for device in ("cpu", "mps"):
        own, begin = layer.to(device), states.to(device).requires_grad_()
        out, (hidden, cell) = own(x.to(device), (begin[0], begin[1]))
        (gradient,) = torch.autograd.grad((hidden.square() + cell).sum(), begin)
        found.append([each.detach().cpu() for each in (out, hidden, cell, gradient)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_lstm_in_half_precision_stays_in_it(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, x = nn.LSTM(5, 6), torch.randn(4, 3, 5)
    expected = layer(x)[0]
    out, (hidden, cell) = layer.to("mps", dtype)(x.to("mps", dtype))
    assert {each.dtype for each in (out, hidden, cell)} == {dtype}
    torch.testing.assert_close(out.float().cpu(), expected, rtol=0.02, atol=0.02)


def trained(dropout: float, layers: int = 3) -> tuple[nn.LSTM, Tensor]:
    torch.manual_seed(0)
    layer = nn.LSTM(4, 4, num_layers=layers, dropout=dropout, bidirectional=True).to("mps").train()
    return layer, torch.randn(3, 2, 4).to("mps")


def test_with_metals_fault_a_dropout_of_one_makes_nan() -> None:
    layer, x = trained(1.0, layers=2)
    with strictness.on("lstm-dropout"), guards.suspended("lstm-dropout"):
        assert layer(x)[0].isnan().all()
    assert ("lstm-dropout" in strictness.active()) is (torch_release() < (2, 14))


def test_an_lstm_of_a_compiled_model_and_of_a_fake_one() -> None:
    layer, x = trained(0.0)
    expected = layer(x)[0]
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(x)[0], expected)
    with FakeTensorMode() as fake:
        shape = nn.LSTM(4, 4, bidirectional=True, device="mps")(fake.from_tensor(x))[0].shape
    assert shape == (3, 2, 8)
    torch._dynamo.reset()


@pytest.fixture
def without_its_fault() -> Iterator[None]:
    with strictness.off("lstm-dropout"):
        yield


def stack(**options: Any) -> nn.LSTM:
    torch.manual_seed(0)
    return nn.LSTM(5, 6, **options).to("mps")


def functional(layer: nn.LSTM, x: Tensor) -> Tensor:
    """What nn.LSTM calls, below any guard."""
    zeros = torch.zeros(layer.num_layers, x.shape[1], layer.hidden_size, device="mps")
    weights = [weight for each in layer.all_weights for weight in each]
    options = (True, layer.num_layers, layer.dropout, layer.training, False, False)
    return torch.ops.aten.lstm.input(x, [zeros, zeros], weights, *options)[0]


def test_packed_sequences_take_the_composite_form_as_on_a_mac_with_the_cpus_numbers() -> None:
    def packed(module: nn.Module, x: Tensor) -> Tensor:
        sequence = module(nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2, 1])))[0]
        assert type(sequence.data.grad_fn).__name__ != "LstmMpsBackward0"
        return nn.utils.rnn.pad_packed_sequence(sequence)[0]

    torch.manual_seed(0)
    agree(nn.LSTM(5, 6), torch.randn(4, 3, 5), packed)


def test_a_gradient_of_its_gradient_is_refused_as_on_a_mac() -> None:
    x = torch.randn(4, 3, 5, device="mps", requires_grad=True)
    (gradient,) = torch.autograd.grad(stack()(x)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="derivative for lstm_mps_backward is not implemented"):
        gradient.sum().backward()


@pytest.mark.usefixtures("without_its_fault")
def test_dropout_is_drawn_by_the_devices_generator_and_kept_for_the_gradient() -> None:
    layer, x = stack(num_layers=2, dropout=0.5), torch.randn(4, 3, 5, device="mps", requires_grad=True)

    def gradient(seed: int) -> Tensor:
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


@pytest.mark.usefixtures("without_its_fault")
def test_a_dropout_of_one_lets_no_gradient_through() -> None:
    x = torch.randn(4, 3, 5, device="mps", requires_grad=True)
    (gradient,) = torch.autograd.grad(functional(stack(num_layers=2, dropout=1.0), x).sum(), x)
    assert not gradient.any()


@pytest.mark.usefixtures("without_its_fault")
def test_without_training_nothing_is_dropped() -> None:
    layer, x = stack(num_layers=3, dropout=0.9).eval(), torch.randn(4, 3, 5)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x.to("mps"))[0].cpu(), layer.cpu()(x)[0])


INTS, ROWS, MATRIX = (torch.ones(2, 4, dtype=torch.long), torch.ones(2, 4), torch.ones(3, 4))
REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "inputs": (
        lambda: F.linear(INTS.to("mps"), MATRIX.to("mps")),
        "MPS device does not support linear for non-float inputs",
    ),
    "weights": (
        lambda: F.linear(ROWS.to("mps"), MATRIX.to("mps").to(torch.int8)),
        "MPS device does not support linear for non-float weights",
    ),
    "bias": (
        lambda: F.linear(ROWS.to("mps"), MATRIX.to("mps"), torch.ones(3, dtype=torch.int, device="mps")),
        "MPS device does not support linear for non-float bias",
    ),
    "input on the CPU": (
        lambda: F.linear(ROWS, MATRIX.to("mps")),
        "Tensor for argument input is on cpu but expected on mps",
    ),
    "weight on the CPU": (
        lambda: F.linear(ROWS.to("mps"), MATRIX),
        "Tensor for argument weight is on cpu but expected on mps",
    ),
    "shapes": (
        lambda: F.linear(ROWS.to("mps"), MATRIX[:, :3].to("mps")),
        "linear(): input and weight.T shapes cannot be multiplied (2x4 and 3x3)",
    ),
    "projections of an LSTM": (
        lambda: nn.LSTM(4, 5, proj_size=2).to("mps")(ROWS[None].to("mps"))[0],
        "LSTM with projections is not currently supported with MPS",
    ),
    "weights of an LSTM on the CPU": (
        lambda: nn.LSTM(4, 5)(ROWS[None].to("mps"))[0],
        "Placeholder storage has not been allocated on MPS device!",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_metal_refuses_is_refused_in_its_words(case: str) -> None:
    call, words = REFUSED[case]
    with pytest.raises((RuntimeError, NotImplementedError)) as caught:
        call()
    assert str(caught.value).splitlines()[0].startswith(words)
