"""A batch that is moved without a wait arrives as one that waits: its values, its objects, the answers of its mask."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BatchEncoding, LlamaConfig, LlamaForCausalLM

from hf_mps.layer import guards
from hf_mps.layer.guards.platform import batches
from hf_mps.metal import simulator
from hf_mps.metal.simulator import strictness
from tests.layer.guards import loops
from tests.layer.guards.experiments.waits import padded

MPS = torch.device("mps")


class Sources(TorchDispatchMode):
    """Where each copy to the device reads, and whether it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[tuple[int, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "_to_copy" and args[0].device.type == "cpu":
            self.read.append((args[0].data_ptr(), not kwargs.get("non_blocking")))
        return func(*args, **(kwargs or {}))


def send(batch: Any, device: Any = MPS, **how: Any) -> Any:
    """As accelerate's loaders move a batch, Trainer's among them."""
    import accelerate.data_loader

    return accelerate.data_loader.send_to_device(batch, device, **how)


def test_each_tensor_goes_from_memory_that_the_script_does_not_have() -> None:
    batch = {"input_ids": torch.arange(6).view(2, 3), "labels": torch.tensor([1, 0])}
    with Sources() as sources, simulator.counted() as counts:
        there = send(batch)
    assert (counts.waits, counts.copies_in) == (0, 2)
    assert [waits for _, waits in sources.read] == [False, False]
    assert not {each.data_ptr() for each in batch.values()} & {place for place, _ in sources.read}
    batch["labels"].fill_(9)  # a loader that fills its next batch into the same memory
    assert there["labels"].tolist() == [1, 0]
    assert there["input_ids"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_batches_that_are_filled_into_the_same_memory_arrive_whole_while_work_is_queued() -> None:
    host, weight = torch.zeros(4, 4), torch.ones(4, 4, device="mps")
    found: dict[str, list[float]] = {}
    with strictness.on("queued-work"):
        for name, how in {"the guard's": {}, "the script's own": {"non_blocking": True}}.items():
            firsts = []
            for number in range(4):
                host.fill_(number)
                firsts.append((send({"x": host}, **how)["x"] @ weight)[0, 0])
            found[name] = [first.item() for first in firsts]
    assert found == {"the guard's": [0, 4, 8, 12], "the script's own": [12, 12, 12, 12]}


def encoding() -> Any:
    return BatchEncoding({"input_ids": torch.ones(2, 3, dtype=torch.long), "names": ["a", "b"]})


BATCHES: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"x": torch.ones(2, 3), "y": [torch.zeros(2), (torch.ones(1), "text", None)]},
    "encoding": encoding,
    "other mapping": lambda: UserDict(x=torch.ones(2)),
    "strided": lambda: torch.arange(12.0).view(3, 4).t(),
    "expanded": lambda: torch.ones(1, 3).expand(4, 3),
    "channels last": lambda: torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "a part": lambda: torch.arange(12.0)[3:9:2],
    "number": lambda: torch.tensor(3),
}


def shown(value: Any) -> Any:
    """What there is to see of a batch."""
    if isinstance(value, Tensor):
        return value.tolist(), value.dtype, value.device, value.stride(), value.storage_offset(), type(value)
    if hasattr(value, "items"):
        return type(value), {name: shown(each) for name, each in value.items()}
    return (type(value), [shown(each) for each in value]) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_of_any_form_is_what_stock_makes_of_it(kind: str) -> None:
    found = []
    for off in (False, True):
        with guards.suspended("batch-waits") if off else nullcontext(), simulator.counted() as counts:
            batch = BATCHES[kind]()
            there = send(batch)
            waits = counts.waits
        assert bool(waits) is off
        assert (there is batch) == (kind == "encoding")  # which moves its tensors and stays itself
        found.append(shown(there))
    assert found[0] == found[1]


class Told(Tensor):
    """A class of tensors that says itself what a move is."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is Tensor.to
        assert kwargs == {"non_blocking": False}
        return "moved by its own class"


def test_what_is_no_plain_tensor_of_the_host_s_is_moved_as_stock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with guards.suspended("shape-growth", "float64-columns"):  # which look at what they are given
        assert send(torch.ones(2).as_subclass(Told)) == "moved by its own class"
    learned = torch.ones(2, requires_grad=True)
    moved = send({"learned": learned})["learned"]
    moved.sum().backward()
    assert type(moved.grad_fn).__name__ == "ToCopyBackward0"
    assert learned.grad is not None
    there = torch.ones(2, device="mps")
    assert send(there) is there
    assert send(torch.ones(2), torch.device("cpu")).device.type == "cpu"
    monkeypatch.setattr(batches, "LARGEST", 7)
    send(torch.ones(2))
    assert not guards.get("batch-waits").times


def test_a_script_that_asks_not_to_wait_has_its_own_copy() -> None:
    host = torch.ones(2)
    with Sources() as sources:
        send(host, non_blocking=True)
    assert sources.read == [(host.data_ptr(), False)]
    assert not guards.get("batch-waits").times


def test_an_inference_s_batch_is_moved_without_a_wait_too(bert: Any) -> None:
    with torch.inference_mode(), simulator.counted() as counts:
        there = send(
            {
                "input_ids": torch.ones(2, 8, dtype=torch.long),
                "attention_mask": torch.tensor([[1] * 8, [1] * 4 + [0] * 4]),
            }
        )
    assert counts.waits == 0
    with torch.inference_mode():
        bert(**there)
    assert not batches.BATCH_WAITS.broken


def rows_of_ids() -> dict[str, Tensor]:
    return {name: torch.tensor([row[name] for row in padded()[4:12]]) for name in ("input_ids", "attention_mask")}


@pytest.fixture(scope="module")
def bert() -> Iterator[Any]:
    return loops.bert().to("mps").eval()


@pytest.fixture(scope="module")
def llama() -> Iterator[Any]:
    torch.manual_seed(3)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=loops.WORDS, pad_token_id=0, **shape)).to("mps").eval()


def masked(model: Any, batch: dict[str, Any]) -> tuple[Tensor, int]:
    """The logits of a forward pass, and how often it waited."""
    with torch.no_grad(), simulator.counted(places=True) as counts:
        logits = model(**batch).logits
    return logits.cpu(), sum(times for place, times in counts.places.items() if "masking_utils" in place.where)


@pytest.mark.parametrize("rows", [slice(None), slice(4)], ids=["padded", "without padding"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_mask_of_a_batch_answers_without_a_wait_what_it_answers_with_one(
    name: str, rows: slice, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name)
    batch = {column: values[rows] for column, values in rows_of_ids().items()}
    logits, waits = masked(model, send(batch))
    with guards.suspended("batch-waits"):
        expected, stock = masked(model, send(batch))
    assert torch.equal(logits, expected)
    assert (waits, stock > 0) == (0, True)


def test_a_mask_that_masks_nothing_launches_nothing_in_a_model_that_only_hides_with_it(bert: Any) -> None:
    launches = []
    for rows in (slice(4), slice(None)):
        batch = send({column: values[rows] for column, values in rows_of_ids().items()})
        with torch.no_grad(), simulator.counted() as without:
            bert(input_ids=batch["input_ids"])
        with torch.no_grad(), simulator.counted() as counts:
            bert(**batch)
        launches.append(counts.launches - without.launches)
    assert launches[0] == 0 < launches[1]


def test_a_mask_that_the_script_changes_on_the_device_is_asked_again(bert: Any) -> None:
    batch = send({column: values[:4] for column, values in rows_of_ids().items()})
    whole, _ = masked(bert, batch)
    batch["attention_mask"][0, 3:] = 0
    part, waits = masked(bert, batch)
    assert waits == 1
    assert not torch.equal(whole[0], part[0])
    assert torch.equal(whole[1], part[1])


def test_padded_prompts_generate_the_same_words(llama: Any) -> None:
    batch = {name: values.flip(1) for name, values in rows_of_ids().items()}
    with torch.no_grad():
        words = llama.generate(**send(batch), max_new_tokens=4, do_sample=False)
        with guards.suspended("batch-waits"):
            assert torch.equal(words, llama.generate(**send(batch), max_new_tokens=4, do_sample=False))


def test_a_compiled_model_is_one_graph_with_the_guard_as_without(bert: Any) -> None:
    batch = send(rows_of_ids())
    with loops.own_compiler(), torch.no_grad():
        compiled = torch.compile(bert, backend="eager", fullgraph=True)
        assert torch.allclose(compiled(**batch).logits, bert(**batch).logits, atol=1e-5)
    assert not guards.get("batch-waits").failure
