"""Norms by kernels: stock's numbers, in modules of torch's and in what transformers writes out."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
import transformers
from scipy import stats
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, GemmaConfig, GemmaForCausalLM
from transformers.models.bert.modeling_bert import BertOutput
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mt5.modeling_mt5 import MT5LayerNorm

from hf_mps.layer.fused_step.norms import NORMS
from hf_mps.metal import simulator
from tests.layer.fused_step import families
from tests.layer.fused_step.conftest import Fused

MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "LayerNorm": lambda: torch.nn.LayerNorm(8),
    "LayerNorm without bias": lambda: torch.nn.LayerNorm(8, bias=False),
    "RMSNorm": lambda: torch.nn.RMSNorm(8),
    "Llama's": lambda: LlamaRMSNorm(8),
    "T5's": lambda: MT5LayerNorm(8),
}


def made(name: str) -> torch.nn.Module:
    """A norm on the device whose weight is no row of ones."""
    torch.manual_seed(0)
    module = MODULES[name]()
    with torch.no_grad():
        for each in module.parameters():
            each.uniform_(0.5, 2)
    return module.to("mps")


def gradients(
    module: torch.nn.Module, context: AbstractContextManager[None], dtype: torch.dtype, rows: int
) -> list[Tensor]:
    """The result and the gradients of a sum of its squares, on the host."""
    module = copy.deepcopy(module).to(dtype)
    given = torch.randn(rows, 5, 8, generator=torch.Generator().manual_seed(1)).to("mps", dtype).requires_grad_()
    with context:
        found = module(given)
        found.square().sum().backward()
    of = [each.grad for each in (given, *module.parameters())]
    return [each.detach().cpu() for each in (found, *of) if each is not None]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    ("rows", "dispatches", "dtype"), [(3, 2, torch.float32), (3, 2, torch.bfloat16), (200, 3, torch.float32)], ids=str
)
def test_results_and_gradients_are_stocks_in_two_or_three_dispatches(
    rows: int, dispatches: int, name: str, dtype: torch.dtype, fused: Fused
) -> None:
    module = made(name)
    expected = gradients(module, nullcontext(), dtype, rows)
    with simulator.counted() as counts:
        found = gradients(module, fused(), dtype, rows)
    for mine, theirs in zip(found, expected, strict=True):
        apart = (mine.double() - theirs.double()).abs().max() / theirs.double().abs().max()
        assert float(apart) <= (1e-6 if dtype == torch.float32 else 0.04)  # bfloat16 has three digits
    assert sum(each for name, each in counts.operators.items() if name.startswith("metal::")) == dispatches


@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_gradients_are_stocks(name: str, fused: Fused) -> None:
    """The weight is counted once, also where the norm's input depends on it."""
    module = made(name)
    given = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).to("mps").requires_grad_()
    families.same_second_gradients(fused, lambda x: module(module(x)), given, wanted=module.parameters())


def test_a_frozen_weight_costs_no_dispatch(fused: Fused) -> None:
    module = made("Llama's").requires_grad_(False)
    given = torch.randn(200, 8).to("mps").requires_grad_()
    with fused(), simulator.counted() as counts:
        module(given).sum().backward()
    assert not any("columns" in name for name in counts.operators)


def test_other_code_keeps_its_own_way(fused: Fused) -> None:
    """Gemma's norm has a word more: one is added to its weight. transformers marks it for no kernel."""
    sizes = {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": families.LENGTH}
    gemma = GemmaForCausalLM(GemmaConfig(vocab_size=families.WORDS, **sizes, **families.SHAPE))
    with fused():
        assert not hasattr(type(gemma.model.norm).forward, "hf_mps_patches")
        assert NORMS.words(gemma, "mps") == ""


def test_without_gradients_and_on_the_host_stock_runs(fused: Fused) -> None:
    norm = LlamaRMSNorm(8)
    with fused():
        assert "Norm" not in type(norm(torch.ones(2, 8, requires_grad=True)).grad_fn).__name__
        with torch.no_grad(), simulator.counted() as counts:
            norm.to("mps")(torch.ones(2, 8, device="mps"))
    assert counts.launches == 7, "Llama's six, and the ones"


def test_what_transformers_marks_is_this_formula_in_every_model() -> None:
    """The mark says that a kernel may compute a layer; this says that it is ours."""
    marked = []
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        for found in re.finditer(
            r'\n@use_kernel_forward_from_hub\("RMSNorm"\)\nclass .*?(?=\n\n\n)', file.read_text(), re.S
        ):
            marked.append(file.name)
            code = found[0].partition("def forward")[2]
            assert "variance = hidden_states.pow(2).mean(-1, keepdim=True)" in code, file.name
            assert "hidden_states * torch.rsqrt(variance + self.variance_epsilon)" in code, file.name
            assert re.search(r"return \(?self\.weight(\.to\(torch\.float32\))? \* hidden_states", code), file.name
    assert len(marked) > 100


def test_a_forward_mode_derivative_is_stocks(fused: Fused) -> None:
    module = made("LayerNorm")
    given, along = torch.randn(3, 8).to("mps"), torch.randn(3, 8).to("mps")

    def derivative() -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(given.clone().requires_grad_(), along)
            found = torch.autograd.forward_ad.unpack_dual(module(dual)).tangent
        return found.cpu()

    expected = derivative()
    with fused():
        torch.testing.assert_close(derivative(), expected)


def output(dropout: float = 0.0) -> torch.nn.Module:
    """BERT's layer that ends in a norm of a sum."""
    torch.manual_seed(0)
    config = BertConfig(hidden_size=32, intermediate_size=32, hidden_dropout_prob=dropout)
    with torch.no_grad():
        module = BertOutput(config)
        for each in module.parameters():
            each.uniform_(-1, 1)
    return module.to("mps")


def through(module: torch.nn.Module, context: AbstractContextManager[None]) -> tuple[list[Tensor], int]:
    """The result and all gradients on the host, and the launches that it took."""
    draw = torch.Generator().manual_seed(1)
    given = [torch.randn(3, 5, 32, generator=draw).to("mps").requires_grad_() for _ in range(2)]
    module.zero_grad()
    with context, simulator.counted() as counts:
        found = module(*given)
        found.square().sum().backward()
    of = [found.detach(), *(each.grad for each in (*given, *module.parameters()))]
    return [each.cpu() for each in of if each is not None], counts.launches


def test_a_residual_is_added_by_the_norms_kernel(fused: Fused) -> None:
    module = output()
    expected, launches = through(module, nullcontext())
    found, fewer = through(module, fused())
    assert fewer < launches
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_dropout_takes_before_a_residual_is_drawn_by_chance_and_known_to_the_gradient(fused: Fused) -> None:
    module = output(0.25)
    with torch.no_grad():
        module.dense.weight.zero_()
        module.dense.bias.fill_(3)  # what is kept is 4
        module.LayerNorm.weight.fill_(1)
        module.LayerNorm.bias.zero_()
    torch.manual_seed(0)
    residual = torch.zeros(64, 4, 32, device="mps")
    given = torch.randn(64, 4, 32, device="mps")
    with fused():
        found = module(given, residual)
        kept = found.detach() > 0
        (gradient,) = torch.autograd.grad(found.pow(3).sum(), module.dense.bias)
        again = module(given, residual).detach() > 0
    assert stats.binomtest(int(kept.sum()), kept.numel(), 0.75).pvalue > 1e-4
    assert 0.2 < float((kept != again).float().mean()) < 0.55, "2 x 0.75 x 0.25 of them differ"
    total = (kept * 4.0).cpu().double().requires_grad_()
    torch.nn.functional.layer_norm(total, (32,)).pow(3).sum().backward()
    wanted = (total.grad * kept.cpu() / 0.75).sum((0, 1))
    torch.testing.assert_close(gradient.cpu().double(), wanted, rtol=1e-3, atol=1e-2)


def test_a_norm_that_somebody_looks_at_is_called(fused: Fused) -> None:
    module, seen = output(), []
    module.LayerNorm.register_forward_hook(lambda *given: seen.append(given))
    through(module, fused())
    assert len(seen) == 1


def test_gradients_of_gradients_through_a_residual_are_stocks(fused: Fused) -> None:
    module = output()
    given = torch.randn(3, 32, generator=torch.Generator().manual_seed(1)).to("mps").requires_grad_()
    families.same_second_gradients(fused, lambda x: module(x, x * 2), given)


@pytest.mark.parametrize("kernels", ["0", "1"])
def test_checkpointing_repeats_a_residuals_norm(kernels: str, fused: Fused, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the repeated pass by an error in a hook, wherever that is, which is nobody's fault."""
    monkeypatch.setenv("HF_MPS_TRAINING_KERNELS", kernels)
    module, found = output(0.5), []
    for again in (False, True):
        given = torch.randn(3, 32, generator=torch.Generator().manual_seed(1)).to("mps").requires_grad_()
        torch.manual_seed(2)
        with fused():
            out = checkpoint(module, given, given, use_reentrant=False) if again else module(given, given)
            out.square().sum().backward()
        found.append(given.grad.cpu())
    assert torch.equal(*found)
    assert not NORMS.broken
