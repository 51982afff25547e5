"""The memory plan finds the device's own peak without memory, the largest batch, and what would make it fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_mps.cli.main import main
from hf_mps.core.errors import UserError
from hf_mps.tools.dryrun import metal_device
from hf_mps.tools.dryrun.memory import fit, machine, trace
from hf_mps.tools.dryrun.memory.fit import MemoryPlan, report
from hf_mps.tools.dryrun.memory.machine import largest
from hf_mps.tools.dryrun.memory.plan import estimate, plan
from hf_mps.tools.dryrun.memory.trace import Estimate
from hf_mps.tools.dryrun.modules import ModuleTracker
from hf_mps.tools.dryrun.render import render
from hf_mps.tools.dryrun.resolve import resolve_target
from scripts.bench import check_plan
from scripts.bench.check_plan import BLOCKS, CHECKPOINTING, CLASSIFY, CONTINUE, LORA, NF4, Pair
from tests import CHECKOUT

GIB = 2**30


@pytest.mark.rotated
@pytest.mark.slow
@pytest.mark.parametrize(
    "pair",
    [
        Pair("bert", CLASSIFY, 8, 64, (BLOCKS,)),
        Pair("llama", CONTINUE, 2, 128, (LORA, CHECKPOINTING)),
        Pair("llama", CONTINUE, 2, 128, (LORA, NF4, CHECKPOINTING)),
        Pair("mixtral", CONTINUE, 2, 32),
        # Weights that outweigh all else: what a sentinel copies, or a gradient that is added to another, is seen.
        Pair("gpt2-wide", CONTINUE, 1, 16),
        Pair("gpt2-wide", CONTINUE, 1, 16, ("optimizations=false",)),
    ],
    ids=[
        "encoder, attention in blocks",
        "decoder, LoRA, checkpointing",
        "decoder, LoRA over 4 bits, checkpointing",
        "mixture of experts",
        "wide",
        "wide, two gradients of one weight",
    ],
)
def test_the_planned_peak_is_the_one_that_the_device_measures(pair: Pair, tmp_path: Path) -> None:
    planned, measured = check_plan.both(pair, tmp_path, metal_device())
    assert planned == pytest.approx(measured, rel=0.005)


def test_the_parts_of_the_peak_are_what_they_say() -> None:
    found = estimate(resolve_target("quickstart", ["training.per_device_train_batch_size=4"]), length=32)
    weights = 22.7e6 * 4
    assert (found.rows, found.length) == (4, 32)
    assert sum(found.parts.values()) == found.bytes
    assert found.parts["weights"] == pytest.approx(weights, rel=0.01)
    # AdamW keeps two moments of each weight; the peak is in the second step, when they are there.
    assert found.parts["optimizer"] == pytest.approx(2 * weights, rel=0.02)


def test_moments_of_8_bits_are_a_byte_each_and_those_of_embeddings_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer keeps those in float32, and says so to all of bitsandbytes' optimizers."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(bitsandbytes.optim.GlobalOptimManager, "_instance", None)
    found = estimate(resolve_target("quickstart", ["training.optim=adamw_8bit"]), length=32)
    embedded = (30_522 + 512 + 2) * 384
    expected = 2 * (4 * embedded + (1 + 4 / 256) * (22.7e6 - embedded))
    assert found.parts["optimizer"] == pytest.approx(expected, rel=0.02)


def test_freed_tensors_are_no_longer_counted_and_views_are_not_counted_twice() -> None:
    metal_device()
    memory = trace.Memory(ModuleTracker())
    with memory:
        x = torch.zeros(1000, device="mps")
        y = x.view(10, 100)[2:]
        assert memory.peak.bytes == 4000
        z = x + 1
        assert memory.peak.bytes == 8000
        del z
        z = y * 2
    assert memory.peak.bytes == 8000
    assert z.numel() == 800


@pytest.mark.parametrize(
    ("step", "limit", "expected", "most"),
    [
        ([lambda rows: 100 + 7 * rows], 1000, 128, 2),
        ([lambda rows: 100 + 7 * rows], 106, 0, 1),
        ([lambda rows: 100 + 7 * rows], 107, 1, 2),
        ([lambda rows: 100 + 7 * rows], 99, 0, 0),
        # Level as long as the optimizer's step is the highest moment.
        ([lambda rows: 900, lambda rows: 3 * rows], 1000, 333, 3),
        # A loss in chunks grows to the first whole one, the layers go on.
        ([lambda rows: 100 + min(20 * rows, 650), lambda rows: 100 + 2 * rows], 1000, 450, 3),
        ([lambda rows: 500], 1000, 4096, 5),
    ],
)
def test_the_largest_batch_is_found_in_few_traces(
    step: list[Callable[[int], int]], limit: int, expected: int, most: int
) -> None:
    asked: set[int] = set()

    def traced(rows: int) -> dict[int, int]:
        asked.add(rows)
        return {number: moment(rows) for number, moment in enumerate(step)}

    found = largest(traced, limit, first=32, kept=100)
    assert expected * 0.98 <= found <= expected
    assert len(asked) <= most


@pytest.mark.parametrize(
    ("text", "memory", "recommended"),
    [("16gb", 16, 16 * 2 / 3), ("64 GB", 64, 48), ("m1-8gb", 8, 8 * 2 / 3), ("M4-Max-64GB", 64, 48)],
)
def test_a_machine_by_its_memory_or_its_name(text: str, memory: int, recommended: float) -> None:
    found = machine.named(text)
    assert found.memory == memory * GIB
    assert found.recommended == pytest.approx(recommended * GIB)
    assert found.verdict(found.comfortable) == "fits"
    assert found.verdict(found.comfortable + 1) == "swaps"
    assert found.verdict(found.memory + 1) == "does not fit"


@pytest.mark.parametrize("text", ["much", "0gb", "-3", "m2-por-16gb"])
def test_no_machine_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"--memory {text} is not a machine; allowed: a size as 16gb, or m1-8gb"):
        machine.named(text)


@pytest.mark.slow
def test_a_training_that_fits_ends_with_0_and_names_the_largest_batch_and_the_launches(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["plan", "quickstart", "--memory", "8gb", "--length", "32", "--json", "--torch", "2.14.1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not [*tmp_path.iterdir()]
    assert found["verdict"] == "fits"
    assert found["simulated"] is True
    assert found["options"] == []
    assert found["largest_batch"] > found["estimate"]["rows"]
    assert found["estimate"]["bytes"] < found["machine"]["comfortable"] < found["machine"]["recommended"]
    launched = found["launches"]
    assert launched["release"] == "2.14.1"
    assert launched["launches"] == sum(launched["classes"][each] for each in ("metal", "graph", "framework", "mixed"))
    assert launched["blits"] == launched["classes"]["blit"]
    # Of the second step: AdamW's moments, two for each weight, are there by then.
    assert launched["classes"]["metal"] < 850
    assert 0 < launched["graph_shapes"] < launched["classes"]["graph"]


@pytest.fixture
def tight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine that a step of 8 rows of a small decoder is too large for."""
    target = resolve_target(str(check_plan.recipe(Pair("llama", CONTINUE, 8, 128), tmp_path)))
    need = estimate(target).bytes
    return target, machine.Machine("a small Mac", int(need * 1.2), int(need * 0.9))


def test_a_plan_says_that_it_counts_live_memory_and_what_a_mac_s_driver_adds() -> None:
    found = Estimate(8, 128, 1, 6 * GIB, {}, "at backward: embeddings")
    text = render(report(MemoryPlan("mine.yaml", machine.named("8gb"), found, largest=4)))
    assert "\npeak 6.00 GiB of live memory, swaps: 118%" in text
    assert "live memory, of tensors alone: a Mac's driver holds 0.6 to 0.9 GiB more in heaps that are not full" in text


def test_a_batch_of_one_row_is_written_as_1_row() -> None:
    found = Estimate(1, 1024, 16, 2 * GIB, {}, "at backward: embeddings", width="of 1024 tokens")
    way = fit.Option(("weights=bfloat16",), "half", found, largest=1)
    text = render(report(MemoryPlan("mine.yaml", machine.named("8gb"), found, largest=1, options=(way,))))
    assert "largest batch that fits: 1 row of 1024 tokens" in text
    assert "up to 1 row" in text
    assert "1 rows" not in text


@pytest.mark.slow
def test_what_would_make_it_fit_the_least_change_first(tight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "TRACES", 3)
    target, small = tight
    refused = {"attention": "sdpa", next(iter(fit.CHECKPOINTING)): False}  # what a run would do itself
    found = plan(target.varied(refused), small)
    assert found.verdict == "swaps"
    assert 0 < found.largest < 8
    first = found.options[0]
    rows, accumulation = (int(word.partition("=")[2]) for word in first.overrides)
    assert rows <= found.largest
    assert rows * accumulation == 8
    assert found.options[1].overrides[0] == "training.bf16=true"
    assert any("lora={}" in option.overrides for option in found.options)
    assert all(option.estimate.bytes <= small.comfortable for option in found.options)


def test_weights_in_4_bits_are_proposed_below_adapters_alone(tmp_path: Path) -> None:
    target = resolve_target(str(check_plan.recipe(Pair("llama", CONTINUE, 8, 128), tmp_path)))
    with_lora = target.varied(fit.LORA)
    assert not fit.changes_something(target, fit.QUANTIZED)
    assert fit.changes_something(target, fit.LORA | fit.QUANTIZED)
    assert fit.changes_something(with_lora, fit.QUANTIZED)
    assert not fit.changes_something(with_lora.varied(fit.QUANTIZED), fit.QUANTIZED)
    classifier = resolve_target(str(check_plan.recipe(Pair("bert", CLASSIFY, 8, 128), tmp_path)))
    assert not fit.changes_something(classifier, fit.LORA | fit.QUANTIZED)


@pytest.mark.slow
def test_the_plan_is_of_the_step_that_the_run_takes_and_says_why(tight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "TRACES", 1)
    target, small = tight
    found = plan(target, small)
    assert (found.verdict, found.options) == ("fits", ())
    assert found.facts["checkpointing"].value is True
    assert "of a step swaps on a small Mac" in found.facts["checkpointing"].reason


@pytest.mark.nightly
@pytest.mark.slow
def test_seven_billion_parameters_are_planned_and_audited_in_a_laptops_memory(run_python: Any, tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(CHECKOUT)!r})
from pathlib import Path
from hf_mps.tools.dryrun.resolve import resolve_target
from hf_mps.tools.dryrun import audit
from hf_mps.tools.dryrun.memory.plan import estimate
from scripts.bench import check_plan
check_plan.SIZES["llama"] = dict(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
    num_attention_heads=32)
target = resolve_target(str(check_plan.recipe(check_plan.Pair("llama", check_plan.CONTINUE, 1, 512), Path("."))))
found = estimate(target)
seen = audit.audit(target)
print(seen.facts["model"].value, found.bytes, len(seen.findings))
"""
    # Linux counts what a process held before its exec into its peak: a small one starts the one that is measured.
    peak = (
        "import resource, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == 'darwin' else 1024))"
    )
    done = run_python("-c", peak, code)
    assert done.returncode == 0, done.stderr[-2000:]
    *words, size, found, resident = done.stdout.split()
    assert "6,738.4 M parameters" in " ".join(words)
    assert int(size) > 4 * 4 * 6.7e9  # weights, gradients and two moments in float32
    assert int(found) == 0
    assert int(resident) < 2 * GIB
