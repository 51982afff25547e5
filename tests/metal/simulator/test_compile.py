"""torch.compile on the simulated device where there is no clang: graphs run through aot_eager, with eager's results.

With one, tests/metal/simulator/test_inductor.py has what Inductor writes for Metal.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx as inductor
from accelerate.utils import TorchDynamoPlugin
from torch import Tensor, nn

from hf_mps.core import notices
from hf_mps.metal.simulator import compiled
from hf_mps.metal.source import clang
from tests import CHECKOUT
from tests.layer.guards import loops

pytestmark = pytest.mark.usefixtures("mps")

X = torch.linspace(-1, 1, 24).view(6, 4)


@pytest.fixture(autouse=True)
def _fresh_dynamo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Unset, the compiler sets it itself, to a folder below /tmp that it leaves behind.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    notices.forget()
    monkeypatch.setitem(sys.modules, "ziglang", None)
    monkeypatch.setenv("PATH", "")
    clang.command.cache_clear()
    with loops.own_compiler():
        yield
    notices.forget()
    clang.command.cache_clear()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 1))


def step(net: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The result of a training step's forward pass and all gradients, its input's too."""
    torch.mps.manual_seed(1)
    x = X.to("mps").requires_grad_()
    out = run(x)
    out.square().mean().backward()
    return [
        each.detach().cpu() for each in (out, x.grad, *(weight.grad for weight in net.parameters())) if each is not None
    ]


def by_its_own_method(net: nn.Module) -> nn.Module:
    net.compile()
    return net


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "torch.compile(model)": torch.compile,
    "fullgraph, dynamic": lambda net: torch.compile(net, fullgraph=True, dynamic=True),
    "mode": lambda net: torch.compile(net, mode="max-autotune-no-cudagraphs"),
    "options": lambda net: torch.compile(net, options={"epilogue_fusion": True}),
    "decorator": lambda net: torch.compile(lambda x: net(x)),
    "decorator with arguments": lambda net: torch.compile(dynamic=False)(lambda x: net(x)),
    "model.compile()": by_its_own_method,
    "backend by name": lambda net: torch.compile(net, backend="inductor"),
    "aot_eager": lambda net: torch.compile(net, backend="aot_eager"),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_results_and_gradients_are_those_without(way: Callable[[nn.Module], Any]) -> None:
    plain, net = model().to("mps"), model().to("mps")
    for found, expected in zip(step(net, way(net)), step(plain, plain), strict=True):
        torch.testing.assert_close(found, expected)


def test_one_line_says_so_whatever_is_compiled() -> None:
    net = model().to("mps").eval()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.compile(net)(X.to("mps"))
        torch.compile(lambda x: x * 2)(X.to("mps"))
        torch.compile(net)(X[:2].to("mps"))
    (line,) = (each for each in heard if each.category is compiled.SimulatedNotice)
    assert str(line.message).startswith(f"hf_mps: {compiled.SENTENCE}; Metal source needs clang 22 or later")
    assert str(line.message).endswith('next: pip install "hf_mps[metal-source]"')
    assert line.filename == __file__


def test_where_warnings_are_errors_it_compiles_all_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", compiled.SimulatedNotice)
        assert torch.compile(lambda x: x * 2)(torch.ones(2, device="mps")).tolist() == [2.0, 2.0]
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"hf_mps: {compiled.SENTENCE}; ")


class Attention(nn.Module):
    """A block as nanoGPT has it."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).split(width, dim=2)
        q, k, v = (each.view(batch, length, self.heads, -1).transpose(1, 2) for each in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))


class Decoder(nn.Module):
    def __init__(self, words: int = 30, length: int = 12, width: int = 16) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(Attention(width), Attention(width))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return nn.functional.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), labels.flatten())


def losses(way: Callable[[nn.Module], Any], lengths: Iterable[int] = (12, 12, 12, 8, 12)) -> list[float]:
    """A training loop as nanoGPT's: fused AdamW, clipping, an evaluation, and a batch of another length."""
    torch.manual_seed(0)
    net = Decoder().to("mps")
    run = way(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    ids = torch.randint(30, (4, 13)).to("mps")
    found = []
    for length in lengths:
        loss = run(ids[:, :length], ids[:, 1 : length + 1])
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.append(loss.item())
    with torch.no_grad():
        found.append(run(ids[:, :12], ids[:, 1:13]).item())
    return found


@pytest.mark.slow
def test_a_small_gpt_trains_with_the_losses_that_it_has_without() -> None:
    with_it = losses(torch.compile)
    assert with_it == pytest.approx(losses(lambda net: net), rel=1e-5)
    assert with_it[-1] < with_it[0]


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
    run = torch.compile(lambda x: x if there() else -x, backend="eager", fullgraph=True)
    assert run(torch.ones(2, device="mps")).tolist() == [1.0, 1.0]


def fused_step(weight: Tensor, gradient: Tensor, moments: Tensor, step: Tensor, rate: Tensor) -> None:
    """An optimizer's step as nanochat writes it: in place on the device, its numbers in tensors on the CPU."""
    weight.mul_(1 - rate * 0.1)
    moments.lerp_(gradient, 0.1)
    weight.add_(-rate / (1 - 0.9**step) * moments)


def test_a_step_in_place_with_numbers_on_the_cpu_is_the_one_without() -> None:
    plain, own = ([torch.full((3, 3), value, device="mps") for value in (1.0, 2.0, 0.0)] for _ in range(2))
    run = torch.compile(fused_step, dynamic=False, fullgraph=True)
    for number in (1.0, 2.0, 3.0):
        fused_step(*plain, torch.tensor(number), torch.tensor(0.01))
        run(*own, torch.tensor(number), torch.tensor(0.01))
    torch.testing.assert_close(own, plain)


class Words(nn.Module):
    """The smallest model that Trainer takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.EmbeddingBag(loops.WORDS, 8), nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        logits = self.head(self.words(input_ids))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def by_trainer(folder: Path, **settings: Any) -> list[Tensor]:
    return loops.trained(folder, model=Words(), **settings)


def by_accelerate(folder: Path, **settings: Any) -> list[Tensor]:
    return loops.accelerated(Words(), loops.new_accelerator(**settings))


@pytest.mark.parametrize(
    ("train", "how"),
    [
        (by_trainer, {"torch_compile": True}),
        (by_trainer, {"torch_compile_backend": "inductor"}),
        (by_accelerate, {"dynamo_backend": "inductor"}),
        (by_accelerate, {"dynamo_plugin": TorchDynamoPlugin(backend="inductor", dynamic=True)}),
    ],
    ids=str,
)
def test_trainer_and_accelerate_train_as_without(
    train: Callable[..., list[Tensor]], how: dict[str, Any], tmp_path: Path
) -> None:
    plain = train(tmp_path)
    torch._dynamo.utils.counters.clear()
    assert loops.close(train(tmp_path, **how), plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"], "nothing was compiled"


def test_a_graph_that_makes_its_own_tensor_on_the_device_is_the_devices_too() -> None:
    with pytest.warns(compiled.SimulatedNotice):
        found = torch.compile(lambda x: x.sum() + torch.ones(2, device="mps").sum().cpu())(torch.ones(2))
    assert found.item() == 4.0


def test_of_a_function_on_both_devices_inductor_compiles_what_is_the_cpus_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[set[str]] = []

    def compile_fx(graph: Any, inputs: list[Tensor], **_: Any) -> Any:
        seen.append({each.device.type for each in inputs})
        return graph.forward

    def both(host: Tensor, device: Tensor) -> Tensor:
        host = host * 2
        torch._dynamo.graph_break()
        device = device * 3
        torch._dynamo.graph_break()
        return host + 1

    monkeypatch.setattr(inductor, "compile_fx", compile_fx)
    with pytest.warns(compiled.SimulatedNotice):
        assert torch.compile(both)(torch.ones(2), torch.ones(2, device="mps")).tolist() == [3.0, 3.0]
    assert seen == [{"cpu"}, {"cpu"}]


DEEP = """
import resource, torch
from tests import hazards
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(40)]).half().to("mps")
with torch.no_grad(), hazards.on("cuda-graphs"):
    print(torch.compile(model, mode="reduce-overhead")(torch.ones(2, 4, dtype=torch.float16, device="mps")).shape)
"""


def test_a_mode_with_cuda_graphs_ends_the_process_as_on_a_mac(run_python: Any) -> None:
    died = run_python("-c", DEEP, cwd=CHECKOUT, env={"HF_MPS_GUARDS": "-cuda-graphs"})
    assert (died.returncode, died.stdout) == (-signal.SIGSEGV, "")
    assert "the process ends here as on a Mac (https://github.com/pytorch/pytorch/issues/188970)" in died.stderr


def test_switching_it_on_imports_no_compiler(run_python: Any) -> None:
    code = (
        "import sys, torch; from hf_mps.metal.simulator import compiled as c; before = set(sys.modules); "
        "c.install_compiler(); c.install_compiler(); print(sorted(set(sys.modules) - before))"
    )
    done = run_python("-c", code, env={"HF_MPS": "0", "HF_MPS_SIMULATE": None})
    assert done.stdout.strip() == "[]", done.stderr
