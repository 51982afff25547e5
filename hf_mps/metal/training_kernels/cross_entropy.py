"""Cross-entropy and its gradient, in the logits' place, in one dispatch; operators pass over the logits nine times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_mps.metal.training_kernels.library import Source, width
from hf_mps.metal.training_kernels.trial import Case, case

SOURCE = Source("cross_entropy.metal")
IGNORED = -100
"""The label that trials give to rows that do not count, PyTorch's own."""


def losses_in_place(logits: Tensor, labels: Tensor, ignored: int, factor: float | None) -> Tensor:
    """Return each row's loss, float32, 0 where its label is `ignored`; logits become their gradient, times `factor`.

    `logits` is (rows, words), as `library.ordinary` says; `labels` is (rows), int64. Without a factor the logits stay.
    """
    rows, words = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    threads = width(words)
    SOURCE.kernel("cross_entropy", logits.dtype)(
        # The kernel takes an int4 and reads three of it.
        logits, losses, labels, [words, ignored, int(factor is not None), 0], factor or 0.0,
        threads=rows * threads, group_size=threads, arg_casts={3: "int32"},
    )  # fmt: skip
    return losses


def cases(_: str) -> Iterator[Case]:
    """Yield a chunk of a language model's logits, one row of which has no label."""
    draw = torch.Generator().manual_seed(0)
    for rows, words, dtype in ((128, 4000, torch.float32), (64, 32000, torch.bfloat16)):
        labels = torch.randint(words, (rows,), generator=draw)
        labels[1] = IGNORED
        logits = 3 * torch.randn(rows, words, generator=draw)

        def ours(given: Tensor, labels: Tensor = labels) -> Sequence[Tensor]:
            gradient = given.clone()
            return losses_in_place(gradient, labels.to(given.device), IGNORED, 1.0), gradient

        def stock(given: Tensor, labels: Tensor = labels) -> Sequence[Tensor]:
            learns = given.detach().requires_grad_()
            whole = learns if given.dtype == torch.float64 else learns.float()
            losses = torch.nn.functional.cross_entropy(whole, labels.to(given.device), reduction="none")
            return losses.detach(), torch.autograd.grad(losses.sum(), learns)[0]

        yield case(f"{rows} x {words} words", [logits], dtype, ours, stock)
