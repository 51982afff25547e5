"""Trainings that ask for determinism: two runs, and one that goes on, are the same to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.layer.guards import loops

VARIABLES = (
    "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "ASCEND_LAUNCH_BLOCKING",
    "HCCL_DETERMINISTIC",
    "FLASH_ATTENTION_DETERMINISTIC",
)
"""What transformers' full_determinism sets."""


@contextmanager
def deterministic(warn_only: bool = False) -> Iterator[None]:
    """torch.use_deterministic_algorithms for a while; what transformers' full_determinism sets is taken back too."""
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    flags = cudnn.deterministic, cudnn.benchmark
    # OpInfo's own tests, once imported, forbid to set cudnn's flags outside of a context.
    with pytest.MonkeyPatch.context() as environment, torch.backends.__allow_nonbracketed_mutation():
        for name in VARIABLES:
            environment.setenv(name, "1")
            environment.delenv(name)
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            cudnn.deterministic, cudnn.benchmark = flags


def always(run: Callable[[], torch.Tensor]) -> bool:
    """Whether a few calls give one result, to the bit."""
    first = run().cpu()
    return all(torch.equal(run().cpu(), first) for _ in range(3))


def embedding_gradient(folder: Path) -> bool:
    """pytorch#195404's: an embedding of eight words, each of which stands forty times in a batch."""
    torch.manual_seed(0)
    table, factors = torch.nn.Embedding(8, 16).to("mps"), torch.randn(10, 32, 16, device="mps")
    words = torch.arange(320, device="mps").view(10, 32) % 8

    def gradient() -> torch.Tensor:
        (found,) = torch.autograd.grad((table(words) * factors).sum(), table.weight)
        return found

    with deterministic():
        return always(gradient)


def repeated_trainer(folder: Path) -> bool:
    """Trainer with full_determinism=True, twice."""
    with deterministic():
        runs = [loops.trained(folder, model=loops.bert(0.3), full_determinism=True, num_train_epochs=2) for _ in "12"]
    return loops.same(*runs)


def resumed_trainer(folder: Path) -> bool:
    """One that goes on from a checkpoint, and the unbroken one."""
    settings = {"full_determinism": True, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3}
    with deterministic():
        whole = loops.trained(folder / "whole", model=loops.bert(0.3), **settings)
        rest = loops.trainer(folder / "rest", model=loops.bert(0.3), **settings)
        rest.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-3"))
    return loops.same(whole, loops.weights(rest.model))


def gathered_gradient(folder: Path) -> bool:
    """The gradient of log-probabilities that DPO gathers, and of rows picked by number: torch 2.13 raises there."""
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 64, 50, generator=draw).to("mps").requires_grad_()
    chosen = torch.randint(0, 5, (4, 64, 40), generator=draw).to("mps")
    rows = torch.randint(0, 4, (300,), generator=draw).to("mps")

    def gradient() -> torch.Tensor:
        picked = (scores.gather(-1, chosen).sin().sum() * 0.3) + (scores[rows] ** 2).sum()
        (found,) = torch.autograd.grad(picked, scores)
        return found

    with deterministic():
        try:
            return always(gradient)
        except RuntimeError as error:
            if "does not have a deterministic implementation" not in str(error):
                raise
            return False
