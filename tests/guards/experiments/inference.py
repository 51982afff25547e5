"""Attention where no gradient is wanted, as evaluation and generation meet it: Metal has kernels of its own for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def _near(found: torch.Tensor, right: torch.Tensor, tolerance: float = 2e-2) -> bool:
    same = found.shape == right.shape
    return same and torch.allclose(found.float().cpu(), right.float().cpu(), rtol=tolerance, atol=tolerance)


def _on(model: nn.Module, device: str) -> Any:
    return model.to(device).eval()


def gpt2(positions: int = 64, **settings: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    # Weights large enough for a token to depend on those before it.
    config = GPT2Config(n_layer=2, n_embd=128, n_head=2, vocab_size=99, n_positions=positions, initializer_range=0.3)
    for name, value in settings.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return GPT2LMHeadModel(config)


def evaluation_loss(folder: Path) -> bool:
    """A language model in bfloat16: its loss in evaluation is the one that it has in training."""
    model = _on(gpt2(), "mps").to(torch.bfloat16)
    ids = torch.arange(60, device="mps").view(2, 30)
    trained = model(input_ids=ids, labels=ids).loss
    with torch.no_grad():
        return _near(model(input_ids=ids, labels=ids).loss, trained.detach())


def later_tokens(folder: Path) -> bool:
    """What comes after a token changes nothing at it, in inference mode and under autocast too."""
    model = _on(gpt2(), "mps")
    ids = torch.arange(60, device="mps").view(2, 30)
    other = ids.clone()
    other[:, 9:] = 98
    with torch.inference_mode(), torch.autocast("mps", torch.float16):
        return _near(model(input_ids=ids).logits[:, :9], model(input_ids=other).logits[:, :9])


def short_sentences(folder: Path) -> bool:
    """Sentences of six words through BERT, whose heads are permuted views of a layer's output."""
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=128, num_attention_heads=2, num_hidden_layers=1, intermediate_size=64)
    torch.manual_seed(0)
    model = BertModel(config)
    ids = torch.arange(24).view(4, 6)
    with torch.no_grad():
        right = _on(model, "cpu")(input_ids=ids).last_hidden_state
        return _near(_on(model, "mps")(input_ids=ids.to("mps")).last_hidden_state, right)


def generated_from_padded_prompts(folder: Path) -> bool:
    """Prompts of two lengths, padded on the left: the first rows of the shorter one may attend to nothing."""
    model = gpt2(pad_token_id=0, eos_token_id=None, bos_token_id=None)
    ids = torch.arange(1, 25).view(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0

    def run(device: str) -> torch.Tensor:
        there = _on(model, device)
        return there.generate(  # type: ignore[no-any-return]
            input_ids=ids.to(device), attention_mask=mask.to(device), max_new_tokens=5, do_sample=False
        ).cpu()

    return torch.equal(run("cpu"), run("mps"))


def _next_token(length: int, dtype: torch.dtype) -> bool:
    """The logits of the token after `length` others, which lie in the cache."""
    model = gpt2(positions=length + 1).to(dtype)
    ids = torch.arange(length + 1).remainder(99).expand(2, -1)

    def run(device: str) -> torch.Tensor:
        there = _on(model, device)
        with torch.no_grad():
            cache = there(input_ids=ids[:, :-1].to(device)).past_key_values
            return there(input_ids=ids[:, -1:].to(device), past_key_values=cache).logits.float().cpu()  # type: ignore[no-any-return]

    right = run("cpu")
    return _near(run("mps"), right, tolerance=0.05 * float(right.abs().max()))


def long_context(folder: Path) -> bool:
    """The next token after 1,100 others in bfloat16."""
    return _next_token(1100, torch.bfloat16)


def uneven_context(folder: Path) -> bool:
    """The next token after 37 others."""
    return _next_token(37, torch.float32)


def narrow_values(folder: Path) -> bool:
    """Values narrower than keys, as DeepSeek's latent attention has them, and fewer heads of them."""
    query, key, value = (torch.randn(2, heads, 16, width) for heads, width in ((4, 32), (2, 32), (2, 24)))
    right = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    return _near(
        F.scaled_dot_product_attention(query.to("mps"), key.to("mps"), value.to("mps"), enable_gqa=True), right
    )


def compiled(folder: Path) -> bool:
    """The same in one compiled graph."""

    def attend(tensor: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(tensor, tensor, tensor, is_causal=True) * 2

    torch.manual_seed(0)  # of 20 draws two are small enough for the leak not to show
    given = torch.randn(1, 2, 20, 64, dtype=torch.bfloat16)
    run: Callable[[torch.Tensor], torch.Tensor] = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        return _near(run(given.to("mps")), attend(given))
