"""Distillation follows the teacher as TRL's GKDTrainer does, loss by loss, and on the model's own answers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_mps.core.errors import UserError
from hf_mps.finetune.models.distill_trainer import divergence
from tests.finetune import builders, tiny
from tests.finetune.tasks.test_preference import TEMPLATE, conversations, losses

pytestmark = pytest.mark.usefixtures("own_cache")

STEPS = {"max_steps": 5, "learning_rate": 1e-2, "train_sampling_strategy": "sequential"}
ANSWERS = ("Yes, it is a big red ball.", "No, and the moon was far away.", "Yes.")
ROWS = [{"messages": [*conversations(n), {"role": "assistant", "content": ANSWERS[n % 3]}]} for n in range(12)]


def gkd() -> tuple[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.gkd import GKDConfig, GKDTrainer
    return GKDConfig, GKDTrainer


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model, and a teacher with the same words and other weights."""
    folders = [tmp_path_factory.mktemp(name) for name in ("student", "teacher")]
    model, teacher = (builders.model(folder, "qwen3") for folder in folders)
    torch.manual_seed(5)
    other = AutoModelForCausalLM.from_pretrained(teacher)
    for weight in other.parameters():
        weight.data.add_(0.3 * torch.randn_like(weight))
    other.save_pretrained(teacher)
    return str(model), str(teacher)


def prepared(places: tuple[str, str], folder: Path, **keys: Any) -> Any:
    template = folder / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    file = str(tiny.write_jsonl(folder / "rows.jsonl", ROWS))
    data = {"files": {"train": file, "validation": file}, "columns": {"messages": "messages"}}
    keys = {"max_length": 64, "chat_template": str(template), "seed": 1, "optimizations": False, **keys}
    return builders.prepare(task="distill", model=places[0], teacher=places[1], data=data, **keys)


@pytest.mark.parametrize("device", ["mps", "cpu"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_divergence_and_its_gradient_are_trls(beta: float, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_mps.finetune.loss.chunked.CHUNK_BYTES", 4 * 50 * 7)  # seven tokens at a time
    draw = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(3, 8, 50, generator=draw) * 3 for _ in range(2))
    labels = torch.randint(50, (3, 8), generator=draw).masked_fill(torch.rand(3, 8, generator=draw) < 0.4, -100)
    ours, theirs = student.clone().to(device).requires_grad_(), student.clone().requires_grad_()
    found = divergence(ours, teacher.to(device), (labels != -100).to(device), beta) / 7
    expected = gkd()[1].generalized_jsd_loss(theirs, teacher, labels=labels, beta=beta, num_items_in_batch=7)
    found.backward()
    expected.backward()
    assert theirs.grad is not None
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-6)


def test_each_steps_loss_is_that_of_trls_own_trainer(places: tuple[str, str], tmp_path: Path) -> None:
    made = prepared(places, tmp_path, distillation={"lmbda": 0.0, "beta": 0.3})
    ours = builders.trainer(made, tmp_path / "ours", use_cpu=True, **STEPS)
    ours.train()

    config, kind = gkd()
    tokenizer = AutoTokenizer.from_pretrained(places[0])
    tokenizer.chat_template = TEMPLATE
    settings = {"per_device_train_batch_size": 4, "logging_steps": 1, "seed": 1, "report_to": "none"}
    settings |= {"save_strategy": "no", "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True}
    stock = kind(
        model=AutoModelForCausalLM.from_pretrained(places[0]),
        teacher_model=AutoModelForCausalLM.from_pretrained(places[1]),
        args=config(str(tmp_path / "theirs"), lmbda=0.0, beta=0.3, max_length=64, use_cpu=True, **settings, **STEPS),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
    )
    stock.train()
    assert losses(ours) == pytest.approx(losses(stock), rel=1e-4)
    assert len(losses(ours)) == 5
    assert losses(ours)[-1] < losses(ours)[0]


def test_the_models_own_answers_stand_behind_the_rows_prompts(places: tuple[str, str], tmp_path: Path) -> None:
    made = prepared(places, tmp_path, distillation={"lmbda": 1.0, "max_new_tokens": 5})
    trainer = builders.trainer(made, tmp_path / "run", **STEPS)
    assert trainer.args.device.type == "mps"
    batch = next(iter(trainer.get_train_dataloader()))
    own = trainer._own_answers(trainer.model, batch)
    decode = trainer.processing_class.batch_decode
    prompts = [
        row[(mask == 1) & (labels == -100)]
        for row, mask, labels in zip(own["input_ids"], own["attention_mask"], own["labels"], strict=True)
    ]
    for said, given in zip(decode(prompts), decode(batch["input_ids"]), strict=True):
        assert given.startswith(said)
        assert said.endswith("assistant: ")
    assert 0 < int((own["labels"] != -100).sum(1).max()) <= 5
    trainer.train()
    assert all(loss > 0 for loss in losses(trainer))


def test_a_teacher_with_other_words_is_refused(places: tuple[str, str], tmp_path: Path) -> None:
    other = builders.model(tmp_path / "other", "gpt2")
    with pytest.raises(UserError, match=r"teacher .*: its tokenizer has other words than that of .*; give a larger"):
        prepared((places[0], str(other)), tmp_path)


def test_packing_and_own_answers_exclude_each_other(places: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has packing and distillation\.lmbda: 0\.5, which has the model answer"):
        prepared(places, tmp_path, packing=True)
