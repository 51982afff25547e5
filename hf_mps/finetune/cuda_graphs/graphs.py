"""CUDA graphs of one body of work, one for each shape of its inputs, all in one pool of memory.

Recording runs a body's Python once and none of its kernels; a replay launches all of them at once, with the numbers
that lie in the graph's inputs then. Random draws continue the device's generator as eager ones do: PyTorch gives each
replay the present seed and offset and advances the offset by what the body draws (torch/csrc, CUDAGraph.cpp,
CUDAGeneratorImpl.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hf_mps.core.import_hooks import uncollected
from hf_mps.core.text import summary

MOST = 24
"""Graphs that are kept: each holds its kernels' parameters, some MiB of the device for a BERT's step."""


Outputs = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Recorded:
    """A graph, the tensors that it reads its inputs from, and those that a replay leaves its outputs in."""

    replay: Callable[[], None]
    inputs: dict[str, Tensor]
    outputs: Outputs


class RecordingFailed(RuntimeError):
    """The body does what a graph cannot hold, such as reading a number from the device."""


class Graphs:
    """The graphs of a training on one device, by key. Outputs are overwritten by the next replay of any of them.

    `record` takes a body and returns its replay and outputs; tests put another in place of CUDA's.
    """

    def __init__(self, record: Callable[[Callable[[], Outputs]], Any] | None = None) -> None:
        self._record = record or CudaRecorder()
        self._recorded: dict[Hashable, Recorded] = {}

    def __len__(self) -> int:
        return len(self._recorded)

    def takes(self, key: Hashable) -> bool:
        """Return whether there is a graph of this key, or room for one."""
        return key in self._recorded or len(self._recorded) < MOST

    def run(self, key: Hashable, inputs: Mapping[str, Tensor], body: Callable[[dict[str, Tensor]], Outputs]) -> Outputs:
        """Run `body` on `inputs` by the graph of `key`, which is recorded where there is none.

        All inputs of a key have the same names, shapes and dtypes. A replay does not wait for the device. Raises
        RecordingFailed.
        """
        found = self._recorded.get(key)
        if found is None:
            # Clones: the graph reads these addresses for as long as it lives.
            held = {name: tensor.clone() for name, tensor in inputs.items()}
            replay, outputs = self._record(lambda: body(held))
            found = self._recorded[key] = Recorded(replay, held, outputs)
        else:
            for name, tensor in inputs.items():
                found.inputs[name].copy_(tensor, non_blocking=True)
        found.replay()
        return found.outputs

    def clear(self) -> None:
        """Drop every graph, and with them their pool's memory."""
        self._recorded.clear()


class CudaRecorder:
    """Records with `torch.cuda.CUDAGraph` on its own stream, every graph in one pool.

    A graph's temporary tensors are free again when its recording ends, so that the next one takes the same memory:
    together they hold what the largest needs, least where it comes first.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._emptied = False

    def __call__(self, body: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        if not self._emptied:  # what eager steps held is the pool's now
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            self._emptied = True
        # Nothing runs while it is recorded, and a replay comes after what was sent before it: earlier steps may still
        # be under way, and the host's work on this one is hidden behind them.
        graph = torch.cuda.CUDAGraph()
        present = torch.cuda.current_stream()
        # What Python would collect meanwhile may be another graph, and CUDA forbids to free one here.
        with _generator_kept(), uncollected(), torch.cuda.stream(self._stream):
            # thread_local: a loader's thread may pin memory meanwhile, which the default, global, takes for a fault.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = body()
                graph.capture_end()
            except RecordingFailed:
                self._abandon(graph)
                raise
            except Exception as error:
                self._abandon(graph)
                words = summary(error)
                if "capturing" in str(error) or "capture" in str(error):
                    words = "the step reads a number from the device, or does something else that CUDA cannot record"
                raise RecordingFailed(words) from error
        present.wait_stream(self._stream)
        return graph.replay, outputs

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a recording that failed, so that eager work goes on as before it."""
        try:
            graph.capture_end()
        except RuntimeError:  # CUDA says again that the recording is void; the allocator still sends work to its pool
            end = getattr(torch._C, "_cuda_endAllocateToPool", None)
            if end is not None:
                end(torch.cuda.current_device(), self._pool)


@contextmanager
def _generator_kept() -> Iterator[None]:
    """Give the device's generator its state back where a recording fails: it would refuse eager draws from then on."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.clone_state()
    try:
        yield
    except RecordingFailed:
        generator.graphsafe_set_state(before)
        raise


MASK = "attention_mask"


# transformers looks on the device whether a mask hides anything, at each step (masking_utils.py, `padding_mask.all()`),
# and where it cannot look, makes one that hides nothing: another kernel for attention, with other random draws, more
# memory and less speed. Here the mask is looked at on the host, before the batch goes to the device.


@dataclass
class Unmasked:
    """A collator around a text model's: batches in which every token is one of a row's own go without their mask."""

    inner: Callable[[list[Any]], Any]

    def __call__(self, features: list[Any]) -> Any:
        batch = self.inner(features)
        if isinstance(batch, Mapping) and "input_ids" in batch and MASK in batch:
            mask = batch[MASK]
            if getattr(mask, "shape", None) == batch["input_ids"].shape and bool(mask.all()):
                del batch[MASK]  # type: ignore[attr-defined]
        return batch


@contextmanager
def as_they_are(inputs: Mapping[str, Any]) -> Iterator[None]:
    """Let transformers take no mask for none, and positions that it makes itself for those of one sequence a row.

    While a step is recorded it cannot look, and makes a mask of both (masking_utils.py: `is_tracing`, of no mask up to
    release 5.22, and `find_packed_sequence_indices`). Positions that the batch brings are left to it.
    """
    from transformers import masking_utils

    names = ("is_tracing", "find_packed_sequence_indices")
    stock = {name: getattr(masking_utils, name) for name in names if hasattr(masking_utils, name)}

    def is_tracing(tensor: Any = None) -> bool:
        return tensor is not None and bool(stock["is_tracing"](tensor))

    def find_packed_sequence_indices(position_ids: Any) -> Any:
        return stock["find_packed_sequence_indices"](position_ids) if "position_ids" in inputs else None

    ours: dict[str, Any] = {"is_tracing": is_tracing, "find_packed_sequence_indices": find_packed_sequence_indices}
    with patch.multiple(masking_utils, **{name: ours[name] for name in stock}):
        yield
