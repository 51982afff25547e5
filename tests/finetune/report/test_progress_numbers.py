"""Times, sizes and names of metrics as people read them."""

from __future__ import annotations

import pytest

from hf_mps.finetune.report.screen import numbers, rows

GIB = 2**30


@pytest.mark.parametrize(
    ("seconds", "clock", "duration"),
    [
        (0, "0:00", "0.0 s"),
        (59.96, "1:00", "1 min 00 s"),
        (192.3, "3:12", "3 min 12 s"),
        (3599.7, "1:00:00", "1 h 00 min"),
    ],
)
def test_seconds_read_as_people_say_them(seconds: float, clock: str, duration: str) -> None:
    assert numbers.clock(seconds) == clock
    assert numbers.duration(seconds) == duration


def test_an_eta_that_is_not_known_is_dashes() -> None:
    assert numbers.clock(float("inf")) == "--:--"


def test_bytes_read_as_mebibytes_below_one_gibibyte() -> None:
    assert [numbers.memory(size) for size in (0, 512 * 2**20, GIB, 2_085_000_000)] == [
        "0 MiB",
        "512 MiB",
        "1.00 GiB",
        "1.94 GiB",
    ]


def test_a_metric_of_a_named_data_set_is_no_timing() -> None:
    logs = {"eval_mm_accuracy": 0.5, "eval_mm_runtime": 3.0, "eval_mm_samples_per_second": 3.0, "epoch": 1.0}
    assert rows.evaluated(logs) == {"mm_accuracy": 0.5}
