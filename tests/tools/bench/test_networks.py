"""The field's networks are those of their papers, their training trains, and a step's clock is read when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from hf_mps.core.choice import Choice
from hf_mps.tools.bench import cases
from hf_mps.tools.bench.cases import EVALUATION, TRAINING, Settings, Tick, timed
from hf_mps.tools.bench.networks import NETWORKS, VGG16, Network, Size, _texts

MPS = Choice("mps", "the test's")
BY_NAME = {network.name: network for network in NETWORKS}


def tiny(length: int) -> torch.nn.Module:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(**shape))


TINY = Network("tiny", Size(8, 64), Size(4, 16), tiny, _texts, "{0} tokens")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("ResNet50", 25_557_032),  # torchvision.models.resnet50's count
        ("BERT", 109_483_778),  # 109,482,240 of bert-base-uncased and a head of 768 x 2 + 2
        ("VGG16", 138_357_544),  # the paper's table 2: 138 millions; torchvision.models.vgg16's count
    ],
)
def test_a_network_has_its_papers_parameters(name: str, parameters: int) -> None:
    network = BY_NAME[name]
    with torch.device("meta"):
        model = network.build(network.whole.extent)
    assert sum(each.numel() for each in model.parameters()) == parameters


def test_vgg16_halves_the_picture_five_times_and_answers_with_a_thousand_logits() -> None:
    torch.manual_seed(0)
    model = VGG16(32).eval()
    pictures = torch.randn(2, 3, 32, 32)
    assert model.features(pictures).shape == (2, 512, 1, 1)
    logits = model(pictures)
    assert logits.shape == (2, 1000)
    assert 0.01 < logits.std() < 10, "the signal neither dies nor explodes on its way through sixteen layers"


@pytest.mark.usefixtures("mps")
def test_training_changes_the_weights_on_the_device_and_evaluation_leaves_them_alone() -> None:
    made: list[torch.nn.Module] = []

    def build(length: int) -> torch.nn.Module:
        made.append(tiny(length))
        return made[-1]

    with Network("tiny", TINY.whole, TINY.quick, build, _texts, "{0} tokens").case(quick=True).make(MPS) as work:
        weights = made[0].classifier.weight
        assert weights.device.type == "mps"
        assert (work.batch, work.row) == (4, "16 tokens")
        before = weights.detach().clone()
        work.phases[EVALUATION](2, lambda number: None, ())
        assert torch.equal(weights, before)
        assert not made[0].training
        work.phases[TRAINING](2, lambda number: None, ())
        assert not torch.equal(weights, before)
        assert made[0].training


@pytest.mark.usefixtures("mps")
def test_the_clock_is_read_after_the_device_is_done_and_the_first_steps_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    now = iter(range(100))
    monkeypatch.setattr(cases.time, "perf_counter", lambda: (order.append("clock"), float(next(now)))[1])
    monkeypatch.setattr(torch.mps, "synchronize", lambda: order.append("done"))

    def phase(count: int, tick: Tick, watch: Sequence[Any]) -> None:
        for number in range(1, count + 1):
            order.append("step")
            tick(number)

    found = timed(phase, "mps", Settings(warm_up=2, repetitions=4, seconds=60), batch=8)
    assert order == ["step", "done", "clock", "clock"] * 6
    assert [found[name] for name in ("repetitions", "fastest", "slowest", "rows_per_second")] == [4, 1, 1, 8]
    assert found["memory_bytes"] is not None


def test_slow_steps_end_early_and_never_below_three(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 5))
    monkeypatch.setattr(cases.time, "perf_counter", lambda: float(next(now)))

    def phase(count: int, tick: Tick, watch: Sequence[Any]) -> None:
        for number in range(1, count + 1):
            tick(number)

    assert timed(phase, "cpu", Settings(1, 10, seconds=1), 8)["repetitions"] == 3
    assert timed(phase, "cpu", Settings(1, 10, seconds=21), 8)["repetitions"] == 5


def test_a_memory_that_is_too_small_is_a_finding_and_another_error_an_error() -> None:
    def full(count: int, tick: Tick, watch: Sequence[Any]) -> None:
        raise RuntimeError("MPS backend out of memory (MPS allocated: 1 GB, max allowed: 1 GB)")

    def broken(count: int, tick: Tick, watch: Sequence[Any]) -> None:
        raise RuntimeError("shapes do not match")

    assert timed(full, "cpu", Settings(1, 3, 1), 4) == {"failure": "its memory is too small for this batch"}
    with pytest.raises(RuntimeError, match="do not match"):
        timed(broken, "cpu", Settings(1, 3, 1), 4)
