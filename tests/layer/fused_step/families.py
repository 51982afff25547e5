"""A training of each family of models, small, through transformers' Trainer: what it is made of, and its counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from hf_mps.metal import simulator

BATCH, LENGTH, WORDS = 4, 12, 64
WARM = 8
"""Steps before the counts begin: guards have had their trials and first looks."""
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}

Made = tuple[Any, list[dict[str, Any]]]


@dataclass
class Counts(TrainerCallback):  # type: ignore[misc]
    """Counts the steps from WARM on, until `steps` are done."""

    steps: int
    counted: Any = None
    losses: list[float] = field(default_factory=list)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == WARM:
            self.counted = simulator.Counted()
        elif state.global_step == WARM + self.steps:
            self.counted.stop()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


def train(made: Made, folder: Path, *, steps: int, logging_steps: int = 10_000, **arguments: Any) -> Counts:
    """Train on batches of BATCH rows; one step more than what is counted."""
    model, rows = made
    counts = Counts(steps)
    settings = TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=WARM + steps + 1,
        logging_steps=logging_steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **arguments,
    )
    Trainer(
        model=model, args=settings, train_dataset=rows, data_collator=default_data_collator, callbacks=[counts]
    ).train()
    return counts


IDS = torch.arange(2 * LENGTH).view(2, -1) % WORDS


def trained(
    model: Any, context: AbstractContextManager[Any], autocast: torch.dtype | None = None, **how: Any
) -> tuple[simulator.Counted, float, dict[str, torch.Tensor]]:
    """What a forward and a backward pass launch, the loss, and the gradients on the host.

    What is given beside (`how`) goes to the model.
    """
    device = next(model.parameters()).device.type
    given = IDS.to(device)
    labels = given[:, 0] % 2 if hasattr(model, "classifier") else given
    model.zero_grad()
    with context, simulator.counted() as counts:
        with torch.autocast(device, autocast) if autocast else nullcontext():
            loss = model(input_ids=given, labels=labels, **how).loss
        loss.backward()
    gradients = {name: each.grad.cpu() for name, each in model.named_parameters() if each.grad is not None}
    return counts, loss.item(), gradients


def same_second_gradients(
    fused: Any, call: Callable[..., torch.Tensor], *given: Any, wanted: Any = (), tolerance: float = 1e-3
) -> None:
    """The gradients of a gradient's squares are stock's in a fused step: of `call(*given)`, for `wanted` too."""
    found, of = [], [*given, *wanted]
    for context in (nullcontext(), fused()):
        with context:
            first = torch.autograd.grad(call(*given).pow(3).sum(), given, create_graph=True)
            second = torch.autograd.grad(sum(each.square().sum() for each in first), of, allow_unused=True)
        found.append([each.cpu() for each in second if each is not None])
    for stock, ours in zip(*found, strict=True):
        largest = stock.abs().max().clamp(min=1e-12)
        torch.testing.assert_close(ours / largest, stock / largest, rtol=tolerance, atol=tolerance)


def ids(draw: torch.Generator, rows: int = 64) -> Iterator[list[int]]:
    for _ in range(rows):
        yield torch.randint(3, WORDS, (LENGTH,), generator=draw).tolist()


def padded(row: list[int], number: int) -> dict[str, Any]:
    """Every third row is as long as the batch; the others end earlier."""
    real = LENGTH - number % 3
    return {"input_ids": row[:real] + [0] * (LENGTH - real), "attention_mask": [1] * real + [0] * (LENGTH - real)}


def encoder(**shape: Any) -> Made:
    """BERT as a classifier, with dropout and padding."""
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(
        BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **SHAPE, **shape)
    )
    rows = [padded(row, number) | {"labels": number % 2} for number, row in enumerate(ids(_draw()))]
    return model, rows


def decoder(dropout: float = 0.05) -> Made:
    """A Llama whose attention has LoRA, with dropout in the adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **SHAPE))
    adapted = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], lora_dropout=dropout)
    )
    return adapted, [{"input_ids": row, "attention_mask": [1] * LENGTH, "labels": row} for row in ids(_draw())]


def pictures() -> Made:
    """A ViT, which drops nothing."""
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, num_labels=4, **SHAPE))
    draw = _draw()
    rows = [{"pixel_values": torch.randn(3, 16, 16, generator=draw), "labels": number % 4} for number in range(64)]
    return model, rows


def translation() -> Made:
    """A T5: an encoder, a decoder, attention from one to the other, and positions that are learned in the scores."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    config = T5Config(vocab_size=WORDS, decoder_start_token_id=0, **sizes)
    rows = [padded(row, number) | {"labels": row} for number, row in enumerate(ids(_draw()))]
    return T5ForConditionalGeneration(config), rows


class Pairs(torch.nn.Module):
    """Sentence embeddings: the mean over a mask of each of two texts, and which belong together."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        self.encoder = BertModel(BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **SHAPE))

    def forward(
        self, anchor_ids: Any, anchor_mask: Any, positive_ids: Any, positive_mask: Any, labels: Any
    ) -> dict[str, Any]:
        first, second = self._mean(anchor_ids, anchor_mask), self._mean(positive_ids, positive_mask)
        return {"loss": torch.nn.functional.cross_entropy(first @ second.t() * 20, labels)}

    def _mean(self, ids: Any, mask: Any) -> Any:
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def embeddings() -> Made:
    """Pairs of texts, pooled by their masks."""
    texts = [padded(row, number) for number, row in enumerate(ids(_draw(), 128))]
    rows = []
    for number in range(64):
        row: dict[str, Any] = {"labels": number % BATCH}
        for place, side in enumerate(("anchor", "positive")):
            text = texts[2 * number + place]
            row |= {f"{side}_ids": text["input_ids"], f"{side}_mask": text["attention_mask"]}
        rows.append(row)
    return Pairs(), rows


FAMILIES: dict[str, Callable[..., Made]] = {
    "encoder": encoder,
    "decoder with LoRA": decoder,
    "decoder with LoRA, nothing dropped": lambda: decoder(0.0),
    "pictures": pictures,
    "translation": translation,
    "embeddings": embeddings,
}


def made(name: str, **how: Any) -> Made:
    """The same model and rows on every call."""
    torch.manual_seed(0)
    return FAMILIES[name](**how)


def _draw() -> torch.Generator:
    return torch.Generator().manual_seed(1)
