"""Rows are streamed from the Hub, by a set's name and by hf://, by the real clients from a server of the test's own."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from hf_mps.finetune.stream import files
from hf_mps.finetune.stream.files import WHOLE, FileSlice
from tests.distributed.agents import Agent, Ranks
from tests.distributed.test_faults import faulty
from tests.finetune import hub, tiny
from tests.finetune.run_files import results
from tests.finetune.stream import corpora
from tests.finetune.stream.test_run import losses, weights
from tests.refusals import refusal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.together,
    pytest.mark.skipif(sys.platform == "darwin", reason="a forked process cannot use a Mac's own device"),
]
# Two shards each: a table in row groups of seven rows, and lines.
SETS = {"ann/tables": "parquet", "ann/lines": "jsonl"}
RECIPE = """task: text-classification
model: model
padding: list
seed: 1
data:
  streaming: true
  {source}
  columns: {{text: first, text_pair: second}}
  shuffle_buffer: 20
training: {{max_steps: 12, per_device_train_batch_size: 4, logging_steps: 1, save_steps: 5}}
"""
FILES = "data/{split}-0000{number}-of-0000{count}.{kind}"
SOURCES = {
    "tables by name": "hub: ann/tables",
    "lines by name": "hub: ann/lines",
    "lines by hf": "files: {train: 'hf://datasets/ann/lines/data/train-*.jsonl',"
    " validation: 'hf://datasets/ann/lines/data/validation-*.jsonl'}",
    "lines on the disk": "files: {train: 'ann/lines/data/train-*.jsonl',"
    " validation: 'ann/lines/data/validation-*.jsonl'}",
}
STOPPED = ("tables by name", "lines by hf")
BREAKS = "data/train-00001-of-00002.jsonl"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hub.Hub]:
    """The hub with both sets, behind all runs; the connection breaks in the middle of one shard, twice."""
    folder = tmp_path_factory.mktemp("hub")
    for name, kind in SETS.items():
        for split, count, begins in (("train", 2, 0), ("validation", 1, 120)):
            for number in range(count):
                rows = tiny.rows(60 if split == "train" else 20, begins + 60 * number)
                path = folder / name / FILES.format(split=split, number=number, count=count, kind=kind)
                path.parent.mkdir(parents=True, exist_ok=True)
                corpora.write_rows(path, rows)
    tiny.model(folder / "model")
    for name, source in SOURCES.items():
        (folder / f"{called(name)}.yaml").write_text(RECIPE.format(source=source), encoding="utf-8")
    with hub.served(folder) as made:
        made.to_cut += [BREAKS, BREAKS]
        yield made


@pytest.fixture(scope="module")
def ended(served: hub.Hub) -> dict[str, list[Ranks]]:
    """How the parts of each run ended, the stopped ones after the whole ones."""
    agent = Agent({"HF_ENDPOINT": served.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(served.folder)})

    def parts(name: str, part: str, *faults: str) -> list[Ranks]:
        words, output = [f"{called(name)}.yaml"], f"{called(name)}-{part}"
        return [faulty(agent, served.folder, output, 1, fault, words) for fault in faults]

    try:
        found = {name: parts(name, "whole", "none@never") for name in SOURCES}
        return found | {f"{name}, stopped": parts(name, "stopped", "SIGKILL@step 8", "none@never") for name in STOPPED}
    finally:
        agent.end()


def called(name: str) -> str:
    return name.replace(" ", "-")


def run(served: hub.Hub, name: str, part: str = "whole") -> Path:
    return served.folder / f"{called(name)}-{part}"


@pytest.mark.parametrize("name", SOURCES)
def test_it_trains(served: hub.Hub, ended: dict[str, list[Ranks]], name: str) -> None:
    (part,) = ended[name]
    assert part.codes == [0], part.texts
    assert len(losses(run(served, name))) == 12


@pytest.mark.parametrize("name", STOPPED)
def test_it_goes_on_in_the_middle_of_a_shard(served: hub.Hub, ended: dict[str, list[Ranks]], name: str) -> None:
    first, second = ended[f"{name}, stopped"]
    assert (first.codes, second.codes) == ([-9], [0]), second.texts
    assert losses(run(served, name, "stopped")) == losses(run(served, name))
    whole, stopped = weights(run(served, name)), weights(run(served, name, "stopped"))
    assert all(whole[each].equal(stopped[each]) for each in whole)


@pytest.mark.usefixtures("ended")
def test_the_rows_are_those_of_the_same_files_on_the_disk(served: hub.Hub) -> None:
    assert losses(run(served, "lines by hf")) == losses(run(served, "lines on the disk"))
    read = {name: results(run(served, name))["stream"]["rows_read"] for name in SOURCES}
    assert read["lines by hf"] == read["lines on the disk"]


@pytest.mark.usefixtures("ended")
def test_a_connection_that_breaks_off_loses_no_row(served: hub.Hub) -> None:
    assert served.to_cut == []  # both in the run by name, the second as huggingface_hub asked again
    asked = [each for each in served.read if each[0] == BREAKS]
    assert asked[0] == asked[1] == asked[2]
    assert losses(run(served, "lines by name")) == losses(run(served, "lines on the disk"))


class Dropped(Exception):
    """What httpx raises, which is no OSError; huggingface_hub gives it on behind its fifth try, 24 s later."""

    __module__ = "httpx"


def test_a_connection_that_stays_broken_ends_the_run_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "hf://datasets/ann/lines/data/train-00000-of-00002.jsonl"

    @contextmanager
    def broken(file: files.File) -> Iterator[IO[bytes]]:
        raise Dropped("peer closed connection without sending complete message body")
        yield io.BytesIO()

    monkeypatch.setattr(files.File, "opened", broken)
    assert refusal(next, files.read(files.File(url, "jsonl", 100, ""), FileSlice(0, 0, WHOLE), None, ("text",))) == (
        f"{url}: cannot be read: peer closed connection without sending complete message body; next: the same command"
    )
