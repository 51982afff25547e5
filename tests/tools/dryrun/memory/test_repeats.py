"""A call that equals an earlier one is answered as that was, and a trace finds what it finds without such answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from hf_mps.finetune.loss import chunked
from hf_mps.finetune.smoke import repeats
from hf_mps.layer.guards.platform.memory import NEAR
from hf_mps.metal.operators.launch_class import LaunchTable
from hf_mps.tools.dryrun import launches
from hf_mps.tools.dryrun.memory import loops, trace
from hf_mps.tools.dryrun.memory.fit import CHECKPOINTING
from hf_mps.tools.dryrun.memory.loops import FIRST, LAST, Loops
from hf_mps.tools.dryrun.memory.machine import Machine
from hf_mps.tools.dryrun.memory.plan import estimate, plan
from hf_mps.tools.dryrun.memory.trace import Memory
from hf_mps.tools.dryrun.modules import ModuleTracker
from hf_mps.tools.dryrun.resolve import resolve_target
from hf_mps.tools.dryrun.step import TrainingStep
from tests.tools.dryrun.memory.test_fake import fakes

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "two": lambda one, other: one * other,
    "a whole number": lambda one, other: (one > 0) * 1,
    "a number": lambda one, other: (one > 0) * 1.0,
    "in place": lambda one, other: one.mul_(other),
    "in place with itself": lambda one, other: one.mul_(one),
    "a dtype": lambda one, other: one.to(torch.bfloat16),
    "a dtype's view": lambda one, other: one.view(torch.int32),
    "a view": lambda one, other: one.transpose(0, 1)[1:],
    "a part of a part": lambda one, other: one[3][2:8],
    "views": lambda one, other: one.split(16),
    "a view by strides": lambda one, other: one[2:].as_strided((3, 4), (1, 2), 5),
    "a shape": lambda one, other: torch.ops.aten._unsafe_view(one, (256, 64)),
    "the same": lambda one, other: one.contiguous(),
    "a list": lambda one, other: torch.cat([one, other]),
    "lists in place": lambda one, other: torch._foreach_mul_([one, other], 2.0),
    "several": lambda one, other: one.max(dim=1),
    "a norm": lambda one, other: torch.nn.functional.layer_norm(one, (256,)),
    "a new shape in place": lambda one, other: one[1:].t_(),
    "of a new shape in place": lambda one, other: [one[1:].exp(), one[1:].t_().exp()],
    "zeros": lambda one, other: torch.zeros_like(one),
    "imaginary": lambda one, other: torch.complex(one, other).conj().imag,
}


def form(found: Any, given: list[torch.Tensor]) -> Any:
    """What is to be equal of a result: forms, keys of dispatch, and whose memory it has."""
    if not isinstance(found, torch.Tensor):
        return None if found is None else [form(each, given) for each in found]
    memory = [each.untyped_storage() for each in given]
    own = found.untyped_storage()
    place = next((number for number, each in enumerate(memory) if each is own), None)
    layout = (found.shape, found.stride(), found.storage_offset(), found.dtype, found.device, own.nbytes())
    return layout, place, [found is each for each in given], str(torch._C._dispatch_keys(found)), found.is_neg()


@pytest.mark.parametrize("name", CALLS)
def test_the_second_result_is_as_the_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_KNOWN", {})
    with fakes(torch.randn(1)), Memory(ModuleTracker()):
        first, second = (torch.empty(66, 256, device="mps") for _ in range(2))  # of known values no call is answered
        found = []
        for start in (0, 1, 2):  # elsewhere in memory
            for answers in (True, False):
                given = [(each + 0.5)[start : start + 64] for each in (first.exp(), second.exp())]
                with monkeypatch.context() as patched:
                    if not answers:
                        patched.setattr(repeats, "_unknown", lambda func: None)
                    found.append(form(CALLS[name](*given), given))
    for answered, anew in zip(found[::2], found[1::2], strict=True):
        assert answered == anew


def test_values_that_are_known_are_no_part_of_an_answer() -> None:
    with fakes(torch.tensor([[1, 1, 0]]), torch.tensor([[1, 0, 0]])) as masks, Memory(ModuleTracker()):
        assert [int(each.sum()) for each in masks] == [2, 1]
        scores = torch.empty(1, 3, device="mps")
        assert [len(scores.exp()[each.bool()]) for each in masks] == [2, 1]


TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 128,
}
TARGETS = {
    "all weights": ("causal-lm", {"model_type": "llama", "max_position_embeddings": 64}),
    "a scan": ("causal-lm", {"model_type": "mamba", "state_size": 4, "num_hidden_layers": 8}),
    "a pooler that no loss reads": ("sentence-embeddings", {"model_type": "bert"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_a_trace_with_answers_and_taken_for_granted_weights_finds_what_it_finds_without(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, config = TARGETS[name]
    AutoConfig.for_model(**TINY | config).save_pretrained(tmp_path)
    rows = ["training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=2"]
    target, known = resolve_target(str(tmp_path), rows, task), dict[Any, Any]()
    monkeypatch.setattr(repeats, "_KNOWN", known)
    told = estimate(target, length=16, record=True)
    assert sum(one is not None for one in known.values()) > 50
    monkeypatch.setattr(repeats, "_unknown", lambda func: None)
    anew = estimate(target, length=16, record=True)
    for field in ("bytes", "parts", "where", "trained", "moments"):
        assert getattr(told, field) == getattr(anew, field)
    assert told.recorded is not None
    assert anew.recorded is not None
    for field in ("calls", "more", "places", "dtypes"):
        assert getattr(told.recorded, field) == getattr(anew.recorded, field)


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
def test_a_loss_whose_equal_chunks_are_followed_once_holds_and_calls_what_all_of_them_do(
    bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AutoConfig.for_model(**TINY | TARGETS["all weights"][1]).save_pretrained(tmp_path)
    rows = ["training.per_device_train_batch_size=3", "training.gradient_accumulation_steps=2"]
    target = resolve_target(str(tmp_path), [*rows, f"training.bf16={str(bf16).lower()}"], "causal-lm")
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 4 * TINY["vocab_size"] * 8)  # 3 x 15 tokens: five chunks of 8, and 5
    stock, runs = chunked._chunk_loss, list[int]()

    def chunk_loss(*given: Any, **said: Any) -> Any:
        runs.append(1)
        return stock(*given, **said)

    monkeypatch.setattr(chunked, "_chunk_loss", chunk_loss)
    told = estimate(target, length=15, record=True)
    few = len(runs)
    monkeypatch.setattr(Memory, "level", lambda memory, stock: stock)
    anew = estimate(target, length=15, record=True)
    assert few < len(runs) - few
    for field in ("bytes", "parts", "where", "trained", "moments"):
        assert getattr(told, field) == getattr(anew, field)
    assert told.recorded is not None
    assert anew.recorded is not None
    counts = [[call.operator for call in each.recorded.calls] for each in (told, anew) if each.recorded]
    assert counts[0] == counts[1]
    assert told.recorded.places == anew.recorded.places


SCANS: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4},
    "falcon_mamba": {"state_size": 4},
    "rwkv": {"attention_hidden_size": 32, "context_length": 128},
    "jamba": {"num_experts": 2, "num_key_value_heads": 2, "mamba_d_state": 4},
}


@pytest.mark.slow
@pytest.mark.rotated
@pytest.mark.parametrize("changes", [{}, CHECKPOINTING], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("name", SCANS)
def test_a_scan_of_which_a_few_positions_are_followed_holds_and_calls_what_all_of_them_do(
    name: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AutoConfig.for_model(name, **TINY | SCANS[name]).save_pretrained(tmp_path)
    rows = ["training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=2"]
    target, left_out = resolve_target(str(tmp_path), rows, "causal-lm").varied(changes), list[int]()
    leave = Loops._leave_out

    def leave_out(made: Loops, one: Any, last: Any, count: int) -> None:
        left_out.append(count)
        leave(made, one, last, count)

    monkeypatch.setattr(Loops, "_leave_out", leave_out)
    told = estimate(target, length=100, record=True)
    assert len(left_out) >= 4  # twice in each of two layers
    assert set(left_out) == {100 - FIRST - LAST}
    monkeypatch.setattr(loops, "LEAST", 1000)
    anew = estimate(target, length=100, record=True)
    for field in ("bytes", "parts", "where", "trained", "moments"):
        assert getattr(told, field) == getattr(anew, field)
    assert told.recorded.places == anew.recorded.places
    table = launches.table_of(None)
    assert isinstance(table, LaunchTable)
    assert launches.of_calls(told.recorded.calls, table) == launches.of_calls(anew.recorded.calls, table)


def test_a_loop_whose_rounds_come_to_differ_is_followed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    AutoConfig.for_model("mamba", **TINY | SCANS["mamba"]).save_pretrained(tmp_path)
    target = resolve_target(str(tmp_path), ["training.per_device_train_batch_size=2"], "causal-lm")
    monkeypatch.setattr(loops, "LEAST", 1000)
    whole = estimate(target, length=100)
    monkeypatch.setattr(loops, "LEAST", 64)
    stock = Loops._leave_out

    def leave_out(made: Loops, one: Any, *given: Any) -> None:
        stock(made, one, *given)
        one.seen = [*one.seen, "a call that the last rounds lack"]

    monkeypatch.setattr(Loops, "_leave_out", leave_out)
    assert estimate(target, length=100).moments == whole.moments


def test_a_plan_traces_the_checkpointed_step_once_where_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AutoConfig.for_model(**TINY | TARGETS["all weights"][1]).save_pretrained(tmp_path)
    target = resolve_target(str(tmp_path), ["training.per_device_train_batch_size=64"], "causal-lm")
    checkpointed = estimate(target.varied(CHECKPOINTING), length=64, record=True)
    between = (estimate(target, length=64).bytes + checkpointed.bytes) / 2
    stock, seen = trace.followed, list[tuple[bool, int]]()

    def followed(step: TrainingStep, *given: Any, **said: Any) -> Memory:
        seen.append((step.trainer.args.gradient_checkpointing, len(step.batches[0]["input_ids"])))
        return stock(step, *given, **said)

    monkeypatch.setattr(trace, "followed", followed)
    found = plan(target, Machine("a small Mac", 2**31, int(between / NEAR)), length=64)
    assert found.verdict == "fits"
    assert found.facts["checkpointing"].value
    assert (found.estimate.bytes, found.estimate.parts) == (checkpointed.bytes, checkpointed.parts)
    assert seen.count((True, 64)) == 1


@pytest.mark.parametrize(("name", "passes"), [("all weights", 1), ("a pooler that no loss reads", 2)])
def test_which_weights_train_is_asked_of_a_step_only_where_not_all_do(
    name: str, passes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, config = TARGETS[name]
    AutoConfig.for_model(**TINY | config).save_pretrained(tmp_path)
    run, runs = TrainingStep.run, []
    monkeypatch.setattr(TrainingStep, "run", lambda *given, **said: runs.append(1) or run(*given, **said))
    found = estimate(resolve_target(str(tmp_path), [], task), length=16)
    assert len(runs) == passes
    assert found.trained
    assert not any("pooler" in each for each in found.trained)
