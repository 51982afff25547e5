"""The ledger: calls, seconds, bytes, way and share of each operator, readable, printed, and warned of when large."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch
from torch.nn.functional import multi_margin_loss

from hf_mps.metal import fallback
from hf_mps.metal.fallback import MetalFallbackWarning, accounting

pytestmark = pytest.mark.filterwarnings("ignore::hf_mps.metal.fallback.MetalFallbackWarning")


def test_the_report_names_each_operator_with_its_figures() -> None:
    x = torch.arange(100.0, device="mps")
    label = torch.tensor([3], device="mps")
    began = time.perf_counter()
    for _ in range(5):
        multi_margin_loss(x, label)
    took = time.perf_counter() - began
    report = fallback.report()
    (entry,) = report.operators
    assert (entry.operator, entry.calls, entry.shared, entry.way) == ("aten::multi_margin_loss", 5, 0, "copied")
    assert entry.bytes == 5 * (400 + 8 + 4)
    assert 0 < entry.seconds <= took <= report.wall
    assert entry.share == pytest.approx(entry.seconds / report.wall)
    assert report.seconds == entry.seconds
    json.dumps(report.as_dict())
    assert report.as_dict()["operators"][0]["operator"] == "aten::multi_margin_loss"


def test_nothing_fell_back_is_an_empty_report() -> None:
    torch.ones(3, device="mps") + 1
    report = fallback.report()
    assert report.operators == ()
    assert (report.seconds, report.share, str(report)) == (0, 0.0, "")


def test_a_report_since_a_moment_holds_only_what_came_after() -> None:
    x = torch.ones(3, device="mps")
    x.mode()
    since = accounting.ledger.snapshot()
    x.clone().logit_()
    assert [entry.operator for entry in accounting.ledger.report(since).operators] == ["aten::logit_"]
    assert len(fallback.report().operators) == 2


def test_calls_of_several_threads_are_all_counted() -> None:
    x = torch.ones(3, device="mps")

    def work() -> None:
        for _ in range(200):
            x.mode()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fallback.report().calls == 800


def test_a_large_share_of_the_time_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "WINDOW", 0.02)
    fallback.reset()
    x = torch.rand(400, 400, device="mps")

    def work() -> None:
        until = time.perf_counter() + 0.2
        while time.perf_counter() < until:
            x.mode()

    with pytest.warns(MetalFallbackWarning, match=r"took \d+% of the last \d\.\d s, simulated, more than 10%") as seen:
        work()
    assert sum("of the last" in str(one.message) for one in seen) == 1


def test_a_small_share_is_not(recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "WINDOW", 0.1)
    fallback.reset()
    x = torch.ones(3, device="mps")
    for _ in range(5):
        time.sleep(0.1)  # a call takes 0.05 ms, and a few on a machine with other work
        x.mode()
    assert not [one for one in recwarn if "of the last" in str(one.message)]


def test_the_way_is_told_in_words() -> None:
    def way(calls: int, shared: int) -> str:
        return accounting.Entry("aten::x", calls, 1.0, 0, shared, 0.1).way

    assert [way(3, 0), way(3, 3), way(3, 1)] == ["copied", "shared", "shared 1, copied 2"]
