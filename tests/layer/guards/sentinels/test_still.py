"""weights-still knows rest from slowness: steps of an optimizer's own, adapters that begin at zero, decay alone."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_mps.layer import guards
from hf_mps.layer.guards import SentinelNotice
from tests.layer.guards import loops


class Trusting(torch.optim.Optimizer):
    """LARS in small: a step of a thousandth of the weight's own norm, whatever the gradient's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "momentum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for weight in (each for group in self.param_groups for each in group["params"]):
            if weight.grad is not None:
                trust = 1e-3 * weight.norm() / (weight.grad.norm() + 1e-9)
                weight.sub_(0.1 * trust * weight.grad)


class Estimating(torch.optim.Optimizer):
    """Prodigy in small: lr=1, and a distance that it begins to estimate at a millionth."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "betas": (0.9, 0.999), "d": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(group["d"] * group["lr"] * weight.grad.sign())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adam with a large eps": lambda params: torch.optim.Adam(params, lr=1e-4, eps=1e-2),
    "SGD with momentum and dampening": lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9, dampening=0.9),
    "AdamW with decay": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.5),
    "LARS": Trusting,
    "Prodigy": Estimating,
}


def quiet(train: Callable[[], object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SentinelNotice)
        train()
    assert {each.state for each in guards.report().sentinels} <= {"on", "needless"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_with_steps_of_its_own_is_not_blamed(name: str) -> None:
    def train(size: float, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        layer = nn.Linear(8, 4).to("mps", dtype)
        optimizer = OPTIMIZERS[name](layer.parameters())
        loops.descend(lambda: layer(torch.ones(2, 8, device="mps", dtype=dtype)).sum() * size, optimizer, 6)

    for size, dtype in itertools.product((1e-6, 1.0, 1e6), (torch.float32, torch.bfloat16)):
        quiet(functools.partial(train, size, dtype))


def test_steps_of_a_warmup_that_cancel_are_no_rest() -> None:
    """As torchvision's detection reference begins: weights move by some units in the last place, a few by none."""

    def train() -> None:
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.ones(32, device="mps")) for _ in range(400)]
        optimizer = torch.optim.SGD(weights, lr=5e-3, momentum=0.9, weight_decay=5e-4)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-3, total_iters=3)
        for _ in range(4):
            for weight in weights:
                weight.grad = 5e-4 * torch.randn(32, device="mps")
            optimizer.step()
            warmup.step()

    quiet(train)


def test_weights_without_a_gradient_of_their_own_are_not_judged() -> None:
    """A learning rate of 0 at first, a gradient of exactly zero, decay alone, whole numbers, a frozen weight."""

    def train() -> None:
        used, unused = (nn.Parameter(torch.ones(4, device="mps")) for _ in range(2))
        frozen = nn.Parameter(torch.ones(4, device="mps"), requires_grad=False)
        table = nn.Parameter(torch.ones(4, device="mps", dtype=torch.int64), requires_grad=False)
        optimizer = torch.optim.AdamW([used, unused, frozen, table], lr=1e-2, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
        for _ in range(10):
            (used.square().sum() + 0 * unused.sum()).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    quiet(train)


def adapter(kind: str) -> Any:
    """A small network with an adapter of peft's, by the name of its configuration."""
    import peft

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2))
    layers: dict[str, Any] = {"target_modules": ["0", "2"]}
    if kind == "IA3Config":
        layers["feedforward_modules"] = ["2"]
    if kind in ("VeraConfig", "VBLoRAConfig", "RandLoraConfig", "OFTConfig"):
        layers["target_modules"] = ["2"]
    more = {
        "VBLoRAConfig": {"vector_length": 2, "num_vectors": 90},
        "OFTConfig": {"r": 0, "oft_block_size": 2, "use_cayley_neumann": False},
        "FourierFTConfig": {"n_frequency": 50},
    }.get(kind, {})
    return peft.get_peft_model(network, getattr(peft, kind)(**layers, **more))


ADAPTERS = [
    "LoraConfig",
    "IA3Config",
    "LoHaConfig",
    "LoKrConfig",
    "OFTConfig",
    "VeraConfig",
    "VBLoRAConfig",
    "RandLoraConfig",
    "FourierFTConfig",
]


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_trains_as_stock_without_a_word(kind: str, optimizer: Any) -> None:
    features, labels = torch.arange(90).view(9, 10).float(), torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 0])

    def train() -> list[Tensor]:
        model = adapter(kind).to("mps")
        descent = optimizer(model.parameters(), lr=1e-2)
        for _ in range(3):
            nn.functional.cross_entropy(model(features.to("mps")), labels.to("mps")).backward()
            descent.step()
            descent.zero_grad()
        return [each.detach().cpu() for each in model.parameters()]

    def with_it() -> None:
        weights.extend(train())

    weights: list[Tensor] = []
    quiet(with_it)
    with guards.suspended(kind="sentinel"):
        assert all(torch.equal(one, other) for one, other in zip(weights, train(), strict=True))


def test_a_bank_of_vectors_on_the_cpu_beside_weights_on_the_device_is_no_fault() -> None:
    """As peft keeps the shared vectors of VBLoRA where only the layers were moved."""

    def train() -> None:
        bank, weight = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(4, device="mps"))
        optimizer = torch.optim.AdamW([bank, weight], lr=1e-2, foreach=False)
        loops.descend(lambda: (bank.sum(0).to("mps") * weight).square().sum(), optimizer, 5)

    quiet(train)
