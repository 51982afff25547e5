"""hf-mps chat: what a saved instruction model says, turn by turn, as transformers itself has it say."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_mps.cli.main import main
from hf_mps.tools.saved.chat import Manner, conversation, voices
from hf_mps.tools.saved.run import open_run
from tests.finetune.tiny import Ended
from tests.snapshots import masked
from tests.tools.saved.conftest import Kept, Made, read_csv

Command = Callable[..., Ended]
LONGEST = 12
SHORT = ("--max-new-tokens", str(LONGEST))
FIRST, SECOND = "Say it in other words: The film felt warm.", "A book stayed sweet."


def told(folder: Path, template: Path, *messages: str, system: str | None = None) -> str:
    """The answer of transformers' own generation to turns of user and assistant."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(template)
    turns = [{"role": "system", "content": system}] if system else []
    turns += [{"role": ("user", "assistant")[n % 2], "content": words} for n, words in enumerate(messages)]
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**inputs, max_new_tokens=LONGEST, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return str(tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


@pytest.fixture
def instructed(kept: Made) -> Kept:
    """A run of instruction tuning whose adapters are merged."""
    return kept("sft")


def test_each_line_of_a_pipe_is_a_turn_and_the_conversation_is_remembered(instructed: Kept, command: Command) -> None:
    ended = command("chat", instructed.folder, *SHORT, stdin=f"{FIRST}\n\n{SECOND}\n")
    assert ended.code == 0, ended.err
    first = told(instructed.folder, instructed.folder, FIRST)
    second = told(instructed.folder, instructed.folder, FIRST, first, SECOND)
    assert ended.out == f"{first}\n{second}\n"
    assert second != told(instructed.folder, instructed.folder, SECOND)


def test_a_first_turn_is_what_predict_answers(instructed: Kept, command: Command) -> None:
    (row,) = read_csv(command("predict", instructed.folder, stdin=FIRST).out)
    assert command("chat", instructed.folder, *SHORT, stdin=FIRST).out == f"{row['generated'].strip()}\n"


@pytest.mark.rotated
@pytest.mark.parametrize("task", ["sft", "dpo", "orpo", "kto"])
def test_the_base_model_answers_beside_by_its_own_history(task: str, kept: Made, command: Command) -> None:
    """The base is another folder's model where the adapter was merged, and the same without it where it was not."""
    run = kept(task)
    base = run.rows.parent / "model"
    lines = command("chat", run.folder, "--base", *SHORT, stdin=f"{FIRST}\n{SECOND}\n").out.splitlines()
    assert [line.partition("> ")[0] for line in lines] == ["saved", "base", "saved", "base"]
    first = told(base, run.folder, FIRST)
    assert lines[1].removeprefix("base> ") == first
    assert lines[3].removeprefix("base> ") == told(base, run.folder, FIRST, first, SECOND)


def test_a_line_that_is_not_utf8_is_left_out_and_the_next_answered(instructed: Kept, command: Command) -> None:
    ended = command("chat", instructed.folder, *SHORT, stdin=b"caf\xe9\n" + FIRST.encode())
    assert (ended.code, ended.out) == (0, f"{told(instructed.folder, instructed.folder, FIRST)}\n")
    assert ended.err.splitlines()[1:] == [
        "hf-mps: a line that is not UTF-8 text is left out; next: iconv -f latin1 -t utf-8 FILE"
    ]


def test_a_conversation_is_utf8_whatever_the_locale(
    instructed: Kept, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = io.TextIOWrapper(io.BytesIO("你好\n".encode()), encoding="ascii", errors="surrogateescape")
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdin", lines)
    monkeypatch.setattr("sys.stdout", out)
    assert main(["chat", str(instructed.folder), *SHORT]) == 0
    said = out.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert said == f"{told(instructed.folder, instructed.folder, '你好')}\n"
    assert "left out" not in capfd.readouterr().err


def test_commands_forget_set_the_system_prompt_and_end(instructed: Kept, command: Command) -> None:
    lines = [FIRST, "/reset", FIRST, "/system Be brief.", FIRST, "/nothing", "/help", "/exit", SECOND]
    ended = command("chat", instructed.folder, *SHORT, stdin="\n".join(lines))
    plain = told(instructed.folder, instructed.folder, FIRST)
    brief = told(instructed.folder, instructed.folder, FIRST, system="Be brief.")
    assert ended.out.splitlines() == [plain, plain, brief]
    assert ended.err.splitlines()[1:] == snapshot(
        [
            "hf-mps: a new conversation begins",
            "hf-mps: a new conversation begins",
            "hf-mps: /nothing is not a command; allowed: /reset, /system, /help, /exit",
            "hf-mps: /reset  begin a new conversation",
            "hf-mps: /system  TEXT: the system prompt of a new conversation; without TEXT none",
            "hf-mps: /help  show these commands",
            "hf-mps: /exit  end, as Ctrl-D does",
        ]
    )
    assert command("chat", instructed.folder, "--system", "Be brief.", *SHORT, stdin=FIRST).out == f"{brief}\n"


def voice(folder: Path, **manner: Any) -> Any:
    (own,), _ = voices(open_run(str(folder), "sft"), "cpu", Manner(**manner), base=False)
    return own


def test_words_come_as_they_are_made(shared_data: Path) -> None:
    pieces: list[str] = []
    own = voice(shared_data / "models" / "stories260K", max_new_tokens=24)
    said = own.answer("Once upon a time, there was a little cat.", pieces.append)
    assert "".join(pieces).split() == said.split()
    assert len(pieces) > 5


def test_the_oldest_turns_are_left_out_where_all_do_not_fit(instructed: Kept) -> None:
    own = voice(instructed.folder, max_new_tokens=4)
    own.model.config.max_position_embeddings = 64
    for _ in range(6):
        own.answer(SECOND, lambda piece: None)
    assert own.left_out > 0
    assert len(own.history) == 12
    with pytest.raises(Exception, match=r"this message has \d+ tokens; allowed: up to \d+ of the model's 64 positions"):
        own.answer("word " * 200, lambda piece: None)


def test_drawn_answers_differ_and_a_seed_repeats_them(instructed: Kept, command: Command) -> None:
    def drawn(seed: int) -> str:
        words = ("--temperature", "2", "--seed", seed, *SHORT)
        return command("chat", instructed.folder, *words, stdin=FIRST).out

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_a_model_that_does_not_chat_is_refused_in_one_line(kept: Made, command: Command) -> None:
    run = kept("text-classification")
    ended = command("chat", run.folder, stdin=FIRST)
    assert (ended.code, ended.out, masked(ended.err, run=str(run.folder))) == (
        2,
        "",
        snapshot(
            "hf-mps: <run> is a model for text-classification (its recipe.yaml), which does not chat; next:"
            " hf-mps predict <run> FILE\n"
        ),
    )


def test_a_turn_that_one_model_refuses_is_forgotten_by_both(
    instructed: Kept, capsys: pytest.CaptureFixture[str]
) -> None:
    own, base = voice(instructed.folder, max_new_tokens=4), voice(instructed.folder, max_new_tokens=4)
    base.model.config.max_position_embeddings = 8
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.stdin", io.StringIO(f"{FIRST}\n"))
        conversation([own, base], at_keyboard=False)
    assert "hf-mps: this message has" in capsys.readouterr().err
    assert (own.history, base.history) == ([], [])
