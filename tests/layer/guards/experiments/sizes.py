"""Gradients and products that go wrong by a dtype, a layout or a size, as people come to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.layer.guards.experiments.both import agree, numbers


def own_attention(folder: Path) -> bool:
    """Attention that a model computes itself, in a batch whose scores are too many, and its gradients."""

    def run(device: str) -> list[Tensor]:
        query, key, value = (numbers(6, 32, width).to(device).requires_grad_() for width in (8, 8, 4))
        weights = torch.softmax(query @ key.transpose(1, 2), -1)
        found = weights @ value
        return [found.detach(), *torch.autograd.grad(found.square().sum(), (query, key, value))]

    return agree(run)


def products_in_every_form(folder: Path) -> bool:
    """bmm and baddbmm, with factors, into another tensor and in place; one matrix that is too large by itself."""
    one, other, given = numbers(5, 30, 7), numbers(5, 40, 7).transpose(1, 2), numbers(1, 30, 40)

    def run(device: str) -> list[Tensor]:
        a, b, c = one.to(device), other.to(device), given.to(device)
        return [
            torch.bmm(a, b),
            torch.bmm(a, b, out=torch.empty(0, device=device)),
            torch.baddbmm(c, a, b, beta=2, alpha=0.5),
            torch.baddbmm(c * float("nan"), a, b, beta=0),
            torch.baddbmm(c, a, b, out=torch.empty(5, 30, 40, device=device)),
            c.expand(5, 30, 40).clone().baddbmm_(a, b, alpha=3),
            torch.bmm(numbers(1, 90, 3).to(device), numbers(1, 60, 3).to(device).transpose(1, 2)),
            torch.bmm(numbers(1, 2, 3).to(device), numbers(1, 1500, 3).to(device).transpose(1, 2)),
        ]

    return agree(run)


def collected_logits(folder: Path) -> bool:
    """Logits over a vocabulary that Trainer's evaluation puts together on the device."""
    from transformers.trainer_pt_utils import nested_concat

    whole = nested_concat(numbers(3, 5, 200).to("mps"), numbers(4, 5, 200).to("mps"))
    return torch.equal(whole.cpu(), torch.cat([numbers(3, 5, 200), numbers(4, 5, 200)]))


def cat_in_every_form(folder: Path) -> bool:
    """Along each dimension, of views, empty tensors and other dtypes, stacked, into another tensor, channels last."""
    one, other = numbers(3, 40, 30), numbers(3, 40, 30).flip(2)

    def run(device: str) -> list[Tensor]:
        a, b = one.to(device), other.to(device)
        pictures = numbers(2, 3, 20, 30).to(device).contiguous(memory_format=torch.channels_last)
        row = numbers(1, 60, 50).to(device)
        return [
            torch.cat([a, b]),
            torch.cat([a, b, a], 1),
            torch.cat([a, b], -1),
            torch.cat([torch.empty(0, device=device), a, b.half()], 2),
            torch.cat([a.transpose(0, 2), b.transpose(0, 2)]),
            torch.cat([row, row, row.int()], 2),
            torch.stack([a, b], 1),
            torch.cat([a, b], 1, out=torch.empty(0, device=device)),
            torch.cat([pictures, pictures], 1),
        ]

    return agree(run)


def _embedded(device: str, rows: int, width: int, ids: Tensor, **how: object) -> list[Tensor]:
    weight = numbers(rows, width).to(device).requires_grad_()
    factors = numbers(*ids.shape, width).to(device)
    loss = (F.embedding(ids.to(device), weight, **how) * factors).sum()  # type: ignore[arg-type]
    return [*torch.autograd.grad(loss, weight)]


def tall_embedding(folder: Path) -> bool:
    """A weight of too many rows, with padding and with gradients divided by how often a row was used."""
    ids = torch.arange(60).mul(37).remainder(300).view(4, 15)

    def run(device: str) -> list[Tensor]:
        return [
            *_embedded(device, 300, 20, ids),
            *_embedded(device, 300, 20, ids, padding_idx=37),
            *_embedded(device, 300, 20, ids.int().remainder(5), scale_grad_by_freq=True),
        ]

    try:
        return agree(run)
    except RuntimeError as error:
        return "tensor is larger than INT32_MAX" not in str(error)


def embedding_of_many_tokens(folder: Path) -> bool:
    """A small weight and a batch of too many tokens."""
    try:
        return agree(lambda device: _embedded(device, 10, 16, torch.arange(600).remainder(10), padding_idx=3))
    except RuntimeError as error:
        return "tensor is larger than INT32_MAX" not in str(error)


BATCH = 65_600


def _trained(function: Callable[..., Tensor], device: str, rows: Tensor, weight: Tensor, **how: int) -> list[Tensor]:
    rows, weight = (each.detach().to(device).requires_grad_() for each in (rows, weight))
    bias = torch.zeros(2, device=device, requires_grad=True)
    return [*torch.autograd.grad(function(rows, weight, bias, **how).square().mean() * 100, (rows, weight, bias))]


def folded_batch_of_conv1d(folder: Path) -> bool:
    """Words of a few characters each, all in one batch."""
    rows, weight = numbers(BATCH, 1, 3), numbers(2, 1, 2)
    return agree(lambda device: _trained(F.conv1d, device, rows, weight))


def folded_batch_of_conv2d(folder: Path) -> bool:
    """Patches of pictures in one batch, with strides and padding, of which the weight alone is trained."""
    rows, weight = numbers(BATCH, 1, 2, 2), numbers(2, 1, 2, 2)

    def run(device: str) -> list[Tensor]:
        there = weight.detach().to(device).requires_grad_()
        loss = F.conv2d(rows.to(device), there, stride=2, padding=1).square().mean() * 100
        return [*torch.autograd.grad(loss, there)]

    return agree(run)


def folded_batch_of_transposed(folder: Path) -> bool:
    """The same for a transposed convolution."""
    rows, weight = numbers(BATCH, 1, 2), numbers(1, 2, 2)
    return agree(lambda device: _trained(F.conv_transpose1d, device, rows, weight))


def video_patches(folder: Path) -> bool:
    """The embedding of a video's patches as VideoMAE has it, and a convolution with padding, both trained."""
    video, patches = numbers(2, 3, 4, 8, 8), numbers(2, 3, 2, 4, 4)
    return agree(lambda device: _trained(F.conv3d, device, video, patches, stride=2)) and agree(
        lambda device: _trained(F.conv3d, device, video, numbers(2, 3, 3, 3, 3), padding=1)
    )


def transposed_volumes(folder: Path) -> bool:
    """A transposed 3-D convolution, whose gradients come of one."""
    volume, weight = numbers(2, 3, 4, 5, 6), numbers(3, 2, 3, 3, 3)
    return agree(lambda device: _trained(F.conv_transpose3d, device, volume, weight))


def causal_padding_of_a_video(folder: Path) -> bool:
    """Frames of 256 by 256 pixels behind two empty ones, as video VAEs pad them; their gradient; six dimensions."""

    def run(device: str) -> list[Tensor]:
        video = numbers(1, 1, 2, 256, 256).to(device).requires_grad_()
        padded = F.pad(video, (0, 0, 0, 0, 2, 0))
        (gradient,) = torch.autograd.grad(padded.square().sum(), video)
        rows = numbers(1, 2, 1, 2, 256, 256).to(device)[:, :1]
        return [
            padded.detach(),
            gradient.flatten(),
            F.pad(rows, (1, 1, 2, 0, 0, 1), value=3.0),
            F.pad(rows, (0, 65_536)),
        ]

    return agree(run)


def volumes_padded_by_their_edges(folder: Path) -> bool:
    """Volumes that are mirrored, and continued, at their edges, and the gradients of both."""

    def run(device: str) -> list[Tensor]:
        found = []
        for mode in ("reflect", "replicate"):
            volume = numbers(1, 2, 3, 256, 260).to(device).requires_grad_()
            padded = F.pad(volume, (1, 2, 0, 1, 1, 1), mode=mode)
            loss = (padded * torch.arange(float(padded.shape[-1]), device=device)).sum()
            found += [padded.detach(), *torch.autograd.grad(loss, volume)]
        return found

    return agree(run)


def a_beta_in_a_tensor(folder: Path) -> bool:
    """An average in half precision whose factor is a float32 of the CPU, a float64, or lies on the device."""

    def run(device: str) -> list[Tensor]:
        found = []
        for dtype in (torch.float16, torch.bfloat16):
            mean, grad = (numbers(20, width).to(device, dtype) for width in (3, 3))
            for weight in (
                torch.tensor(0.1),
                torch.tensor(0.9, dtype=torch.float64),
                torch.tensor(0.25, device=device),
            ):
                found += [torch.lerp(mean, grad + 1, weight).float(), mean.clone().lerp_(grad + 1, weight).float()]
        return found

    return agree(run, tolerance=0.02)


def a_beta_of_a_schedule(folder: Path) -> bool:
    """The factor is one of many in a tensor of the CPU, and of another dtype."""
    betas = torch.linspace(0, 1, 11, dtype=torch.bfloat16)
    return agree(lambda device: [numbers(4, 3).to(device).lerp_(numbers(5, 3)[:4].to(device), betas[7])])


def scans_of_a_batch_of_one(folder: Path) -> bool:
    """Sums, products and logarithms of sums over the only row, which was a column: one each is new, one is given."""

    def run(device: str) -> list[Tensor]:
        row = numbers(40, 1).to(device).t()
        found = [row.cumsum(0), row.cumsum(-2, dtype=torch.float16).float(), row.cumprod(0), row.logcumsumexp(0)]
        found += [(row > 0).cumsum(0).float(), torch.cumsum(row, 0, out=torch.ones(1, 40, device=device))]
        return [*found, row.clone().cumsum_(0)]

    return agree(run)


def extremes_of_transposed_columns(folder: Path) -> bool:
    """The largest and smallest so far of one step, of columns that were transposed to be scanned."""

    def run(device: str) -> list[Tensor]:
        columns = numbers(3, 40, 1).to(device).transpose(1, 2)
        return [each.float() for scan in (torch.cummax, torch.cummin) for each in scan(columns, 1)]

    return agree(run)


def sums_in_transposed_rows(folder: Path) -> bool:
    """pytorch#176159's own program, with other numbers and a factor."""

    def run(device: str) -> list[Tensor]:
        sums, rows = numbers(3, 4, 5).to(device).permute(1, 0, 2), numbers(3, 6, 5).to(device).permute(1, 0, 2)
        index = torch.tensor([1, 3, 0, 0, 3, 0], device=device)
        return [sums.index_add_(0, index, rows), sums.index_add_(0, index, rows, alpha=2)]

    return agree(run)


def sums_in_a_slice(folder: Path) -> bool:
    """Counts by group in the second row of a table; everything beside them stays."""

    def run(device: str) -> list[Tensor]:
        table = numbers(3, 4).to(device)
        table[1].index_add_(0, torch.tensor([3, 0, 3], device=device), torch.ones(3, device=device))
        return [table]

    return agree(run)


def maxima_of_uneven_windows(folder: Path) -> bool:
    """Values, places and gradients of adaptive max pools: pytorch#190064's own sizes, and those of a whole network."""

    def run(device: str) -> list[Tensor]:
        found = []
        for size, wanted in ((5, 3), (7, 2)):
            image = numbers(2, 3, size, size).to(device).requires_grad_()
            pooled, places = F.adaptive_max_pool2d(image, wanted, return_indices=True)
            found += [pooled.detach(), places.float(), *torch.autograd.grad(pooled.square().sum(), image)]
        return found

    return agree(run)
