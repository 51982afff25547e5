"""Conversations: every usual shape is read, and exactly the assistant's words are learned, whatever the template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot
from transformers import AutoTokenizer

from hf_mps.core.errors import UserError
from hf_mps.finetune.text import chat
from tests.finetune import builders

HELLO = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "It is four."},
]
# The words that each family's own template gives the assistant to say, with what ends a turn.
FAMILIES = {
    "qwen2_5": ["Hello!<|im_end|>", "It is four.<|im_end|>"],
    "llama3": ["Hello!<|eot_id|>", "It is four.<|eot_id|>"],
    "phi3": ["Hello!<|end|>", "It is four.<|end|>"],
    "qwen3_instruct_2507": ["Hello!<|im_end|>", "It is four.<|im_end|>"],
    # Thinking models: an empty thought stands before the last answer alone, and is the assistant's to write.
    "qwen3": ["Hello!<|im_end|>", "<think>\n\n</think>\n\nIt is four.<|im_end|>"],
    # Ends that are no special token here are not learned.
    "gemma": ["Hello!", "It is four."],
}
ENDS = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|end|>", "<|user|>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = AutoTokenizer.from_pretrained(builders.model(tmp_path_factory.mktemp("models"), "gpt2"))
    made.add_special_tokens({"bos_token": "<|begin|>", "additional_special_tokens": ENDS})
    return made


def published(name: str) -> str:
    """A template as it is published with a family of models; TRL carries them."""
    import trl

    return (Path(trl.__path__[0]) / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def said(tokenizer: Any, conversation: list[dict[str, str]]) -> list[str]:
    """The runs of learned tokens, as text."""
    encoded = chat.encode(tokenizer, conversation)
    runs: list[list[int]] = [[]]
    for token, word in zip(encoded.input_ids, encoded.assistant_mask, strict=True):
        if word:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_assistants_words_are_found_in_templates_without_marks(tokenizer: Any, family: str) -> None:
    tokenizer.chat_template = published(family)
    assert "generation %}" not in tokenizer.chat_template.replace("add_generation", "")
    assert said(tokenizer, HELLO) == FAMILIES[family]


@pytest.mark.parametrize("family", ["llama3", "phi3", "qwen3_instruct_2507", "gemma"])
def test_marked_templates_give_the_same_words(tokenizer: Any, family: str) -> None:
    tokenizer.chat_template = published(family)
    found = said(tokenizer, HELLO)
    tokenizer.chat_template = published(f"{family}_training")
    marked = [words.replace("<end_of_turn>", "") for words in said(tokenizer, HELLO)]
    # Phi's marks take in the end of the whole text behind the last turn too.
    assert [words.replace(tokenizer.eos_token, "").rstrip() for words in marked] == found


def test_the_text_is_the_templates_own_to_the_last_character(tokenizer: Any) -> None:
    tokenizer.chat_template = published("qwen3")
    whole = tokenizer.apply_chat_template(HELLO, tokenize=False)
    assert tokenizer.decode(chat.encode(tokenizer, HELLO).input_ids) == whole


def test_words_that_stand_in_the_prompt_too_are_not_mistaken_for_it(tokenizer: Any) -> None:
    tokenizer.chat_template = published("qwen2_5")
    echo = [{"role": "user", "content": "assistant"}, {"role": "assistant", "content": "assistant"}]
    encoded = chat.encode(tokenizer, echo)
    before = tokenizer.apply_chat_template(echo[:1], tokenize=False, add_generation_prompt=True)
    assert encoded.assistant_mask.index(True) == len(tokenizer(before, add_special_tokens=False)["input_ids"])
    assert said(tokenizer, echo) == ["assistant<|im_end|>"]


def test_space_around_words_goes_where_the_template_puts_it(tokenizer: Any) -> None:
    tokenizer.chat_template = published("llama3")  # which trims
    spaced = [HELLO[0], {"role": "assistant", "content": "  Hello!\n"}]
    assert said(tokenizer, spaced) == ["Hello!<|eot_id|>"]


def test_a_reasoned_last_answer_is_learned_with_its_reasoning(tokenizer: Any) -> None:
    tokenizer.chat_template = published("qwen3")
    thought = [HELLO[2], {"role": "assistant", "content": "<think>\nadd\n</think>\n\nfour"}]
    assert said(tokenizer, thought) == ["<think>\nadd\n</think>\n\nfour<|im_end|>"]


def test_an_earlier_answer_that_the_template_cuts_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = published("qwen3")
    cut = [HELLO[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello!"}, *HELLO[2:]]
    changes = r"has words of the assistant that the chat template changes \(message 2\)"
    with pytest.raises(chat.ConversationError, match=changes):
        chat.encode(tokenizer, cut)


def test_a_tokenizer_without_a_template_gets_alpacas_headings(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    choice = chat.template(tokenizer, None)
    assert (choice.value, choice.reason) == (
        "plain",
        snapshot("the tokenizer has none; Alpaca's headings in plain words"),
    )
    assert tokenizer.apply_chat_template(HELLO[:1], tokenize=False, add_generation_prompt=True) == (
        "### Instruction:\nHi there\n\n### Response:\n"
    )
    assert said(tokenizer, HELLO) == [f"Hello!{tokenizer.eos_token}", f"It is four.{tokenizer.eos_token}"]


def test_a_template_of_the_users_own_comes_from_its_file(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "my.jinja"
    path.write_text("{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}", encoding="utf-8")
    assert chat.template(tokenizer, str(path)).reason == snapshot("chat_template in the recipe")
    # The space before a word is of one piece with it; the heading before that is nobody's words.
    assert [words.lstrip() for words in said(tokenizer, HELLO)] == ["Hello!", "It is four."]
    with pytest.raises(
        UserError, match=r"^chat_template: nowhere\.jinja: there is no such file; allowed: plain, a Jinja file$"
    ):
        chat.template(tokenizer, "nowhere.jinja")


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ([], "has no messages; allowed: a list of {role, content} or {from, value}"),
        ([{"role": "robot", "content": "Hi"}], "holds a message of 'robot'; allowed: system, user, human, assistant,"),
        ([{"role": "user", "content": None}], "holds a message of user without text"),
        (
            [{"role": "assistant", "content": "Let me look.", "tool_calls": [{"id": "1"}]}],
            "holds a message that calls a tool",
        ),
        (["Hi"], "holds a message that is a str; allowed: {role, content} or {from, value}"),
    ],
)
def test_other_shapes_are_refused(raw: Any, problem: str) -> None:
    with pytest.raises(chat.ConversationError) as raised:
        chat.messages(raw)
    assert str(raised.value).startswith(problem)
