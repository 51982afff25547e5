"""A recipe with `data.streaming: true`, from its files to its results, stopped and resumed, alone and on two ranks."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value
from inline_snapshot import snapshot
from safetensors.torch import load_file

from hf_mps.core import notices
from hf_mps.finetune.recipe.resolve import load_recipe
from tests.distributed.agents import Agent
from tests.finetune import builders, tiny
from tests.finetune.run_files import results
from tests.finetune.tiny import Command, Stop

WORDS = [word for text in builders.TEXTS for word in text.split()]


def corpus(folder: Path, name: str, rows: int, seed: int) -> Path:
    """A file of rows with `text`, `known` (words of the tiny BERT's), `first`, `second` and `label`, and `messages`."""
    draw = random.Random(seed)
    made = []
    for number, row in enumerate(tiny.rows(rows, seed)):
        text = " ".join(draw.choice(WORDS) for _ in range(draw.randint(3, 30)))
        said = [{"role": "user", "content": text}, {"role": "assistant", "content": draw.choice(builders.TEXTS)}]
        known = " ".join(draw.choice(tiny.VOCABULARY[len(tiny.SPECIAL) :]) for _ in range(12))
        made.append({"text": f"{text} {number}", "messages": said, "known": known, **row})
    return tiny.write_jsonl(folder / f"{name}.jsonl", made)


@pytest.fixture
def place(desk: Path, models: Path) -> Path:
    """The desk with two corpora, `web-0.jsonl` and `web-1.jsonl`, and recipes of causal-lm and classification."""
    for number in range(2):
        corpus(desk, f"web-{number}", 150, 1000 * number)
    (desk / "gpt2").symlink_to(builders.model(models, "gpt2"))
    common = "seed: 1\ntraining: {max_steps: 12, per_device_train_batch_size: 4, logging_steps: 1, save_steps: 5}\n"
    stream = "streaming: true, files: {train: 'web-*.jsonl'}, hold_out: 0.1, shuffle_buffer: 40"
    (desk / "clm.yaml").write_text(
        f"task: causal-lm\nmodel: gpt2\nmax_length: 24\ndata: {{{stream}}}\n{common}", encoding="utf-8"
    )
    (desk / "pairs.yaml").write_text(
        "task: text-classification\nmodel: model\npadding: list\n"
        f"data: {{{stream}, columns: {{text: first, text_pair: second}}}}\n{common}",
        encoding="utf-8",
    )
    return desk


def losses(run: Path) -> list[tuple[int, float]]:
    return [(entry["step"], entry["loss"]) for entry in results(run)["log_history"] if "loss" in entry]


def weights(run: Path) -> dict[str, Any]:
    return load_file(run / "model.safetensors")


@pytest.mark.parametrize(
    "words",
    [
        ("clm.yaml",),
        ("pairs.yaml", "training.gradient_accumulation_steps=2", "training.use_cpu=true"),
        pytest.param(("clm.yaml", "training.dataloader_num_workers=2"), marks=pytest.mark.slow),
    ],
    ids=["blocks", "classes", "two-workers"],
)
def test_a_stopped_run_goes_on_with_the_very_next_batch(
    place: Path, finetune: Command, stop: Stop, words: tuple[str, ...]
) -> None:
    assert finetune(*words, "output_dir=whole").code == 0
    stop(7)
    ended = finetune(*words, "output_dir=stopped")
    assert (ended.code, "interrupted at step 7" in ended.err) == (130, True)
    finetune(*words, "output_dir=stopped").finished()
    assert losses(place / "stopped") == losses(place / "whole")
    before, after = weights(place / "whole"), weights(place / "stopped")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    counts = [
        {key: results(place / run)["stream"][key] for key in ("samples", "tokens")} for run in ("whole", "stopped")
    ]
    assert counts[0] == counts[1]


def test_masks_are_drawn_anew_and_alike_in_a_resumed_run(place: Path, finetune: Command, stop: Stop) -> None:
    text = (place / "clm.yaml").read_text(encoding="utf-8").replace("causal-lm", "masked-lm").replace("gpt2", "model")
    text = text.replace("hold_out", "columns: {text: known}, hold_out")
    (place / "mlm.yaml").write_text(text, encoding="utf-8")
    assert finetune("mlm.yaml", "output_dir=whole").code == 0
    stop(8)
    assert finetune("mlm.yaml", "output_dir=stopped").code == 130
    assert finetune("mlm.yaml", "output_dir=stopped").code == 0
    assert losses(place / "stopped") == losses(place / "whole")


@pytest.mark.slow
def test_other_readers_go_on_with_the_rows_that_are_left(place: Path, finetune: Command, stop: Stop) -> None:
    stop(5)
    assert finetune("clm.yaml", "training.dataloader_num_workers=2", "output_dir=run").code == 130
    stored = (place / "run" / "recipe.yaml").read_text(encoding="utf-8")
    (place / "run" / "recipe.yaml").write_text(
        stored.replace("dataloader_num_workers: 2", "dataloader_num_workers: 0"), encoding="utf-8"
    )
    notices.forget()  # another test of this process may have heard it
    ended = finetune("clm.yaml", "training.dataloader_num_workers=0", "output_dir=run")
    assert ended.code == 0
    told = [line for line in (ended.out + ended.err).splitlines() if "readers shared" in line]
    assert [line.strip() for line in told] == snapshot(
        [
            "note  2 readers shared the streamed rows before, 1 now: the rest of the rows is the same, each has several"
            " parts of them"
        ]
    )


def test_conversations_are_packed_as_they_come(place: Path, finetune: Command) -> None:
    text = (place / "clm.yaml").read_text(encoding="utf-8").replace("causal-lm", "sft").replace("24", "48")
    (place / "sft.yaml").write_text(
        f"{text}chat_template: plain\npacking: true\ngenerate: {{rows: 2}}\n", encoding="utf-8"
    )
    finetune("sft.yaml", "training.per_device_train_batch_size=2").finished()
    stream = results(place / "runs/sft")["stream"]
    assert stream["tokens"] == stream["samples"] * 48 == 12 * 2 * 48


def test_broken_rows_are_shown_and_counted_and_too_many_end_the_run_in_a_line(place: Path, finetune: Command) -> None:
    path = place / "web-0.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[3], lines[5] = "{broken", json.dumps({"text": None})
    path.write_text("\n".join(lines), encoding="utf-8")
    ended = finetune("clm.yaml", "data.files.train=web-0.jsonl")
    assert ended.code == 0
    told = [line.strip() for line in (ended.out + ended.err).splitlines() if "it is skipped" in line]
    assert sorted(told) == snapshot(
        [
            "note  web-0.jsonl: line 4 is no JSON: Expecting property name enclosed in double quotes (column 2);"
            " it is skipped",
            "note  web-0.jsonl: line 6 has nothing for data.columns.text; allowed: text; it is skipped",
        ]
    )
    assert results(place / "runs/clm")["stream"]["rows_broken"] >= 2
    for workers in (0, 1):
        words = (
            "data.max_bad_row_fraction=0",
            f"training.dataloader_num_workers={workers}",
            "training.save_strategy=no",
        )
        ended = finetune("clm.yaml", "data.files.train=web-0.jsonl", *words)
        assert (ended.code, ended.err.rpartition("web-0")[2]) == (
            1,
            snapshot(
                ".jsonl: line 4 is no JSON: Expecting property name enclosed in double quotes (column 2); 1 of 4"
                " rows are broken, data.max_bad_row_fraction=0 allows fewer; next: repair them, or a larger"
                " data.max_bad_row_fraction; no checkpoint was written yet\n"
            ),
        )


def test_the_epochs_of_a_recipe_give_way_to_typed_streaming(place: Path) -> None:
    text = (
        (place / "clm.yaml")
        .read_text(encoding="utf-8")
        .replace("streaming: true, ", "")
        .replace(", shuffle_buffer: 40", "")
    )
    (place / "epochs.yaml").write_text(text.replace("max_steps", "num_train_epochs"), encoding="utf-8")
    made = load_recipe("epochs.yaml", ["data.streaming=true", "training.max_steps=20"]).recipe
    assert made.data.streaming
    assert made.training["max_steps"] == 20
    assert "num_train_epochs" not in made.training
    kept = load_recipe("epochs.yaml", ["data.streaming=true", "training.num_train_epochs=3"]).recipe
    assert kept.training["num_train_epochs"] == 3


def test_a_run_without_a_length_is_refused_with_the_next_command(place: Path, finetune: Command) -> None:
    lines = [
        finetune("clm.yaml", "training.max_steps=-1").err,
        finetune("clm.yaml", "training.num_train_epochs=3").err,
        finetune("clm.yaml", "data.streaming=false").err,
        finetune("clm.yaml", "data.files.train=web-9.jsonl").err,
        finetune("clm.yaml", "data.columns.text=txt").err,
    ]
    assert lines == snapshot(
        [
            "hf-mps: data.streaming: nobody counts streamed rows, so the recipe says how long the run is; next:"
            " training.max_steps=1000, or data.rows.train=100000 for so many rows\n",
            "hf-mps: training.num_train_epochs: nobody counts streamed rows, so an epoch has no length; next,"
            " in its place: training.max_steps=N, or data.rows.train=N for so many rows\n",
            "hf-mps: clm.yaml:4: data has shuffle_buffer, which is for streamed rows; next: data.streaming=true\n",
            "hf-mps: data.files.train: web-9.jsonl: there is no such file; did you mean 'web-1.jsonl'?\n",
            "hf-mps: web-*.jsonl: there is no column 'txt' for data.columns.text; the columns are text, messages,"
            " known, first, second, label; did you mean 'text'?\n",
        ]
    )


def test_what_cannot_be_streamed_says_so(place: Path, finetune: Command) -> None:
    text = (place / "clm.yaml").read_text(encoding="utf-8")
    (place / "tags.yaml").write_text(text.replace("causal-lm", "token-classification"), encoding="utf-8")
    assert [
        finetune(name, *words).err for name, *words in (("tags.yaml",), ("clm.yaml", "data.field=rows"))
    ] == snapshot(
        [
            "hf-mps: tags.yaml:4: data has streaming: true, which this task does not take; allowed: false,"
            " or a task of causal-lm, masked-lm, sft and text-classification\n",
            "hf-mps: clm.yaml:4: data has field beside streaming: rows are streamed from JSON lines; leave it out\n",
        ]
    )


def test_a_number_of_rows_says_how_many_steps(place: Path, finetune: Command) -> None:
    ended = finetune("pairs.yaml", "training.max_steps=-1", "data.rows.train=24", "--plan")
    assert ended.code == 0
    (line,) = [line for line in ended.out.splitlines() if line.strip().startswith("steps")]
    assert line.split() == snapshot(
        ["steps", "6", "24", "rows", "(data.rows.train)", "at", "4", "samples", "a", "step"]
    )


def test_several_sources_and_parquet_with_class_names(place: Path, finetune: Command) -> None:
    kinds = Features({"first": Value("string"), "second": Value("string"), "label": ClassLabel(names=["bad", "good"])})
    Dataset.from_list(tiny.rows(90, 5), features=kinds).to_parquet(place / "named.parquet")
    text = (place / "pairs.yaml").read_text(encoding="utf-8")
    several = "sources: [{files: named.parquet, weight: 3}, {files: 'web-*.jsonl'}]"
    (place / "several.yaml").write_text(text.replace("files: {train: 'web-*.jsonl'}", several), encoding="utf-8")
    assert finetune("several.yaml").code == 0
    found = results(place / "runs/several")
    assert found["choices"]["labels"]["value"] == snapshot("2 classes: bad, good")
    assert found["choices"]["data"]["value"].startswith("3 files")


def test_a_smoke_run_streams_too(place: Path, finetune: Command) -> None:
    ended = finetune("clm.yaml", "--smoke").finished()
    assert "waited" in ended.out


def test_changed_files_are_other_rows(place: Path, finetune: Command, stop: Stop) -> None:
    stop(5)
    assert finetune("clm.yaml").code == 130
    corpus(place, "web-1", 151, 7)
    assert finetune("clm.yaml").err == snapshot(
        "hf-mps: runs/clm holds an unfinished run on other rows: train (other files), validation (41 rows"
        " then, 29 now); next: the rows as they were, or --fresh, which trains beside it in runs/clm-2\n"
    )


@pytest.mark.slow
def test_two_ranks_read_other_rows_and_go_on_from_their_own_places(
    place: Path, finetune: Command, agent: Agent
) -> None:
    words = ("-m", "hf_mps.finetune", "clm.yaml", "training.max_steps=8", "training.save_steps=4", "output_dir=run")
    whole = agent.launch(2, *words, cwd=place)
    assert whole.codes == [0, 0], whole.err
    run = place / "run"
    assert results(run)["stream"]["samples"] == 8 * 4 * 2
    before, losses_before = weights(run), losses(run)
    readers = [json.loads((run / f"checkpoint-4/stream_{rank}.json").read_text())["readers"] for rank in range(2)]
    assert [[one["number"], one["readers"]] for (one,) in readers] == [[0, 2], [1, 2]]

    for name in ("results.json", "model.safetensors", "config.json"):
        (run / name).unlink()
    shutil.rmtree(run / "checkpoint-8")
    shutil.copytree(run, place / "alone")
    again = agent.launch(2, *words, cwd=place)
    assert again.codes == [0, 0], again.err
    assert losses(run) == losses_before
    assert all(torch.equal(before[name], after) for name, after in weights(run).items())

    notices.forget()  # another test of this process may have heard it
    ended = finetune("clm.yaml", "training.max_steps=8", "training.save_steps=4", "output_dir=alone")
    assert (ended.code, "2 readers shared the streamed rows before, 1 now" in ended.out) == (0, True)
    # One process takes the rows of two in each step.
    assert results(place / "alone")["stream"]["samples"] == results(run)["stream"]["samples"]
