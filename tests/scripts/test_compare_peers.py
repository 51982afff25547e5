"""One training by each of the field's ways, compared: what each side gets, what the clock counts, and the ratios."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests import CHECKOUT

FOLDER = CHECKOUT / "scripts" / "bench"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module; it imports its neighbours as scripts do."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import compare_peers

    yield compare_peers  # type: ignore[misc]
    for name in ("compare_peers", "peer", "measured_on"):
        sys.modules.pop(name, None)


def side(seconds: float, *scores: tuple[float, float]) -> dict[str, object]:
    return {"seconds": seconds, "scores": list(scores), "first_step": 5.0, "peak_memory_bytes": 2**30}


def test_ratios_are_medians_round_by_round_and_the_f1_is_one_that_every_side_reaches(peers: ModuleType) -> None:
    quick, slow = side(10.0, (5.0, 0.70), (10.0, 0.82)), side(40.0, (20.0, 0.80), (40.0, 0.81))
    found = peers.summary([{"stock": slow, "hf_mps": quick}, {"hf_mps": quick, "stock": slow}], rows=800)
    assert found["stock"]["ratio"] == 4.0
    assert found["hf_mps"]["ratio"] == 1.0
    assert (found["hf_mps"]["rows_per_second"], found["stock"]["rows_per_second"]) == (80.0, 20.0)
    # 0.81 is the best of the slower side: the quick one has it at the end of its second epoch.
    assert (found["hf_mps"]["seconds_to_f1"], found["stock"]["seconds_to_f1"]) == (10.0, 40.0)
    assert [line.split()[0] for line in peers.table(found) if line] == ["side", "stock", "hf_mps"]


def test_every_side_gets_the_same_rows_model_batch_epochs_and_seed(peers: ModuleType, tmp_path: Path) -> None:
    training = peers.Training(tmp_path / "model", tmp_path, 7, "3e-5", 2, batch=16)
    tuned = peers.Tuned(("--bf16", "true"), ("--bf16",), {})
    words = {name: " ".join(peers.command(name, "cpu", training, tuned, tmp_path / "out")[1]) for name in peers.SIDES}
    for name, line in words.items():
        for part in (f"{tmp_path}/model", f"{tmp_path}/train.csv", f"{tmp_path}/dev.csv", "3e-5", "16", "7", "2"):
            assert part in line, (name, part)
    assert "--pad_to_max_length true" in words["documented"]
    assert "--pad_to_max_length false" in words["stock"]
    assert "--train_sampling_strategy group_by_length --bf16 true" in words["stock"]
    assert words["accelerate"].endswith("--bf16")
    assert "bf16" not in words["documented"] + words["hf_mps"]


def test_the_clock_counts_training_alone(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import peer

    now = iter((10.0, 12.0, 15.0, 30.0, 34.0))
    monkeypatch.setattr(peer.time, "monotonic", lambda: next(now))
    clock = peer.Clock("3.0", "cpu")
    clock.begin()  # at 10
    clock.step()  # the first ends at 12, nine seconds after the command
    clock.step()
    clock.epoch()  # at 15
    clock.evaluated(0.5)  # until 30, which is not training
    clock.begin()
    clock.step()
    clock.epoch()  # at 34
    clock.evaluated(0.6)
    clock.over()
    clock.evaluated(0.6)
    figures = clock.figures()
    assert (figures["first_step"], figures["seconds"], figures["steps"]) == (9.0, 9.0, 3)
    assert figures["scores"] == [(5.0, 0.5), (9.0, 0.6)]


def test_the_signed_row_is_one_that_the_page_can_show(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(CHECKOUT / "scripts" / "tools"))
    import benchmarks_page

    sides = peers.summary([{"stock": side(4.0, (4.0, 0.8)), "hf_mps": side(2.0, (2.0, 0.8))}], rows=100)
    monkeypatch.setattr(sys, "argv", ["compare_peers.py", "--sign", "Ada", "--data", "/home/ada/rows"])
    given = peers.argparse.Namespace(sign="Ada", out=tmp_path / "out.json", device="cpu")
    peers.keep(given, sides, peers.Tuned((), (), {"float32": 10.0}), 1)
    line = capsys.readouterr().out
    assert "/home/ada" not in line, "a person's folders are nobody's business"
    file = tmp_path / "rows.jsonl"
    file.write_text(line)
    text = "\n".join(benchmarks_page.lines(file))
    assert "| stock | 25.0 | 2.00 | 4.0 | 0.800 | 1.00 GiB | 5.0 s |" in text
    assert json.loads((tmp_path / "out.json").read_text())["rounds"] == 1
    sys.modules.pop("benchmarks_page", None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sides", "stock,keras"], "there is no keras"),
        (["--sides", "stock"], "hf_mps is what they are compared with"),
        (["--cpu-time", "--device", "cuda"], "--cpu-time counts what a processor does"),
        (["--made", "small", "--data", "nowhere"], "--data nowhere has no train.csv"),
    ],
)
def test_misuse_ends_in_one_line(
    words: list[str], said: str, peers: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare_peers.py", *words])
    with pytest.raises(SystemExit) as stopped:
        peers.arguments()
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
