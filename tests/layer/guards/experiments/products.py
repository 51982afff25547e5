"""Matrix products over more values than M1 and M2 sum rightly, in the shapes in which training meets them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.layer.guards.experiments.both import agree, numbers

WORDS = 40_009


def below_a_vocabulary(folder: Path) -> bool:
    """What a language model's head sends down: pytorch#153957's layer, in 2 x 32 tokens."""

    def run(device: str) -> list[Tensor]:
        rows = numbers(2, 32, 24).to(device).requires_grad_()
        head = numbers(WORDS, 24).to(device)
        loss = F.cross_entropy(F.linear(rows, head).flatten(0, 1), torch.arange(64, device=device))
        return [*torch.autograd.grad(loss, rows)]

    return agree(run)


def of_a_large_batch(folder: Path) -> bool:
    """The gradient of a weight over 40,016 tokens: pytorch#177116."""

    def run(device: str) -> list[Tensor]:
        layer = nn.Linear(16, 16, bias=False, device=device)
        nn.init.constant_(layer.weight, 0.5)
        return [*torch.autograd.grad(layer(numbers(8, 5002, 16).to(device)).square().mean(), layer.weight)]

    return agree(run)


def of_a_wide_layer(folder: Path) -> bool:
    """A linear layer over flattened pictures of 40,009 values, with a bias."""
    weight, bias, rows = numbers(32, WORDS), numbers(32), numbers(16, WORDS)
    return agree(lambda device: [F.linear(*(each.to(device) for each in (rows, weight, bias)))])


def in_every_form(folder: Path) -> bool:
    """mm, addmm, baddbmm, in place and into another tensor, with factors."""
    one, other, given = numbers(16, WORDS), numbers(WORDS, 16), numbers(16, 16)

    def forms(device: str) -> list[Tensor]:
        a, b, c = one.to(device), other.to(device), given.to(device)
        return [
            torch.mm(a, b, out=torch.empty(0, device=device)),
            torch.addmm(c, a, b, beta=2, alpha=0.5),
            torch.addmm(c * float("nan"), a, b, beta=0, out=torch.empty(16, 16, device=device)),
            c.clone().addmm_(a, b),
            torch.baddbmm(c[None], a[None], b[None])[0],
            c[None].clone().baddbmm_(a[None], b[None], alpha=3)[0],
            torch.bmm(a[None], b[None], out=torch.empty(0, device=device))[0],
        ]

    return agree(forms)


def in_half_precision(folder: Path) -> bool:
    """The same under autocast, added up in float32 as the device's own kernel does."""
    one, other = numbers(16, WORDS), numbers(WORDS, 16)

    def run(device: str) -> list[Tensor]:
        with torch.autocast(device, torch.bfloat16):
            return [(one.to(device) @ other.to(device)).float()]

    return agree(run, tolerance=2e-2)


def into_slices(folder: Path) -> bool:
    """Products that are written into one of several matrices: pytorch PR 193385."""

    def run(device: str) -> list[Tensor]:
        one, other = numbers(4, 8).to(device), numbers(8, 4).to(device)
        matrices = torch.zeros(5, 2, 4, 4, device=device)
        torch.mm(one, other, out=matrices[1, 0])
        torch.addmm(one[:, :4], one, other, beta=2, out=matrices[2, 0])
        matrices[3, 0].addmm_(one, other, alpha=3)
        torch.bmm(one.expand(2, 4, 8), other.expand(2, 8, 4), out=matrices[4])
        matrices[3:4, 1].baddbmm_(one[None], other[None])
        return [matrices]

    return agree(run)


def between_columns(folder: Path) -> bool:
    """Products that are written into a part of each row, as layers side by side have them: pytorch#104832."""

    def run(device: str) -> list[Tensor]:
        one, other = numbers(4, 8).to(device), numbers(8, 4).to(device)
        wide = torch.ones(4, 12, device=device)
        torch.mm(one, other, out=wide[:, :4])
        wide[:, 4:8].addmm_(one, other, alpha=0.5)
        return [wide]

    return agree(run)


def of_a_sums_gradient(folder: Path) -> bool:
    """pytorch#180201: the gradient of a sum is one number expanded, which a layer multiplies by its weight."""

    def run(device: str) -> list[Tensor]:
        rows, layer = numbers(64, 3).to(device).requires_grad_(), nn.Linear(3, 1, device=device)
        nn.init.constant_(layer.weight, 0.5)
        return [*torch.autograd.grad(layer(rows).sum(), rows)]

    return agree(run)


def of_expanded_matrices(folder: Path) -> bool:
    """One row for all, by mm and addmm in each form."""

    def run(device: str) -> list[Tensor]:
        one, other = numbers(1, 3).to(device).expand(40, 3), numbers(3, 5).to(device)
        added = numbers(5).to(device)
        forms = [one @ other, torch.mm(one, other, out=torch.empty(0, device=device))]
        forms += [torch.addmm(added, one, other, beta=2), torch.zeros(40, 5, device=device).addmm_(one, other, alpha=3)]
        return forms

    return agree(run)
