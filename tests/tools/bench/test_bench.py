"""`hf-mps bench`: its table, files, chart and signed line, what it counts, and how misuse ends."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot
from transformers import BertConfig

from hf_mps.cli.main import main
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.report import plot
from hf_mps.layer import guards
from hf_mps.tools import bench
from hf_mps.tools.bench import Asked
from hf_mps.tools.bench.cases import TRAINING, Case, Work, stepping
from hf_mps.tools.bench.outcome import Outcome, bars, draw, folder_for, signer
from hf_mps.tools.dryrun.launches import table_of
from hf_mps.tools.dryrun.modules import ModuleTracker
from tests.tools.bench.test_networks import TINY

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The verb with one tiny network in place of the field's, in a folder of its own."""
    monkeypatch.setattr("hf_mps.tools.bench.networks.NETWORKS", (TINY,))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("mps")
def test_a_measurement_says_simulated_in_the_table_the_files_and_the_signed_line(tiny: Path, capsys: Printed) -> None:
    assert main(["bench", "--quick", "--sign", "Ada  Lovelace"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"network +phase +batch +row +rows/s mps \(simulated\) +rows/s cpu +mps \(simulated\) / cpu", out)
    assert "simulated  yes  computed by this machine's processor, no Mac's speed or memory" in out
    assert "quick  smaller batches and rows" in out
    assert "tiny, training on mps …" in err
    folder = tiny / "runs" / "bench"
    assert sorted(path.name for path in folder.iterdir()) == ["bench.png", "results.json", "row.jsonl"]
    found = json.loads((folder / "results.json").read_text())
    line = (folder / "row.jsonl").read_text()
    assert line.count("\n") == 1
    row = json.loads(line)
    assert row["signed_off_by"] == "Ada Lovelace"
    assert row["command"] == found["command"] == "hf-mps bench --quick"
    assert row["simulated"] is found["simulated"] is True
    assert row["machine"]["chip"].endswith("(simulated)")
    assert [(case["network"], case["phase"]) for case in row["cases"]] == [("tiny", "training"), ("tiny", "evaluation")]
    for case in found["cases"]:
        device, cpu = case["devices"]["mps"], case["devices"]["cpu"]
        assert device["repetitions"] == cpu["repetitions"] == 3
        assert device["fastest"] <= device["seconds"] <= device["slowest"]
        assert case["over_cpu"] == pytest.approx(cpu["seconds"] / device["seconds"])
        assert case["row"] in out


@pytest.mark.usefixtures("mps")
def test_the_counts_of_a_step_are_those_of_the_simulated_device(tiny: Path, capsys: Printed) -> None:
    assert main(["bench", "--quick", "--launches", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["simulated"] is True
    assert ", not fused;" in found["facts"]["measured"]["reason"]
    (case,) = found["cases"]
    assert case["launches"] > 50
    assert case["copies_in"] == 0, "the batch lies on the device already"
    assert case["on_a_mac"]["launches"] == sum(
        count for kind, count in case["on_a_mac"]["classes"].items() if kind not in ("view", "cpu", "blit")
    )
    assert not (tiny / "runs").exists()


@pytest.mark.usefixtures("mps")
def test_a_recipe_is_measured_in_real_size_by_the_runners_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertConfig(**shape).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    words = ["--recipe", "glue/mrpc", f"model={tmp_path / 'model'}", "max_length=16", "--repetitions", "3"]
    assert main(["bench", *words, "--quick", "--json", "--output", "mine"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["target"] == "glue/mrpc"
    training, evaluation = found["cases"]
    assert (training["phase"], evaluation["phase"]) == ("training", "evaluation")
    assert (training["batch"], training["row"]) == (4, "16 tokens")
    assert training["parameters"] == evaluation["parameters"] < 2_000_000
    assert (tmp_path / "mine" / "bench.png").is_file()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--recipe", "glue/mrpc", "--model", "gpt2"],
            snapshot("hf-mps: --recipe cannot be combined with --model; give one of them\n"),
        ),
        (
            ["--recipe", "glue/mrpc", "--task", "sft"],
            snapshot("hf-mps: --task cannot be combined with --recipe, which has a task; leave it out\n"),
        ),
        (
            ["--model", "gpt2"],
            snapshot(
                "hf-mps: --model needs a task; next: --task with one of causal-lm, distill, dpo, grpo,"
                " image-classification, image-generation, image-segmentation, image-text, kto, masked-lm,"
                " multiple-choice, object-detection, orpo, question-answering, rerank, sentence-embeddings, sft,"
                " sparse-embeddings, speech-recognition, speech-seq2seq, summarization, text-classification,"
                " token-classification, translation\n"
            ),
        ),
        (
            ["max_length=3"],
            snapshot(
                "hf-mps: 'max_length=3' needs a recipe or a model; next: --recipe RECIPE, or --model NAME --task TASK\n"
            ),
        ),
        (
            ["--launches", "--sign", "Ada"],
            snapshot("hf-mps: --sign cannot be combined with --launches, which measures no time; give one\n"),
        ),
        (
            ["--torch", "2.13.0"],
            snapshot("hf-mps: --torch works only with --launches; add --launches, or leave it out\n"),
        ),
        (
            ["--sign", " "],
            snapshot(
                "hf-mps: --sign ' ' is no name; allowed: up to 100 letters without |; next: --sign 'Your Name"
                " <you@example.org>'\n"
            ),
        ),
        (["--output", "full"], snapshot("hf-mps: --output full holds something already; next: --output full-2\n")),
        (
            ["--output", "/proc/x"],
            "hf-mps: --output /proc/x: /proc is not writable: No such file or directory; give another folder\n",
        ),
    ],
)
def test_misuse_ends_in_one_line_before_anything_is_measured(
    words: list[str], line: str, tiny: Path, capsys: Printed
) -> None:
    (tiny / "full").mkdir()
    (tiny / "full" / "mine.txt").write_text("mine")
    assert main(["bench", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.removeprefix("loading PyTorch …\n") == line
    assert (tiny / "full" / "mine.txt").read_text() == "mine"


def test_files_go_to_a_free_folder(tmp_path: Path) -> None:
    first = tmp_path / "bench"
    assert folder_for(None, first) == first
    first.mkdir()
    assert folder_for(None, first) == tmp_path / "bench-2"
    assert folder_for(first) == first, "an empty folder holds nothing that could be lost"
    assert folder_for(Path("~/bench")) == Path.home() / "bench", "no shell reads the ~ in --output=~/bench"


def test_a_name_is_one_line_that_a_table_can_hold() -> None:
    assert signer("Grace\nHopper <grace@example.org>") == "Grace Hopper <grace@example.org>"
    for wrong in ("", "a | b", "x" * 101, "bell\a"):
        with pytest.raises(UserError, match="is no name"):
            signer(wrong)


def outcome(device: str, seconds: float | None) -> Outcome:
    """An outcome whose CPU takes a second for a batch of 8 and whose device takes `seconds`, or has no memory."""
    figures = {"cpu": {"seconds": 1.0, "rows_per_second": 8.0, "memory_bytes": 2**30}}
    if device != "cpu":
        own = {"seconds": seconds, "rows_per_second": 8 / seconds, "memory_bytes": 2**30} if seconds else None
        figures = {device: own or {"failure": "its memory is too small for this batch"}, **figures}
    rows = [
        {"network": "BERT", "phase": phase, "batch": 8, "row": "16 tokens", "parameters": 1, "devices": figures}
        for phase in ("training", "evaluation")
    ]
    facts = {"device": Choice(device, "-"), "chip": Choice("A chip", "-"), "versions": Choice("torch", "-")}
    return Outcome(Asked("hf-mps bench"), facts, rows)


@pytest.mark.usefixtures("mps")
def test_bars_are_the_speed_over_the_cpu_or_rows_a_second_where_there_is_no_other_device() -> None:
    assert bars(outcome("mps", 0.25)) == {"BERT": {"training": 4.0, "evaluation": 4.0}}
    assert bars(outcome("mps", None)) == {"BERT": {"training": None, "evaluation": None}}
    assert bars(outcome("cpu", None)) == {"BERT": {"training": 8.0, "evaluation": 8.0}}


@pytest.mark.usefixtures("mps")
def test_the_chart_of_a_simulated_device_says_so_and_another_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib import image
    from matplotlib.figure import Figure

    said: list[str] = []
    text = Figure.text
    monkeypatch.setattr(
        Figure, "text", lambda self, x, y, words, **k: (said.append(words), text(self, x, y, words, **k))[1]
    )
    page: Any = image.imread(io.BytesIO(draw(outcome("mps", 0.5))), format="png")
    assert page.shape == (750, 1200, 4)
    assert said[0] == "mps (simulated) over the CPU: not a Mac's speed"
    said.clear()
    draw(outcome("cpu", None))
    assert said[0] == "Rows per second on A chip"


@pytest.mark.usefixtures("mps")
def test_a_dollar_in_a_recipes_path_is_drawn_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(plot, "_rendered", lambda figure: figures.append(figure) or b"")
    measured = outcome("mps", 0.25)
    for row in measured.rows:
        row["network"] = "a$b$c.yaml"
    draw(measured)
    (label,) = figures[0].axes[0].get_xticklabels()
    drawn, mathematics = label._preprocess_math(label.get_text())
    assert (drawn.partition("\n")[0], mathematics) == ("a$b$c.yaml", False)


@pytest.mark.usefixtures("mps")
def test_a_batch_that_does_not_fit_is_named_and_ends_with_exit_code_1() -> None:
    report = outcome("mps", None).report()
    assert report.problem == "2 rows without a figure: too little memory"
    assert any("its memory is too small for this batch" in line for line in report.body)
    assert outcome("mps", 0.5).report().problem == ""


def test_the_verb_starts_without_torch(run_python: Any) -> None:
    code = "import sys, hf_mps.cli.bench, hf_mps.tools.bench; print({'torch', 'matplotlib'} & set(sys.modules))"
    assert run_python("-c", code).stdout == "set()\n"
    assert bench.QUICK.repetitions >= 3


@pytest.mark.usefixtures("mps")
def test_what_a_step_launches_is_counted_without_the_looks_of_sentinels() -> None:

    made: list[Work] = []

    def train(count: int, tick: Any, watch: Any = ()) -> None:
        layer = torch.nn.Linear(4, 4, device="mps")  # anew, as a Trainer's loop begins anew
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            layer(torch.ones(2, 4, device="mps")).sum().backward()
            optimizer.step()

        stepping(step, made[0].tracker)(count, tick, watch)

    @contextmanager
    def make(device: Choice[str]) -> Iterator[Work]:
        made.append(Work({TRAINING: train}, ModuleTracker(), torch.nn.Linear(4, 4), 2, "4 numbers", {}))
        yield made[0]

    device = Choice("mps", "the test's")
    plain = bench._counted(Case("tiny", make), device, table_of(None))
    with guards.suspended(kind="sentinel"):
        without = bench._counted(Case("tiny", make), device, table_of(None))
    assert plain["on_a_mac"] == without["on_a_mac"]
