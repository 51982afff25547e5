"""Training loops that people write by hand give the CPU's losses on the simulated device, and nobody says a word."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("mps")

Loop = Callable[[str], Iterator[float]]


def encoder(width: int, layers: int = 1) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class SentenceEncoder(nn.Module):
    """Mean pooling over tokens that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layers = nn.Embedding(90, 32, padding_idx=0), encoder(32)

    def forward(self, ids: Tensor) -> Tensor:
        there = ids != 0
        hidden = self.layers(self.tokens(ids), src_key_padding_mask=~there)
        weights = there[..., None].to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


def contrastive(device: str) -> Iterator[float]:
    """In-batch negatives, warm-up, clipping: sentence embeddings."""
    model = SentenceEncoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 3))
    for _ in range(5):
        anchors = torch.randint(1, 90, (12, 9))
        others = anchors.roll(1, 1)
        anchors[:6, 7:] = 0
        first, second = (functional.normalize(model(ids.to(device)), dim=-1) for ids in (anchors, others))
        loss = functional.cross_entropy(first @ second.T * 20, torch.arange(12, device=device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield loss.item()


class Denoiser(nn.Module):
    """Down and up with a skip, group norm, attention over the pixels and the step's sinusoids."""

    def __init__(self) -> None:
        super().__init__()
        self.of_step = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.into, self.down = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.norm, self.qkv = nn.GroupNorm(4, 16), nn.Linear(16, 48)
        self.up, self.out = nn.ConvTranspose2d(16, 16, 4, 2, 1), nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, noisy: Tensor, steps: Tensor) -> Tensor:
        angles = steps[:, None].float() * torch.exp(-torch.arange(4, device=noisy.device))
        outer = self.into(noisy) + self.of_step(torch.cat([angles.sin(), angles.cos()], -1))[:, :, None, None]
        inner = self.down(functional.silu(outer))
        rows, channels, high, wide = inner.shape
        pixels = self.norm(inner).view(rows, channels, high * wide).transpose(1, 2)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(pixels).chunk(3, -1))
        seen = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        inner = inner + seen.transpose(1, 2).reshape(rows, channels, high, wide)
        wider = self.up(inner) + functional.interpolate(inner, scale_factor=2, mode="nearest")
        return self.out(torch.cat([wider, outer], 1))


def denoising(device: str) -> Iterator[float]:
    """Noise at random steps, an average of the weights: diffusion."""
    model = Denoiser().to(device)
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0).to(device)
    for _ in range(4):
        images, noise = (torch.randn(4, 3, 8, 8).to(device, non_blocking=True) for _ in range(2))
        steps = torch.randint(0, 100, (4,)).to(device)
        share = kept[steps][:, None, None, None]
        loss = functional.mse_loss(model(share.sqrt() * images + (1 - share).sqrt() * noise, steps), noise)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.1)
        yield loss.item()
    with torch.no_grad():
        yield average(images, steps).std().item()


@pytest.mark.parametrize("loop", [contrastive, denoising])
def test_a_loop_gives_the_cpus_losses_in_silence(loop: Loop, capfd: pytest.CaptureFixture[str]) -> None:
    losses = {}
    for device in ("cpu", "mps"):
        torch.manual_seed(5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            losses[device] = list(loop(device))
    assert losses["mps"] == pytest.approx(losses["cpu"], rel=1e-4)
    assert len(set(losses["cpu"])) > 2
    assert capfd.readouterr().err == ""
