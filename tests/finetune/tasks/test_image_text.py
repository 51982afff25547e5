"""Models of images and text: the language model alone learns the assistant's words alone, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from hf_mps.cli.main import main
from hf_mps.core.errors import UserError
from hf_mps.finetune.smoke import processors
from hf_mps.layer import guards
from tests import hazards
from tests.finetune import builders, senses, tiny
from tests.finetune.run_files import predictions, results
from tests.finetune.senses import ASKED, COLOURS, photo, questions
from tests.finetune.tiny import Command
from tests.refusals import refusal

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(senses.smol(tmp_path_factory.mktemp("models") / "smol"))


@pytest.mark.parametrize("kind", processors.KINDS)
def test_every_kind_that_is_made_here_reads_images_and_learns_as_on_the_cpu(kind: str, tmp_path: Path) -> None:
    place = senses.smol(tmp_path / "model", kind)
    prepared = builders.prepare(task="image-text", model=str(place), data=asked(tmp_path), prompt="Answer briefly.")
    batch = prepared.collator([prepared.train[place] for place in range(3)])
    gradients = {}
    for device in ("cpu", "mps"):
        model = prepared.model.to(device)
        model.zero_grad()
        model(**{name: value.to(device) for name, value in batch.items()}).loss.backward()
        norms = (one.grad.norm().cpu() for one in model.parameters() if one.grad is not None)
        gradients[device] = torch.stack(list(norms))
    torch.testing.assert_close(gradients["mps"], gradients["cpu"], rtol=1e-4, atol=1e-6)
    assert gradients["cpu"].sum() > 0
    shown = {name: value for name, value in batch.items() if name != "labels"}
    inverted = {**shown, "pixel_values": -shown["pixel_values"]}
    with torch.no_grad():
        seen, other = (prepared.model.cpu()(**one).logits for one in (shown, inverted))
    assert not torch.allclose(seen, other, atol=1e-5), "the images change nothing"


def files(folder: Path, train: list[dict[str, Any]], validation: list[dict[str, Any]] | None = None) -> dict[str, str]:
    """The two files of these rows."""
    split = {"train": train, "validation": validation or train[:4]}
    return {name: str(tiny.write_jsonl(folder / f"{name}.jsonl", rows)) for name, rows in split.items()}


def asked(folder: Path, rows: list[dict[str, Any]] | None = None, **columns: str) -> dict[str, Any]:
    """The recipe's `data` of rows with questions."""
    named = columns or {"image": "image", "question": "question", "answer": "answer"}
    return {"files": files(folder, rows or questions(folder)), "columns": named}


def test_a_row_is_what_the_processor_makes_of_it_and_the_answer_alone_is_learned(smol: str, tmp_path: Path) -> None:
    """The oracle is transformers' own processor, given text and image together."""
    rows = questions(tmp_path)
    prepared = builders.prepare(task="image-text", model=smol, data=asked(tmp_path, rows), prompt="Answer briefly.")
    processor, tokenizer = AutoProcessor.from_pretrained(smol), prepared.processing_class.tokenizer
    for row, made in zip(rows, prepared.train, strict=True):
        parts = [{"type": "text", "text": "Answer briefly."}, {"type": "image"}, {"type": "text", "text": ASKED}]
        said = [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": [{"type": "text", "text": row["answer"]}]},
        ]
        own = processor(
            text=[processor.apply_chat_template(said)],
            images=[Image.open(tmp_path / row["image"])],
            add_special_tokens=False,
            return_tensors="pt",
        )
        assert made["input_ids"] == own["input_ids"][0].tolist()
        assert all(torch.equal(made[name], own[name]) for name in ("pixel_values", "pixel_attention_mask"))
        learned = [label for label in made["labels"] if label != -100]
        assert tokenizer.decode(learned) == f" {row['answer']}<end_of_utterance>"
        assert tokenizer.convert_tokens_to_ids("<image>") not in made["labels"]


def test_a_batch_of_rows_with_and_without_images_has_each_rows_loss(smol: str, tmp_path: Path) -> None:
    name = photo(tmp_path, 1, "red")
    both = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}, {"type": "text", "text": "?"}]
    answer = {"role": "assistant", "content": "It is red."}
    chats = [
        {"images": [name, photo(tmp_path, 2, "blue")], "messages": [{"role": "user", "content": both}, answer]},
        {"images": [], "messages": [{"role": "user", "content": ASKED}, answer]},
        {"images": [name], "messages": [{"role": "user", "content": f"<image>\n{ASKED}"}, answer]},
        {"images": [name], "messages": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": "It is red."}]},
    ]
    columns = {"images": "images", "messages": "messages"}
    prepared = builders.prepare(task="image-text", model=smol, data=asked(tmp_path, chats, **columns))
    assert prepared.train[2]["input_ids"] == prepared.train[3]["input_ids"]
    model, collator = prepared.model.to("mps").eval(), prepared.collator

    def loss(rows: list[Any]) -> tuple[float, int]:
        batch = {key: value.to("mps") for key, value in collator(rows).items()}
        with torch.no_grad():
            return float(model(**batch).loss), int((batch["labels"][:, 1:] != -100).sum())

    rows = [prepared.train[place] for place in range(4)]
    alone = [loss([row]) for row in rows]
    together, count = loss(rows)
    assert together == pytest.approx(sum(one * size for one, size in alone) / count, rel=1e-4)


def colours(folder: Path, first: int = 24) -> dict[str, Any]:
    """The recipe's `data` of 24 questions to learn from and 8 about other images."""
    rows = files(folder, questions(folder, first), questions(folder, 8, first))
    return {"files": rows, "columns": {"image": "image", "question": "question", "answer": "answer"}}


def test_it_learns_to_see_the_colours_of_images_that_it_was_not_shown(smol: str, tmp_path: Path) -> None:
    """Perplexity falls below a twentieth of the untrained model's, and 7 of 8 answers name the colour: 2 would by
    chance.
    """
    prepared = builders.prepare(
        task="image-text", model=smol, data=colours(tmp_path), generate={"rows": 8, "max_new_tokens": 8}
    )
    trained = [name for name, parameter in prepared.model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(name.startswith(("model.text_model.", "lm_head.")) for name in trained)
    trainer = builders.trainer(prepared, tmp_path / "run", max_steps=40, learning_rate=1e-2, logging_steps=40)
    trainer.train()
    assert trainer.evaluate()["eval_perplexity"] < 0.05 * prepared.baseline.metrics["perplexity"]
    answers = list(prepared.predict(trainer))
    assert sum(row["generated"].strip() == row["reference"] for row in answers) >= 7


def test_adapters_are_the_language_models_and_the_saved_model_answers_alike(smol: str, tmp_path: Path) -> None:
    prepared = builders.prepare(
        task="image-text", model=smol, data=colours(tmp_path, 8), lora={"r": 8}, generate={"rows": 5}
    )
    names = [name for name, parameter in prepared.model.named_parameters() if parameter.requires_grad]
    assert names
    assert all(".text_model." in name and ".lora_" in name for name in names)
    trainer = builders.trainer(prepared, tmp_path / "run", max_steps=4, learning_rate=2e-2)
    trainer.train()
    answers = list(prepared.predict(trainer))
    assert [row["reference"] for row in answers] == [f"It is {list(COLOURS)[n % 4]}." for n in range(5)]
    prepared.save(trainer, tmp_path / "saved")
    trainer.model = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", dtype=torch.float32).to("mps")
    assert list(prepared.predict(trainer)) == answers
    assert AutoProcessor.from_pretrained(tmp_path / "saved").chat_template == prepared.processing_class.chat_template


def test_images_become_as_many_tokens_as_the_recipe_allows(smol: str, tmp_path: Path) -> None:
    data, counts = asked(tmp_path), []
    for most in (200, 40, 10):
        prepared = builders.prepare(task="image-text", model=smol, data=data, max_image_tokens=most)
        place = prepared.processing_class.tokenizer.convert_tokens_to_ids("<image>")
        counts.append(max(row["input_ids"].count(place) for row in prepared.train))
        assert counts[-1] <= most
    assert counts == [4 * 13, 4 * 5, 4]  # 4 x 3 and 2 x 2 squares beside a whole one, and the whole one alone
    assert refusal(builders.prepare, task="image-text", model=smol, data=data, max_image_tokens=6) == (
        "max_image_tokens is 6, and Idefics3Processor makes 7 of an image at least; allowed: 7 or more"
    )


def test_a_row_is_cut_before_an_image_and_left_out_without_an_answer(smol: str, tmp_path: Path) -> None:
    name = photo(tmp_path, 1, "red")
    turns = [
        {"role": "user", "content": f"<image>{ASKED}"},
        {"role": "assistant", "content": "It is red."},
        {"role": "user", "content": f"<image>{ASKED}"},
        {"role": "assistant", "content": "It is red."},
    ]
    three = [{"role": "user", "content": "<image><image><image>Which?"}, turns[1]]
    rows = [{"images": [name] * 2, "messages": turns}, {"images": [name] * 3, "messages": three}]
    columns = {"images": "images", "messages": "messages"}
    data = asked(tmp_path, [rows[0]] * 4 + rows[1:], **columns)
    prepared = builders.prepare(task="image-text", model=smol, data=data, max_length=130, max_image_tokens=108)
    assert len(prepared.train) == 4
    row = prepared.train[0]
    whole = builders.prepare(task="image-text", model=smol, data=data, max_length=900, max_image_tokens=108).train[0]
    assert row["input_ids"] == whole["input_ids"][: len(row["input_ids"])]
    assert whole["pixel_values"].shape[1] == 2 * row["pixel_values"].shape[1]
    assert "left out, their prompt alone is max_length or longer: 1 train row" in prepared.choices["learned"].reason


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"images": ["0.png"], "messages": [{"role": "user", "content": "<image><image>"}]},
            "row 2 has 1 image and places for 2 in its messages; allowed: one for each",
        ),
        (
            {"images": ["0.png"], "messages": [{"role": "user", "content": [{"type": "image", "path": "1.png"}]}]},
            "row 2 holds an image part with 'path'; allowed: {type: image}, its file in the images' column",
        ),
        (
            {
                "images": ["0.png"],
                "messages": [
                    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "an <image>?"}]},
                    {"role": "assistant", "content": "Red."},
                ],
            },
            "row 2 has <image>, the model's word for an image, in its text; allowed: texts without it, and images in"
            " their column",
        ),
        (
            {"images": ["https://example.org/0.png"], "messages": [{"role": "user", "content": "Hello"}]},
            "row 2: images: https://example.org/0.png is an address; allowed: the path of a file here",
        ),
        (
            {"images": ["0.png"], "messages": [{"role": "user", "content": [{"type": "video", "text": None}]}]},
            "row 2 holds a part of type video; allowed: {type: text, text} and {type: image}",
        ),
        (
            {"images": ["0.png"], "messages": [{"role": "assistant", "content": "<image>"}]},
            "row 2 has an image among the assistant's words; allowed: images in the user's messages",
        ),
        (
            {"images": ["0.png"], "messages": [{"role": "user", "content": "Hello"}]},
            "row 2 has no words of the assistant; allowed: at least one message of role assistant (or gpt)",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_refused_by_its_number(
    smol: str, tmp_path: Path, row: dict[str, Any], problem: str
) -> None:
    good = [{"role": "user", "content": [{"type": "text", "text": ASKED}]}, {"role": "assistant", "content": "Red."}]
    rows = [{"images": [photo(tmp_path, 0, "red")], "messages": good}, row]
    assert refusal(
        builders.prepare,
        task="image-text",
        model=smol,
        data=asked(tmp_path, rows, images="images", messages="messages"),
    ).endswith(problem)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"image": "a", "images": "b"}, "has image beside images; give one or the other"),
        ({"messages": "a", "answer": "b"}, "has messages beside question or answer; give one or the other"),
        ({"question": "a"}, "has question; give answer too, or messages"),
    ],
)
def test_half_a_shape_is_refused(smol: str, tmp_path: Path, columns: dict[str, str], problem: str) -> None:
    data = {"files": {"train": "a.csv", "validation": "b.csv"}, "columns": columns}
    with pytest.raises(UserError, match=problem):
        builders.recipe(task="image-text", model=smol, data=data)


def test_a_column_that_no_recipe_names_is_not_offered_to_be_left_out(smol: str, tmp_path: Path) -> None:
    said = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "Red."}]
    data = asked(tmp_path, [{"photo": "0.png", "messages": said}], messages="messages")
    assert refusal(builders.prepare, task="image-text", model=smol, data=data).endswith(
        "there is no column 'images' for data.columns.images; the columns are photo, messages; next:"
        " data.columns.images=NAME for the one that it is, or, for rows of another form, data.columns.image,"
        " data.columns.question, data.columns.answer"
    )


def test_a_folder_of_images_with_captions_is_read(smol: str, tmp_path: Path) -> None:
    for split in ("train", "validation"):
        (tmp_path / split).mkdir()
        named = [{"file_name": photo(tmp_path / split, number, "red"), "caption": "A red one."} for number in range(2)]
        tiny.write_jsonl(tmp_path / split / "metadata.jsonl", named)
    data = {"folder": str(tmp_path), "columns": {"answer": "caption"}}
    prepared = builders.prepare(task="image-text", model=smol, data=data, prompt="Describe.")
    assert [len(prepared.train), prepared.train[0]["pixel_values"].ndim] == [2, 5]


def test_a_model_without_eyes_is_refused(tmp_path: Path) -> None:
    place = str(builders.model(tmp_path, "qwen3"))
    with pytest.raises(UserError, match="a qwen3 reads no text beside images; allowed: a model of both"):
        builders.prepare(task="image-text", model=place, data=asked(tmp_path))


RECIPE = """# What colour is it?
task: image-text
model: smol
data:
  files: {train: train.jsonl, validation: dev.jsonl}
  columns: {image: image, question: question, answer: answer}
lora: {r: 4}
generate: {rows: 2, max_new_tokens: 4}
seed: 1
training:
  per_device_train_batch_size: 4
  learning_rate: 1e-2
  max_steps: 8
  eval_strategy: "no"
  save_strategy: "no"
"""


def test_a_saved_model_answers_new_rows(
    desk: Path, smol: str, finetune: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(smol, desk / "smol")
    for name, rows in (("train", questions(desk, 16)), ("dev", questions(desk, 4, 16))):
        tiny.write_jsonl(desk / f"{name}.jsonl", rows)
    (desk / "my.yaml").write_text(RECIPE, encoding="utf-8")
    finetune("my.yaml", "output_dir=whole").finished()
    assert results(desk / "whole")["fallback"] == []
    lines = predictions(desk / "whole")
    tiny.write_jsonl(desk / "new.jsonl", [{"image": f"{number}.png", "question": ASKED} for number in (16, 17)])
    capfd.readouterr()
    assert main(["predict", "whole", "new.jsonl", "--format", "jsonl"]) == 0
    found = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [row["prompt"] for row in found] == [line["prompt"] for line in lines]
    assert [row["generated"] for row in found] == [line["generated"] for line in lines]
    assert [row["image"] for row in found] == [line["image"] for line in lines] == ["16.png", "17.png"]
    assert main(["predict", "whole", "16.png", "--format", "jsonl"]) == 0  # a photo alone: there is no question
    assert json.loads(capfd.readouterr().out)["prompt"] == "user: <image>"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Qwen2.5-VL: its patches are a 3-D convolution, and its positions need to know which tokens are images."""
    return str(senses.smol(tmp_path_factory.mktemp("models") / "qwen", "qwen2_5_vl"))


@pytest.mark.usefixtures("untouched")
def test_qwen_vl_reads_images_without_torchvision_and_learns_as_on_the_cpu_where_volumes_are_misread(
    qwen: str, tmp_path: Path
) -> None:
    """macOS 26.0 to 26.2 convolve volumes wrongly (pytorch#197114): without the guard the loss differs, with it it is
    the CPU's.
    """

    prepared = builders.prepare(task="image-text", model=qwen, data=asked(tmp_path), max_image_tokens=16)
    assert prepared.choices["images"].value == "up to 16 tokens an image"
    batch = prepared.collator([prepared.train[place] for place in range(3)])
    assert batch["mm_token_type_ids"].sum() == batch["image_grid_thw"].prod(1).sum() // 4
    model = prepared.model.eval()

    def loss(device: str) -> float:
        with torch.no_grad():
            placed = {name: value.to(device) for name, value in batch.items()}
            return float(model.to(device)(**placed).loss)

    right = loss("cpu")
    assert loss("mps") == pytest.approx(right, rel=1e-5)
    with hazards.on("conv3d-layout"):
        assert loss("mps") == pytest.approx(right, rel=1e-5)
        with guards.get("conv3d-layout").left_alone():
            assert loss("mps") != pytest.approx(right, rel=1e-5)
