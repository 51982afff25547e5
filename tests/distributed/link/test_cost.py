"""What a step sends: the ring counted hop by hop, PowerSGD's and DDP's own rules, and words that a person reads."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from hf_mps.distributed.link import cost
from hf_mps.distributed.link.cost import Gradients, Link

SLOW = Link(bandwidth=1e9, latency=4e-4)
SHAPES = ((30522, 384), (384,), (384, 384), (1536, 384), (2, 384), (64, 3, 7, 7), (2,))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_ring_costs_what_its_hops_cost(ranks: int) -> None:
    size, seconds, sent = 12e6, 0.0, 0.0
    for _phase in ("reduce-scatter", "all-gather"):
        for _hop in range(ranks - 1):  # each rank sends a piece to its neighbour, all at the same time
            sent += size / ranks
            seconds += SLOW.latency + 8 * (size / ranks) / SLOW.bandwidth
    assert cost.traffic(size, ranks) == pytest.approx(sent)
    assert SLOW.all_reduce(size, 1, ranks) == pytest.approx(seconds)


def test_one_rank_sends_nothing() -> None:
    assert SLOW.all_reduce(12e6, 1, 1) == 0
    assert cost.traffic(12e6, 1) == 0


def test_powersgd_sends_what_its_hook_would() -> None:
    sent = 0
    for shape in SHAPES:
        gradient = torch.empty(shape)
        matrix = gradient.view(shape[0], -1)
        pays, _, small = powerSGD_hook._should_compress(*matrix.shape, cost.RANK, cost.LEAST_RATE)
        sent += small if len(shape) > 1 and pays else gradient.numel()
    assert Gradients(SHAPES).sent(cost.POWERSGD)[0] == 4 * sent


def test_half_the_bytes_in_half_precision_and_the_buckets_that_ddp_makes() -> None:
    gradients = Gradients(((1000, 50_000),))
    assert gradients.sent(cost.NONE) == (200_000_000, gradients.buckets)
    assert gradients.sent(cost.BF16)[0] == gradients.sent(cost.FP16)[0] == 100_000_000
    many = Gradients(((1000, 1000),) * 50)  # 4 MB each: the first alone passes 1 MiB, then 7 pass 25 MiB
    tensors = [torch.empty(shape, device="meta") for shape in many.shapes]
    made, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, [cost.FIRST_BUCKET, cost.BUCKET])
    assert abs(many.buckets - len(made)) <= 1
    assert Gradients(()).buckets == 0


def test_what_is_sent_during_the_backward_pass_is_not_waited_for() -> None:
    assert cost.step(compute=3.0, sending=1.9) == pytest.approx(3.0)
    assert cost.step(compute=3.0, sending=4.0) == pytest.approx(5.0)


def test_a_plan_is_read_in_words() -> None:
    found = cost.ways(Gradients(((30522, 384), (384,))), SLOW, ranks=2)
    assert str(found[cost.BF16]) == "link.compression=bf16 22.4 MiB in 190 ms"
    assert str(found["local_steps"]) == "link.local_steps=8 5.59 MiB in 47.1 ms"
    assert cost.advice(found) == "nothing is waited for where a step computes for 566 ms, with bf16 285 ms"
    assert str(SLOW) == "1 Gbit/s, 0.4 ms"
