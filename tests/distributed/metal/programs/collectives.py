"""Every collective on tensors of mps against Gloo's result for the same values on the CPU: a JSON line of rank 0."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from handed import BYTES
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

Collective = Callable[[Callable[..., Tensor]], list[Tensor]]
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
MOVED_ONLY = (torch.int16, torch.float8_e4m3fn)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)

RANK, SIZE = dist.get_rank(), dist.get_world_size()
LEFT, RIGHT = (RANK - 1) % SIZE, (RANK + 1) % SIZE


def reductions(make: Callable[..., Tensor]) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    """Collectives that compute; `make(*shape, seed)` gives a tensor of the dtype and device that are tried."""

    def all_reduce(op: Any) -> list[Tensor]:
        tensor = make(3, 5)
        dist.all_reduce(tensor, op)
        return [tensor]

    def reduce_to_last() -> list[Tensor]:
        tensor = make(7)
        dist.reduce(tensor, SIZE - 1)
        return [tensor] if RANK == SIZE - 1 else []

    def reduce_scatter() -> list[Tensor]:
        output = make(4)
        dist.reduce_scatter(output, [make(4, seed=part) for part in range(SIZE)])
        return [output]

    def reduce_scatter_tensor() -> list[Tensor]:
        output = make(2, 3)
        dist.reduce_scatter_tensor(output, make(2 * SIZE, 3))
        return [output]

    def coalesced() -> list[Tensor]:
        tensors = [make(3), make(2, 2)]
        with _coalescing_manager(async_ops=True) as started:
            for tensor in tensors:
                dist.all_reduce(tensor)
        started.wait()
        outputs = [make(2), make(3)]
        with _coalescing_manager():
            for output in outputs:
                dist.reduce_scatter_tensor(output, make(len(output) * SIZE))
        return [*tensors, *outputs]

    for op in OPS:
        yield f"all_reduce {op}", partial(all_reduce, op)
    yield from ((one.__name__, one) for one in (reduce_to_last, reduce_scatter, reduce_scatter_tensor, coalesced))


def movements(make: Callable[..., Tensor]) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    """Collectives that only move."""

    def broadcast() -> list[Tensor]:
        tensor = make(2, 3)
        dist.broadcast(tensor, SIZE - 1)
        return [tensor]

    def all_gather() -> list[Tensor]:
        outputs = [make(2, 3, seed=9) for _ in range(SIZE)]
        dist.all_gather(outputs, make(2, 3))
        return outputs

    def all_gather_into_tensor() -> list[Tensor]:
        output = make(2 * SIZE, 3, seed=9)
        dist.all_gather_into_tensor(output, make(2, 3))
        return [output]

    def all_gather_coalesced() -> list[Tensor]:
        outputs = [make(2 * SIZE, seed=9), make(SIZE, seed=9)]
        with _coalescing_manager():
            for output in outputs:
                dist.all_gather_into_tensor(output, make(len(output) // SIZE))
        return outputs

    def gather() -> list[Tensor]:
        outputs = [make(3, seed=9) for _ in range(SIZE)] if RANK == 0 else None
        dist.gather(make(3), outputs, 0)
        return outputs or []

    def scatter() -> list[Tensor]:
        output = make(3, seed=9)
        dist.scatter(output, [make(3, seed=part) for part in range(SIZE)] if RANK == SIZE - 1 else None, SIZE - 1)
        return [output]

    def all_to_all_single() -> list[Tensor]:
        """Each rank sends r + 1 rows to rank r."""
        output = make(SIZE * (RANK + 1), 2, seed=9)
        sent = [rank + 1 for rank in range(SIZE)]
        dist.all_to_all_single(output, make(sum(sent), 2), [RANK + 1] * SIZE, sent)
        return [output]

    def all_to_all() -> list[Tensor]:
        outputs = [make(2, 3, seed=9) for _ in range(SIZE)]
        dist.all_to_all(outputs, [make(2, 3, seed=rank) for rank in range(SIZE)])
        return outputs

    def ring() -> list[Tensor]:
        received = make(4, seed=9)
        ops = [dist.P2POp(dist.irecv, received, LEFT), dist.P2POp(dist.isend, make(4), RIGHT)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return [received]

    def from_any() -> list[Tensor]:
        received = {}
        if RANK:
            dist.send(make(2), 0)
        for _ in range(0 if RANK else SIZE - 1):
            tensor = make(2, seed=9)
            received[dist.recv(tensor)] = tensor
        dist.barrier()  # or a rank's next tensor would come before another's first
        return [received[rank] for rank in sorted(received)]

    for one in (broadcast, all_gather, all_gather_into_tensor, all_gather_coalesced, gather, scatter):
        yield one.__name__, one
    for one in (all_to_all_single, all_to_all, ring, from_any):
        yield one.__name__, one


def maker(dtype: torch.dtype, device: str) -> Callable[..., Tensor]:
    def make(*shape: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(100 * RANK + seed)
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator).to(dtype).to(device)
        return torch.randint(0, 5, shape, generator=generator).to(dtype).to(device)

    return make


def compared() -> tuple[int, list[str]]:
    """How many results were compared, and those that are not Gloo's to the bit."""
    count, wrong = 0, []
    for dtype in (*DTYPES, *MOVED_ONLY):
        kinds = (movements,) if dtype in MOVED_ONLY else (reductions, movements)
        for kind in kinds:
            # What Gloo cannot move by itself is compared with the same bytes as uint8.
            ours = dict(kind(maker(dtype, "mps")))
            its = dict(kind(maker(dtype, "cpu") if dtype not in MOVED_ONLY else of_bytes(dtype)))
            for name in ours:
                found, wanted = ours[name](), its[name]()
                count += len(found)
                same = len(found) == len(wanted) and all(alike(a, b) for a, b in zip(found, wanted, strict=True))
                if not same or any(tensor.device.type != "mps" for tensor in found):
                    wrong.append(f"{name} of {dtype}")
    return count, wrong


def of_bytes(dtype: torch.dtype) -> Callable[..., Tensor]:
    plain = maker(dtype, "cpu")
    return lambda *shape, seed=0: plain(*shape, seed=seed).unsqueeze(-1).view(torch.uint8)


def alike(found: Tensor, wanted: Tensor) -> bool:
    there = found.cpu()
    return torch.equal(there if there.dtype == wanted.dtype else there.unsqueeze(-1).view(wanted.dtype), wanted)


def special() -> dict[str, Any]:
    """What Gloo alone has not: slices, sizes of each rank's own, futures, an average, refusals."""
    found: dict[str, Any] = {}
    BYTES.clear()
    whole = torch.zeros(4, 4, device="mps")
    whole[:, :2] = RANK + 1
    dist.all_reduce(whole[:, :2])
    found["slice"] = whole.cpu().tolist()
    found["bytes of a slice"] = BYTES["copied"]
    outputs = [torch.zeros(rank + 1, device="mps") for rank in range(SIZE)]
    dist.all_gather(outputs, torch.full((RANK + 1,), float(RANK), device="mps"))
    found["uneven gather"] = [output.tolist() for output in outputs]
    part = torch.zeros(RANK + 1, device="mps")
    dist.reduce_scatter(part, [torch.ones(rank + 1, device="mps") for rank in range(SIZE)])
    found["uneven scatter"] = part.tolist()
    row = torch.zeros(SIZE * 6, device="mps")
    dist.all_gather_into_tensor(row, torch.full((2, 3), float(RANK), device="mps"))
    found["row"] = row.tolist()
    arrived = [torch.zeros(RANK + 1, device="mps") for _ in range(SIZE)]
    dist.all_to_all(arrived, [torch.full((rank + 1,), float(RANK), device="mps") for rank in range(SIZE)])
    found["uneven exchange"] = [each.tolist() for each in arrived]
    work = dist.all_reduce(torch.ones(2, device="mps"), async_op=True)
    found["future"] = [tensor.tolist() for tensor in work.get_future().then(lambda f: f.value()).wait()]
    found["wait"] = [work.wait(timedelta(seconds=5)), work.is_completed()]
    average = torch.tensor([float(RANK)], device="mps")
    dist.all_reduce(average, dist.ReduceOp.AVG)
    found["average"] = average.item()
    objects: list[Any] = [None] * SIZE
    dist.all_gather_object(objects, {"rank": RANK})
    found["objects"] = [each["rank"] for each in objects]
    try:
        dist.all_reduce(torch.ones(2, dtype=torch.int16, device="mps"))
    except RuntimeError as error:
        found["refusal"] = f"{type(error).__name__}: {error}"
    dist.barrier(device_ids=[0])
    pair = dist.new_group([0, 1])
    if RANK < 2:
        mine = torch.ones(1, device="mps")
        dist.all_reduce(mine, group=pair)
        found["pair"] = [mine.item(), dist.get_backend(pair)]
    return found


def main() -> None:
    BYTES.clear()
    count, wrong = compared()
    copied = BYTES["copied"]
    said = {"backend": dist.get_backend(), "count": count, "wrong": wrong, "copied": copied, **special()}
    everyone: list[Any] = [None] * SIZE
    dist.all_gather_object(everyone, wrong)
    if RANK == 0:
        print(json.dumps({**said, "wrong": sorted({each for one in everyone for each in one})}))


main()
