"""What befalls one rank ends all of them within seconds, in one line; a signal stops all at one step."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.tools.hosts import refusal
from tests import share
from tests.distributed.agents import Agent, Ranks
from tests.finetune import tiny
from tests.share import OnDemand, nightly_but

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="a forked process cannot use a Mac's own device")
WORDS = (
    "my.yaml",
    "training.num_train_epochs=40",
    "training.save_strategy=steps",
    "training.save_steps=2",
    "training.ddp_timeout=5",
)
FAULTS = {
    "killed": (2, "SIGKILL@step 4@1"),
    "the main one killed": (3, "SIGKILL@step 4@0"),
    "stopped": (2, "SIGSTOP@step 4@1"),
    "a full disk": (2, "FULL@step 4@1"),
    "a bug": (2, "BUG@step 4@1"),
    "Ctrl-C at one": (2, "SIGINT@step 3@1"),
    "SIGTERM at all": (2, "SIGTERM@step 3"),
    "Ctrl-C in an evaluation": (2, "SIGINT@evaluation@0"),
}
OTHERS = ("a full disk", "Ctrl-C at one", "SIGTERM at all")
KEPT = ("killed", "a bug", *(name for name in OTHERS if share.has(name, 3)))
"""Those that a commit tries; each night tries all."""
LOST = "another process of this run has ended, or its machine does not answer"
UNPLUGGED = {"the main host unplugged": "UNPLUG@step 4@0", "another host unplugged": "UNPLUG@step 4@2"}
"""One process on each of three hosts."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, agent: Agent) -> dict[str, Ranks]:
    """How each run ended."""
    folder = tmp_path_factory.mktemp("faults")
    furnish(folder)

    def run(name: str) -> Ranks:
        if name in UNPLUGGED:
            return faulty(agent, folder, name, 3, UNPLUGGED[name], apart=True)
        return faulty(agent, folder, name, *FAULTS[name])

    return OnDemand(run)


def faulty(
    agent: Agent, folder: Path, name: str, ranks: int, fault: str, words: Sequence[str] = WORDS, **settings: Any
) -> Ranks:
    """Train into the folder that `name` is, in which `fault` happens; see faulty.py."""
    module = ("-m", "tests.distributed.faulty", fault)
    return agent.launch(ranks, *module, *words, f"output_dir={name.replace(' ', '-')}", cwd=folder, **settings)


def furnish(folder: Path) -> None:
    """Write a tiny model, one without dropout beside it, rows and their recipe into a folder."""
    tiny.model(folder / "model")
    config = json.loads((tiny.model(folder / "still") / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "still" / "config.json").write_text(json.dumps(config))
    tiny.write_csv(folder / "train.csv", tiny.rows(48))
    tiny.write_csv(folder / "dev.csv", tiny.rows(32, 48))
    (folder / "my.yaml").write_text(tiny.RECIPE, encoding="utf-8")


def said(run: Ranks) -> list[str]:
    """The lines about the end that the processes printed, all together, with the host's name masked."""
    lines = [line for text in run.texts for line in text.splitlines() if line.startswith("hf-mps: ")]
    return [
        re.sub(r"Connection (closed|reset) by peer", "WHY", re.sub(r"( on )\S+:", r"\1HOST:", line)) for line in lines
    ]


@pytest.mark.parametrize(
    "name", nightly_but(KEPT, [name for name, (_, fault) in FAULTS.items() if "SIGINT" not in fault])
)
def test_all_end_within_seconds(name: str, ended: dict[str, Ranks]) -> None:
    assert ended[name].seconds < (25 if name == "stopped" else 10)
    assert 0 not in ended[name].codes


# Fault -> the ranks' codes and the one line.
LINES = {
    "killed": ([1, -9], f"{LOST} (WHY); kept: killed/checkpoint-2"),
    "the main one killed": ([-9, 1, 1], f"{LOST} (WHY); kept: the-main-one-killed/checkpoint-2"),
    "stopped": ([1, -9], f"{LOST} (Timed out waiting); kept: stopped/checkpoint-2"),
    "a full disk": (
        [1, 1],
        "rank 1 on HOST: no space is left on the disk: runs/my/checkpoint-3/optimizer.pt; kept:"
        " a-full-disk/checkpoint-2",
    ),
    "a bug": ([1, 1], "rank 1 on HOST: IndexError: index 7 is out of range"),
}


@pytest.mark.parametrize("name", nightly_but(KEPT, LINES))
def test_one_line_names_rank_host_and_cause(name: str, ended: dict[str, Ranks]) -> None:
    codes, line = LINES[name]
    assert said(ended[name]) == [f"hf-mps: {line}"]
    assert ended[name].codes == codes


def test_a_bug_shows_its_traceback_and_nothing_else_does(ended: dict[str, Ranks]) -> None:
    shown = {name for name in KEPT if "Traceback" in "".join(ended[name].texts)}
    assert shown == {"a bug"}
    assert "Traceback" not in ended["a bug"].texts[0]


SIGNALS = {"Ctrl-C at one": 130, "SIGTERM at all": 143, "Ctrl-C in an evaluation": 130}


@pytest.mark.parametrize("name", nightly_but(KEPT, SIGNALS))
def test_a_signal_stops_all_at_one_step_with_one_line(name: str, ended: dict[str, Ranks]) -> None:
    code = SIGNALS[name]
    assert set(ended[name].codes) == {code}
    stopping = "hf-mps: stopping after this step, with a checkpoint; Ctrl-C again stops at once"
    *before, last = said(ended[name])
    assert before == ([stopping] if code == 130 else [])
    step = re.match(r"hf-mps: interrupted at step (\d+); kept: ", last)
    assert step is not None, last
    assert f"{name.replace(' ', '-')}/checkpoint-{step[1]}; to go on: " in last


@pytest.mark.nightly
@pytest.mark.skipif(bool(refusal()), reason=f"no hosts: {refusal()}")
@pytest.mark.parametrize("name", UNPLUGGED)
def test_a_host_that_is_unplugged_ends_all_in_a_line_each(name: str, ended: dict[str, Ranks]) -> None:
    run = ended[name]
    assert run.codes == [1, 1, 1]
    assert run.seconds < 15
    lines = [[line for line in text.splitlines() if line.startswith("hf-mps: ")] for text in run.texts]
    for (line,) in lines:  # the first host to give up closes its connections to the others
        assert re.sub(r" \(.*?\)", "", line) == f"hf-mps: {LOST}; kept: {name.replace(' ', '-')}/checkpoint-2"
