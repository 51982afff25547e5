"""Whole trainings with a fused step: the losses are the plain Trainer's, and bit-equal where no clipping acts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from hf_mps.layer.fused_step import spans
from tests.layer.fused_step.conftest import Fused

STEPS = 20


def model(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    dropped = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForSequenceClassification(BertConfig(vocab_size=100, max_position_embeddings=16, **shape, **dropped))


def losses(folder: Path, trained: Any = None, **said: Any) -> list[float]:
    """The loss and the gradient's norm of each step of a Trainer's."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 100, (64, 12), generator=draw).tolist()
    rows = [{"input_ids": row, "labels": row[0] % 2} for row in ids]
    settings = {"max_steps": STEPS, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "logging_steps": 1}
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_nan_inf_filter": False}
    args = TrainingArguments(str(folder), **settings | quiet | said)
    trainer = Trainer(trained or model(), args, train_dataset=rows)
    trainer.train(resume_from_checkpoint=said.get("resume_from_checkpoint"))
    return [entry[name] for entry in trainer.state.log_history for name in ("loss", "grad_norm") if "loss" in entry]


@pytest.mark.parametrize(
    "said",
    [{"gradient_accumulation_steps": 2}, {"fp16": True}, {"optim": "sgd"}],
    ids=["accumulated", "fp16", "sgd"],
)
def test_losses_are_the_plain_trainers(fused: Fused, tmp_path: Path, said: dict[str, Any]) -> None:
    expected = losses(tmp_path, **said)
    with fused():
        found = losses(tmp_path, **said)
    # Sums in half precision are rounded once where stock rounds three parts and their sum.
    close = 1e-4 if "fp16" in said else 1e-5
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=close, atol=close)


def test_losses_are_bit_equal_where_clipping_does_not_act(fused: Fused, tmp_path: Path) -> None:
    said = {"max_grad_norm": 1e9, "max_steps": 10}
    expected = losses(tmp_path, **said)
    with fused():
        found = losses(tmp_path, **said)
    assert found[::2] == expected[::2]
    torch.testing.assert_close(found[1::2], expected[1::2], rtol=1e-6, atol=0)


def test_lora_and_tied_and_frozen_weights_train_alike(fused: Fused) -> None:
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model

    def run() -> list[float]:
        torch.manual_seed(0)
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        llama = LlamaForCausalLM(LlamaConfig(vocab_size=100, tie_word_embeddings=True, **shape))
        adapted: Any = get_peft_model(llama, LoraConfig(target_modules=["q_proj", "v_proj"])).to("mps")
        adapted.base_model.model.model.norm.weight.requires_grad_(True)
        return list(loop(adapted, {"input_ids": IDS, "labels": IDS}, frozen=adapted.base_model.model.model.norm.weight))

    expected = run()
    with fused():
        found = run()
    assert found == pytest.approx(expected, rel=1e-5)


IDS = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(1))


def loop(trained: Any, batch: dict[str, Any], frozen: Any = None, accelerator: Any = None) -> Iterator[float]:
    """A loop of one's own, that clips twice with a backward pass between, freezes a weight halfway, and zeroes."""
    weights = [weight for weight in trained.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-2, fused=True)
    batch = {name: each.to("mps") for name, each in batch.items()}
    for step in range(6):
        if step == 3 and frozen is not None:
            frozen.requires_grad_(False)
            frozen.grad = None
        for _ in range(2):
            loss = trained(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        yield float(loss.detach())


def test_gradients_of_ddp_stay_in_its_buckets() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # no sockets, whose set-up may take a minute

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        inner = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
        parallel = torch.nn.parallel.DistributedDataParallel(inner, gradient_as_bucket_view=True)
        parallel.register_comm_hook(None, _reduced)
        for _ in range(2):
            parallel(torch.ones(2, 8)).sum().backward()
            gradients: list[Any] = [each.grad for each in inner.parameters()]
            before = [each.data_ptr() for each in gradients]
            spans.gather(gradients)
            assert [each.data_ptr() for each in gradients] == before
            assert len(spans.spans(gradients)) == 1
    finally:
        dist.destroy_process_group()


def _reduced(state, bucket):  # type: ignore[no-untyped-def]  # DDP wants other annotations or none
    """What a single process's reduction of a bucket is."""
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
