"""The audit names every operator of a step, whether Metal has it, and where it is called: what a ledger would book."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from inline_snapshot import snapshot

from hf_mps.cli.main import main
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.metal import fallback
from hf_mps.metal.operators import launch_class
from hf_mps.metal.operators.table import OperatorSupport, functions_file
from hf_mps.tools.dryrun import metal_device, prepare
from hf_mps.tools.dryrun.audit import audit
from hf_mps.tools.dryrun.audit.record import Audit, Entry, report
from hf_mps.tools.dryrun.launches import Launches
from hf_mps.tools.dryrun.render import render
from hf_mps.tools.dryrun.resolve import resolve_target

here = launch_class.table(torch.__version__)
known = pytest.mark.skipif(here is None, reason="what the installed torch launches has to be fetched")
CTC = "speech-recognition/librispeech"


@pytest.fixture(scope="module")
def mrpc() -> Audit:
    return audit(resolve_target("glue/mrpc"))


def booked(name: str) -> set[str]:
    """What the ledger books when a small step of the recipe really runs on the device."""
    device = metal_device()
    with prepare.small(resolve_target(name), device) as parts:
        step = prepare.step(parts, device, fake=False)
        fallback.reset()
        step.run(1)
        found = {entry.operator for entry in fallback.report().operators}
    fallback.reset()
    return found


def test_bert_on_mrpc_falls_back_nowhere(mrpc: Audit) -> None:
    assert mrpc.findings == []
    assert mrpc.facts["tensors"].value == "fake"
    assert mrpc.facts["model"].value == "google-bert/bert-base-cased, 108.3 M parameters"
    assert 50 < len(mrpc.entries) < 120


def test_every_part_of_the_step_is_there_with_its_modules(mrpc: Audit) -> None:
    at = {(phase, module): entry.operator for entry in mrpc.entries for phase, module, _ in entry.places}
    assert {phase for phase, _ in at} >= {"forward", "loss", "backward", "clipping", "optimizer"}
    of = {entry.operator: {each[:2]: each[2] for each in entry.places} for entry in mrpc.entries}
    linear = of["aten::linear"]
    assert linear[("forward", "bert.encoder.layer.*.output.dense")] == 12
    assert linear[("forward", "classifier")] == 1
    assert of["aten::linear_backward"][("backward", "bert.encoder.layer.*.output.dense")] == 12
    assert of["aten::native_layer_norm_backward"][("backward", "bert.embeddings.LayerNorm")] == 1
    assert ("optimizer", "") in of["aten::_fused_adamw_"]


def test_its_list_is_what_the_ledger_books_of_a_real_step(each_recipe: str) -> None:
    found = audit(resolve_target(each_recipe))
    assert {entry.operator for entry in found.of("fallback")} == booked(each_recipe)
    assert found.of("refused", "unknown") == []


@pytest.mark.slow
def test_a_ctc_model_names_the_loss_and_its_backward_with_their_places() -> None:
    found = {entry.operator: entry for entry in audit(resolve_target(CTC)).findings}
    assert set(found) == {"aten::_ctc_loss", "aten::_ctc_loss_backward"}
    assert found["aten::_ctc_loss"].where == "loss: Wav2Vec2ForCTC"
    assert found["aten::_ctc_loss_backward"].where == "backward: Wav2Vec2ForCTC"
    assert {entry.link for entry in found.values()} == {"https://github.com/pytorch/pytorch/issues/141287"}


def another(folder: Path, change: Any) -> Path:
    """native_functions.yaml of the installed torch, changed."""
    path = folder / "native_functions.yaml"
    path.write_text(change(functions_file().read_text(encoding="utf-8")), encoding="utf-8")
    return path


def test_another_releases_table_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def without_gelu(text: str) -> str:
        head, _, tail = text.partition("- func: gelu.out(")
        return head + "- func: gelu.out(" + tail.replace("    MPS: gelu_out_mps\n", "", 1)

    table = another(tmp_path, without_gelu)
    assert main(["audit", "quickstart", "--torch-table", str(table), "--github"]) == 1
    out = capsys.readouterr().out
    title = "::warning title=hf-mps audit quickstart::"
    assert out.startswith(f"{title}aten::gelu.out: no Metal kernel; 6 calls (forward: ")
    assert out.count("\n") == 1


def test_a_table_without_an_operator_says_so(tmp_path: Path) -> None:
    table = another(tmp_path, lambda text: text.replace("- func: tanh_backward(", "- func: tanh_backwards("))
    assert OperatorSupport(table).kind("aten::tanh_backward") == "unknown"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file or directory; allowed: a native_functions.yaml"),
        ("a: [", "no list of PyTorch's operators"),
        ("- func: foo(Tensor self) -> Tensor\n", "it lists no add.Tensor"),
    ],
)
def test_a_file_that_is_no_table_is_refused(content: str | None, words: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "table.yaml"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert main(["audit", "quickstart", "--torch-table", str(path)]) == 2
    assert f"--torch-table {path}: " in (told := capsys.readouterr().err)
    assert words in told


def test_a_recipe_stays_one_beside_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "quickstart").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["audit", "quickstart", "training.nonsense=1"]) == 2
    assert "training.nonsense" in (told := capsys.readouterr().err)
    assert "not a recipe" not in told


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["glue/mrcp"], "'glue/mrcp' is not a recipe"),
        ([str(Path(__file__).parent)], "is a folder, not a recipe; for a model, say what it is to learn: --task TASK"),
        (["org/model"], "for a model, say what it is to learn: --task TASK"),
        (["org/model", "--task", "speech"], "--task speech is not a task"),
        (["quickstart", "more"], "'more' is not KEY=VALUE; next, for a script: hf-mps audit -- python SCRIPT"),
        (["quickstart", "--json", "--badge"], "--json, --github and --badge are three forms of one result"),
        (["--task", "sft", "--", "python", "train.py"], "--task is for a model, not for a script"),
        (["quickstart", "--torch", "2.10"], "what torch 2.10 launches on a Mac is not known; known: "),
        (["quickstart", "--torch", "2.14.1", "--torch-table", "table.yaml"], "two ways to name a release"),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *words]) == 2
    told = capsys.readouterr()
    assert line in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""


@known
def test_json_holds_every_operator_its_launches_and_their_totals(mrpc: Audit) -> None:
    found = json.loads(shown(mrpc, "json"))
    assert found["counts"]["fallback"] == 0
    assert found["simulated"] is True
    assert sum(found["counts"].values()) == len(found["operators"])
    softmax = next(each for each in found["operators"] if each["operator"] == "aten::_softmax_backward_data")
    assert softmax["kind"] == "native"
    assert softmax["places"][0]["phase"] == "backward"
    assert softmax["places"][0]["module"].endswith("attention.self")
    assert softmax["launches"] == [
        {"class": "graph", "calls": softmax["calls"], "reason": "an MPSGraph, compiled once for each shape"}
    ]
    totals = found["launches"]
    assert totals["classes"]["graph"] > totals["graph_shapes"] > 0
    assert totals["source"] == "https://github.com/pytorch/pytorch/issues/148219"


def entry(operator: str, kind: Any, calls: int = 2) -> Entry:
    return Entry(operator, kind, calls, ("float32",), (("forward", "model", calls),))


def shown(audit: Audit, form: Any) -> str:
    return render(report(audit), form)


def test_the_badge_counts(mrpc: Audit) -> None:
    def line(words: str, colour: str) -> str:
        return f"![Metal: {words}](https://img.shields.io/badge/Metal-{words.replace(' ', '_')}-{colour})"

    assert shown(mrpc, "badge") == line("runs on Metal", "brightgreen")
    one = Audit("x", (entry("aten::mode", "fallback"), entry("aten::add.Tensor", "native")), {})
    assert shown(one, "badge") == line("1 fallback", "yellow")
    assert shown(Audit("x", (*one.entries, entry("aten::mul", "refused")), {}), "badge") == line("1 refused", "red")


def test_annotations_are_escaped_and_refusals_are_errors() -> None:
    found = Audit("a,b: 100%", (entry("aten::mul", "refused"),), {})
    assert shown(found, "github") == snapshot(
        "::error title=hf-mps audit a%2Cb%3A 100%25::aten::mul: a dtype that Metal does not have; 2 calls "
        "(forward: model); Metal has no float64; next: convert it before it reaches the device"
    )
    assert shown(Audit("x", (entry("aten::add", "native"),), {}), "github") == snapshot(
        "::notice title=hf-mps audit x::all 1 operators run on Metal"
    )


@pytest.mark.macos(15)
@known
def test_each_call_has_its_launch_class_on_the_installed_release(mrpc: Audit) -> None:
    of = {entry.operator: entry.launched for entry in mrpc.entries}
    assert of["aten::_softmax_backward_data"] == "graph"
    assert of["aten::native_layer_norm"] == "metal"
    assert of["aten::transpose.int"] == "view"
    assert of["aten::linear"] == "framework 73, graph 1"  # the pooler's input is a row of each text
    assert sum(calls for entry in mrpc.entries for _, calls, _ in entry.launches) == sum(e.calls for e in mrpc.entries)


@known
def test_the_launches_of_a_step_have_totals_graphs_and_a_floor(mrpc: Audit) -> None:
    found = mrpc.launches
    assert isinstance(found, Launches)
    assert found.classes["mixed"] == found.classes["cpu"] == found.classes["unknown"] == 0
    # Twelve layers share their shapes: a graph for each operator and shape, not for each call.
    assert found.graphs < found.classes["graph"] / 5
    graphs = found.classes["graph"]
    assert found.floor == pytest.approx(graphs * 20e-6 + (found.total + found.blits - graphs) * 1.3e-6)
    assert [line for line in shown(mrpc, "table").splitlines() if "launches a step" in line] == [
        f"{found.total:,} launches a step on torch {found.release}; {found.blits:,} blits, {found.encoders:,} encoders"
    ]


@pytest.mark.skipif(not torch.__version__.startswith("2.13.0"), reason="the figures are of 2.13.0")
def test_another_release_launches_other_things(mrpc: Audit) -> None:
    newer = audit(resolve_target("glue/mrpc"), release="2.14.1")
    of = {entry.operator: (here.launched, entry.launched) for entry, here in paired(newer, mrpc)}
    assert {name: both for name, both in of.items() if both[0] != both[1]} == snapshot(
        {
            "aten::logical_not": ("graph", "metal"),
            "aten::arange": ("graph", "metal"),
            "aten::embedding": ("graph", "metal"),
            "aten::stack": ("blit", "metal"),
        }
    )
    assert newer.findings == []
    assert newer.facts["torch"].value == "2.14.1"
    assert f"those that torch {torch.__version__} calls" in newer.facts["torch"].reason


def paired(one: Audit, other: Audit) -> list[tuple[Entry, Entry]]:
    there = {entry.operator: entry for entry in other.entries}
    return [(entry, there[entry.operator]) for entry in one.entries]


@pytest.mark.slow
def test_what_a_release_gives_a_kernel_falls_back_no_longer() -> None:
    assert len(audit(resolve_target(CTC), release="2.13.0").findings) == 2
    assert audit(resolve_target(CTC), release="2.14.1").findings == []


def test_where_the_installed_release_is_not_known_the_audit_stands_without_launches(mrpc: Audit) -> None:
    unknown = replace(mrpc, launches=Choice(None, "torch 2.10.0 is not fetched"))
    assert shown(unknown, "table").endswith("what this step launches is not known: torch 2.10.0 is not fetched")
    assert json.loads(shown(unknown, "json"))["launches"]["reason"] == "torch 2.10.0 is not fetched"


def test_a_step_that_neither_fake_tensors_nor_a_small_model_take_says_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(error: Exception) -> Any:
        return Mock(side_effect=error)

    monkeypatch.setattr(prepare, "step", failing(RuntimeError("_apply(): Couldn't swap Loss.up")))
    monkeypatch.setattr(prepare, "small", failing(UserError("--smoke: no tiny d_fine can be made")))
    assert main(["audit", "quickstart"]) == 2
    assert capsys.readouterr().err == (
        "hf-mps: this takes a small real step; fake tensors cannot run this one: RuntimeError: _apply(): Couldn't swap"
        " Loss.up; no tiny d_fine can be made\n"
    )
