"""`hf-mps recipes`: list, show, copy and validate, the shell's completion, and data of one's own in a line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from hf_mps.cli.main import main
from hf_mps.finetune.recipe import catalogue, training_section
from tests.finetune import tiny
from tests.finetune.tiny import Command

Printed = pytest.CaptureFixture[str]
COLUMNS = {f"data.columns.{role}=" for role in ("text", "text_pair", "label")}


def test_a_copy_is_the_recipe_with_its_own_name_in_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", "glue/mrpc"]) == 0
    assert capsys.readouterr().out == snapshot("mrpc.yaml written; next: hf-mps finetune mrpc.yaml\n")
    text = catalogue.find("glue/mrpc").path.read_text(encoding="utf-8")
    copied = (tmp_path / "mrpc.yaml").read_text(encoding="utf-8")
    assert copied == text.replace("hf_mps.finetune glue/mrpc", "hf_mps.finetune mrpc.yaml")
    assert main(["recipes", "validate", "mrpc.yaml"]) == 0
    assert capsys.readouterr().out == "mrpc.yaml is valid\n"

    assert main(["recipes", "copy", "quickstart", "mrpc.yaml"]) == 2
    assert capsys.readouterr().err == snapshot(
        "hf-mps: mrpc.yaml exists already, and a copy never overwrites a file; give another name\n"
    )
    assert (tmp_path / "mrpc.yaml").read_text(encoding="utf-8") == copied
    assert main(["recipes", "copy", "quickstart", "mine.txt"]) == 2
    assert capsys.readouterr().err.startswith("hf-mps: mine.txt: a recipe is not found by that name; allowed: ")


WRONG = """task: text-classification
model: ./nowhere
sed: 1
data:
  files: {train: gone.csv, validation: dev.csv}
seed: x
metrics: [acuracy]
training:
  learning_rat: 1e-3
  warmup_ratio: 0.1
  learning_rate: fast
seed: 2
"""


def test_every_mistake_is_told_at_once_with_its_line(desk: Path, capsys: Printed) -> None:
    (desk / "wrong.yaml").write_text(WRONG, encoding="utf-8")
    assert main(["recipes", "validate", "wrong.yaml"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert [line.removeprefix("hf-mps: ").partition(" ")[0] for line in lines] == [
        *("wrong.yaml:12:", "wrong.yaml:7:", "wrong.yaml:3:"),
        *("wrong.yaml:9:", "wrong.yaml:10:", "wrong.yaml:11:"),
    ]
    told = [line.partition(": ")[2].partition(": ")[2] for line in lines]
    assert told[0] == snapshot("seed is given twice, first in line 6; give it once")
    assert told[1].startswith("metrics has 'acuracy'; allowed: ")
    assert told[2].startswith("sed is not a key here; allowed: ")
    assert told[3].startswith("training.learning_rat is not a field of TrainingArguments; ")
    assert told[4].startswith("training.warmup_ratio was removed in transformers 5; in its place: warmup_steps")
    assert told[5] == snapshot("training.learning_rate is 'fast'; allowed: a number")


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("expect: {nope: 1}\n", "my.yaml:13: expect.nope is not measured; allowed: f1, accuracy"),
        ("expect: {other_f1: 0.5}\n", "my.yaml:13: expect.other_f1 is not measured; allowed: f1, accuracy"),
        (
            "  metric_for_best_model: f2\n",
            "my.yaml:13: training.metric_for_best_model is 'f2'; allowed: f1, accuracy, loss",
        ),
        (
            "  save_strategy: 'no'\nearly_stopping_patience: 2\n",
            "my.yaml:14: early_stopping_patience: it compares evaluations and keeps the best checkpoint, and"
            " training.save_strategy=no; leave one of them out",
        ),
        ("model_type: gpt2\n", "my.yaml:13: model_type is gpt2, and model holds a bert; leave model_type out"),
        (
            "output_dir: https://x/y\n",
            "my.yaml:13: output_dir is 'https://x/y'; allowed: a folder here;"
            " next, after the run: hf-mps push RUN OWNER/NAME",
        ),
        ("output_dir: ''\n", "my.yaml:13: output_dir is ''; allowed: a folder for this run alone, such as runs/mine"),
    ],
)
def test_validation_refuses_what_a_run_refuses(
    desk: Path, finetune: Command, capfd: Printed, more: str, line: str
) -> None:
    (desk / "my.yaml").write_text(tiny.RECIPE + more, encoding="utf-8")
    assert main(["recipes", "validate", "my.yaml"]) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"hf-mps: {line}")
    assert said.count("\n") == 1
    ended = finetune("my.yaml")
    assert (ended.code, "hf_mps finetune" in ended.out, ended.err.count("\n")) == (2, False, 1)


def test_a_metric_that_the_rows_decide_on_is_not_refused_unread(desk: Path, capsys: Printed) -> None:
    text = tiny.RECIPE.replace("metrics: [f1, accuracy]\n", "") + "expect: {f1_macro: 0.1}\n"
    (desk / "my.yaml").write_text(text, encoding="utf-8")
    assert main(["recipes", "validate", "my.yaml"]) == 0
    (desk / "my.yaml").write_text(text.replace("f1_macro", "f1_makro"), encoding="utf-8")
    assert main(["recipes", "validate", "my.yaml"]) == 2
    assert capsys.readouterr().err.endswith("text-classification does not report it; did you mean 'f1_macro'?\n")


def test_the_projects_recipes_are_valid_without_an_extra(capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    found = training_section.find_spec
    monkeypatch.setattr(
        training_section, "find_spec", lambda name: None if name in ("sentence_transformers", "trl") else found(name)
    )
    training_section.fields.cache_clear()
    try:
        assert main(["recipes", "validate"]) == 0
    finally:
        training_section.fields.cache_clear()
    out, err = capsys.readouterr()
    assert err == ""
    lines = {line.partition(" ")[0]: line for line in out.splitlines()}
    assert len(lines) == len(catalogue.entries())
    assert lines["glue/mrpc"] == "glue/mrpc is valid"
    assert lines["sentence-embeddings/stsb"].startswith(
        "sentence-embeddings/stsb is valid as far as this installation can tell: "
    )
    assert lines["sentence-embeddings/stsb"].endswith(
        "training cannot be checked: sentence_transformers is not installed;"
        " next: pip install 'sentence-transformers>=6'"
    )


def test_files_that_are_not_there_are_told_of_too(desk: Path, capsys: Printed) -> None:
    text = tiny.RECIPE.replace("model: model", "model: ./nowhere").replace("train.csv", "trian.csv")
    (desk / "my.yaml").write_text(text, encoding="utf-8")
    assert main(["recipes", "validate", "my.yaml"]) == 2
    assert capsys.readouterr().err.splitlines() == snapshot(
        [
            "hf-mps: my.yaml:3: model ./nowhere: there is no such folder; allowed: a folder, a hub id, or pypi:PACKAGE",
            "hf-mps: my.yaml:4: data.files.train: trian.csv: there is no such file; did you mean 'train.csv'?",
        ]
    )


def test_validate_goes_through_every_recipe_and_tells_the_good_ones(desk: Path, capsys: Printed) -> None:
    assert main(["recipes", "validate"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [f"{entry.name} is valid" for entry in catalogue.entries()]
    (desk / "wrong.yaml").write_text("task: x\n", encoding="utf-8")
    assert main(["recipes", "validate", "quickstart", "wrong.yaml"]) == 2
    out, err = capsys.readouterr()
    assert out == "quickstart is valid\n"
    assert err.startswith("hf-mps: wrong.yaml:1: task is 'x'; allowed: ")


@pytest.mark.parametrize(
    ("line", "place", "offered"),
    [
        ("hf-mps finetune glue/m", 2, {"glue/mnli", "glue/mrpc"}),
        ("hf-mps recipes show quick", 3, {"quickstart"}),
        ("hf-mps finetune glue/mrpc training.learning_r", 3, {"training.learning_rate="}),
        ("hf-mps finetune glue/mrpc data.columns.", 3, COLUMNS),
    ],
)
def test_the_shell_completes_recipes_and_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: Printed, line: str, place: int, offered: set[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("_HF_MPS_COMPLETE", "complete_bash")
        patch.setenv("COMP_WORDS", line)
        patch.setenv("COMP_CWORD", str(place))
        with pytest.raises(SystemExit) as ended:
            main([])
    assert ended.value.code == 0
    assert set(capsys.readouterr().out.split()) == offered


def test_data_of_ones_own_needs_no_file_of_keys(desk: Path, finetune: Command) -> None:
    lines = [
        {"body": f"{row['first']} {row['second']}", "topic": ("bad", "good")[row["label"]]} for row in tiny.rows(64)
    ]
    tiny.write_csv(desk / "mine.csv", lines)
    words = (
        "model=model",
        "max_length=32",
        "data.train=mine.csv",
        "data.text=body",
        "data.label=topic",
        "training.max_steps=2",
    )
    ended = finetune("text-classification", *words).finished()
    assert "58 + 6 rows" in ended.out  # a tenth is held out where no validation file is given
    assert (desk / "runs/text-classification/config.json").is_file()


def test_the_command_installs_its_completion(capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    # typer asks which shell called it, and make calls by sh, which completes nothing.
    monkeypatch.setattr("shellingham.detect_shell", lambda *_: ("bash", "/bin/bash"))
    with pytest.raises(SystemExit) as ended:
        main(["--show-completion", "bash"])
    assert ended.value.code == 0
    assert "_HF_MPS_COMPLETE=complete_bash" in capsys.readouterr().out
    assert Path(sys.executable).parent.joinpath("hf-mps").is_file() or os.name == "nt"
