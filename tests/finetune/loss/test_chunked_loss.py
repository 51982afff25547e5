"""The loss of language models in chunks: the plain one's value and gradients, less memory, and models left alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from inline_snapshot import snapshot
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

from hf_mps.finetune.loss import chunked, deferred_head
from hf_mps.finetune.loss.chunked import TiedEmbedding, TiedGradient
from hf_mps.metal import simulator
from tests.finetune.text.test_lengths import recipe
from tests.finetune.text.test_packing import SIZE, WORDS, made

DEVICES = ("mps", "cpu")


@pytest.fixture(autouse=True, params=["0", "1"], ids=["operators", "kernel"])
def _small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven tokens at a time, so that every test goes through several chunks and a short last one."""
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 7 * 4 * WORDS)
    monkeypatch.setenv("HF_MPS_TRAINING_KERNELS", request.param)


def architectures() -> dict[str, Any]:
    """Models that take their loss in chunks, by what is particular about them."""
    return {
        "plain head": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SIZE)),
        "tied": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SIZE, tie_word_embeddings=True)),
        "tied with a filler": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(**SIZE, tie_word_embeddings=True, pad_token_id=3)
        ),
        "tied gpt2": lambda: made("gpt2"),
        "qwen3": lambda: made("qwen3"),
        "bias": lambda: t.PhiForCausalLM(t.PhiConfig(**SIZE)),
        "scaled logits": lambda: t.GraniteForCausalLM(t.GraniteConfig(**SIZE, logits_scaling=3.0)),
        "scaled embeddings": lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**SIZE, head_dim=16)),
        "a loss of its own beside": lambda: t.MixtralForCausalLM(
            t.MixtralConfig(**SIZE, num_local_experts=2, output_router_logits=True)
        ),
    }


def batch(device: str) -> dict[str, torch.Tensor]:
    """3 x 20 tokens on `device`, some of them no labels."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(1, WORDS, (3, 20), generator=draw)
    labels = ids.clone()
    labels[0, :9] = -100
    labels[2, 15:] = -100
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


class Products(TorchDispatchMode):
    """The shapes of the matrix products' results on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("linear", "mm", "addmm") and found.device.type == "mps":
            self.shapes.add(tuple(found.shape))
        return found


def test_batches_of_any_number_of_tokens_share_few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 128 * 4 * WORDS)
    draw = torch.Generator().manual_seed(1)
    products = Products()
    for tokens in range(130, 260, 13):
        hidden, head = torch.randn(tokens, 8, generator=draw), torch.randn(WORDS, 8, generator=draw)
        labels = torch.randint(0, WORDS, (tokens,), generator=draw)
        labels[::5] = -100
        mine = [each.to("mps").requires_grad_() for each in (hidden, head)]
        theirs = [each.requires_grad_() for each in (hidden, head)]
        with products:
            loss = chunked.cross_entropy(*mine, None, labels.to("mps"))
            loss.backward()
        stock = torch.nn.functional.cross_entropy(hidden @ head.T, labels)
        stock.backward()
        torch.testing.assert_close(loss.cpu(), stock, rtol=1e-5, atol=1e-6)
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-4, atol=1e-6)
    assert {shape[0] for shape in products.shapes} == {64, 128}


def assert_equal_gradients(mine: Any, theirs: Any) -> None:
    for (name, one), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        if other.grad is None:
            assert one.grad is None, name
            continue
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", architectures())
def test_value_and_gradients_are_the_plain_ones(name: str, device: str) -> None:
    torch.manual_seed(0)
    plain = architectures()[name]().to(device).train()
    ours = copy.deepcopy(plain)
    assert deferred_head.install(ours).value == deferred_head.CHUNKS
    inputs = batch(device)
    for items in (None, torch.tensor(31, device=device), 31):
        more = {} if items is None else {"num_items_in_batch": items}
        wanted, found = plain(**inputs, **more).loss, ours(**inputs, **more).loss
        assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
        wanted.backward()
        found.backward()  # gradients add up, as they do over the batches of a step
        assert_equal_gradients(ours, plain)


def test_a_tied_weight_has_one_gradient_made_by_head_and_embedding_together() -> None:
    plain = made("qwen3").to("mps")
    ours = copy.deepcopy(plain)
    deferred_head.install(ours)
    assert type(ours.get_input_embeddings()) is TiedEmbedding
    ids = batch("mps")["input_ids"]
    # Rows that do not come from the embedding: the head's gradient goes to the weight by itself.
    rows = plain.get_input_embeddings()(ids).detach()
    for model in (plain, ours):
        model(inputs_embeds=rows, labels=ids).loss.backward()
    assert_equal_gradients(ours, plain)
    frozen = copy.deepcopy(ours)
    frozen.get_output_embeddings().weight.requires_grad_(False)
    frozen.zero_grad()
    frozen(input_ids=ids, labels=ids).loss.backward()
    assert frozen.get_output_embeddings().weight.grad is None


@pytest.mark.parametrize("late", [False, True])
def test_the_gradient_is_the_same_early_and_late(late: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(WORDS, 8, requires_grad=True)
    ids, labels = torch.randint(WORDS, (12,)), torch.randint(WORDS, (12,))
    torch.nn.functional.cross_entropy(weight[ids] @ weight.T, labels).backward()
    wanted, weight.grad = weight.grad, None
    embedding = TiedEmbedding(torch.nn.Embedding(WORDS, 8))
    embedding.weight = torch.nn.Parameter(weight.detach())
    embedding.shared = shared = TiedGradient(recompute=late)
    chunked.cross_entropy(embedding(ids), embedding.weight, None, labels, shared=shared).backward()
    assert shared.claimed
    torch.testing.assert_close(embedding.weight.grad, wanted)


def test_outputs_hold_no_hidden_states_in_the_place_of_logits() -> None:
    model = made("llama")
    inputs = batch("cpu")
    plain = model(input_ids=inputs["input_ids"]).logits
    deferred_head.install(model)
    assert model(**inputs).logits is None
    assert len(model(**inputs, return_dict=False, use_cache=False)) == 1
    torch.testing.assert_close(model(input_ids=inputs["input_ids"]).logits, plain)
    with pytest.raises(IndexError):
        model(input_ids=inputs["input_ids"] + WORDS, labels=inputs["labels"])  # and after a call that failed
    torch.testing.assert_close(model(input_ids=inputs["input_ids"]).logits, plain)


def test_a_copy_of_the_model_stands_on_its_own() -> None:
    model = made("qwen3")
    deferred_head.install(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert model(**batch("cpu")).loss.item() == pytest.approx(torch.tensor(WORDS).log().item())
    loss = other(**batch("cpu")).loss
    loss.backward()
    assert loss.item() != pytest.approx(torch.tensor(WORDS).log().item(), abs=1e-3)
    assert other.lm_head.weight.grad is not None
    assert model.lm_head.weight.grad is None


def test_what_cannot_be_taken_in_chunks_is_left_alone_with_the_reason() -> None:
    from peft import LoraConfig, get_peft_model

    lora = get_peft_model(made("llama"), LoraConfig(target_modules=["lm_head"], r=2))
    t5 = t.T5Config(vocab_size=WORDS, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    bert = {key: value for key, value in SIZE.items() if key != "num_key_value_heads"}
    for model, reason in (
        (
            t.Gemma2ForCausalLM(t.Gemma2Config(**SIZE, head_dim=16)),
            "its forward pass changes the logits before the loss (a soft cap for instance)",
        ),
        (lora, "its head is no plain linear layer (peft.tuners.lora.layer.Linear)"),
        (t.T5ForConditionalGeneration(t5), "its forward pass does not ask for a loss function"),
        (
            t.BertForMaskedLM(t.BertConfig(**bert)),
            "its forward pass takes the loss itself (RuntimeError without logits)",
        ),
    ):
        before = type(model.get_output_embeddings())
        choice = deferred_head.install(model)
        assert (choice.value, choice.reason) == (deferred_head.PLAIN, reason)
        assert type(model.get_output_embeddings()) is before
        labels = torch.tensor([[4, 5, 6]])
        assert model(input_ids=labels, labels=labels).logits.shape[-1] == WORDS


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"optimizations": False}, "optimizations is false in the recipe"),
        ({"training": {"label_smoothing_factor": 0.1}}, "label smoothing needs every logit at once"),
        ({"training": {"use_liger_kernel": True}}, "Liger's kernel takes the loss in chunks itself"),
        ({"training": {"torch_compile": True}}, "a compiled model fuses head and loss itself"),
    ],
)
def test_the_recipe_can_keep_the_models_own_loss(said: dict[str, Any], reason: str) -> None:
    model = made("llama")
    choice = deferred_head.decide(recipe(**said), model)
    assert (choice.value, choice.reason) == (deferred_head.PLAIN, reason)
    assert type(model.lm_head) is torch.nn.Linear


def test_the_reason_says_how_many_tokens_are_taken_at_a_time() -> None:
    choice = deferred_head.decide(recipe(), made("llama"))
    assert choice.value == "cross-entropy in chunks"
    assert choice.reason == snapshot(
        "7 tokens at a time: a plain loss holds a batch's logits three times, 0.00023 MiB a token"
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_under_autocast_the_loss_is_as_near_to_the_exact_one_as_the_plain_one(device: str, kind: torch.dtype) -> None:
    exact, plain, ours = made("llama").to(device), made("llama").to(device), made("llama").to(device)
    deferred_head.install(ours)
    inputs = batch(device)
    exact(**inputs).loss.backward()
    for model in (plain, ours):
        with torch.autocast(device, kind):
            loss = model(**inputs).loss
        loss.backward()

    def distance(model: Any) -> float:
        pairs = zip(model.parameters(), exact.parameters(), strict=True)
        return float(sum(((one.grad - other.grad) ** 2).sum() for one, other in pairs if other.grad is not None)) ** 0.5

    assert distance(ours) < 1.2 * distance(plain)
    assert ours.lm_head.weight.grad.dtype == torch.float32


def test_it_goes_backward_once_and_without_gradients_keeps_nothing() -> None:
    model = made("llama")
    deferred_head.install(model)
    loss = model(**batch("cpu")).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="the chunked loss goes backward once"):
        loss.backward()
    with torch.no_grad():
        assert not model(**batch("cpu")).loss.requires_grad


def trained(model: Any, folder: Path, **said: Any) -> tuple[Any, dict[str, float]]:
    """`model` after four steps of Trainer on the device mps, and its evaluation."""
    draw = torch.Generator().manual_seed(2)
    rows = [{"input_ids": ids, "labels": ids.clone()} for ids in torch.randint(1, WORDS, (16, 12), generator=draw)]
    for place, row in enumerate(rows):
        row["labels"][: place % 9] = -100
    settings = {"max_steps": 4, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "report_to": "none"}
    arguments = TrainingArguments(folder, disable_tqdm=True, **settings, **said)
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:6])
    trainer.train()
    return model, trainer.evaluate()


@pytest.mark.parametrize(
    "said",
    [
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 3},
        {"gradient_checkpointing": True},
        {"label_smoothing_factor": 0.1},
    ],
    ids=["accumulation", "checkpointing", "smoothing"],
)
def test_trainer_ends_with_the_same_weights(said: dict[str, Any], tmp_path: Path) -> None:
    ours = made("qwen3")
    deferred_head.install(ours)
    mine, measured = trained(ours, tmp_path / "ours", **said)
    theirs, wanted = trained(made("qwen3"), tmp_path / "plain", **said)
    assert measured["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-4)
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-4)


def test_lora_trains_with_it_and_the_head_stays_frozen(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    found = []
    for name in ("ours", "plain"):
        torch.manual_seed(5)
        adapters = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"])
        model = get_peft_model(made("qwen3"), adapters)
        if name == "ours":
            assert deferred_head.install(model).value == deferred_head.CHUNKS
        found.append(trained(model, tmp_path / name, gradient_checkpointing=True))
    (mine, measured), (theirs, wanted) = found
    assert measured["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-4)
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-4)
    assert mine.get_base_model().lm_head.weight.grad is None


def test_a_step_holds_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    if simulator.loaded() is None:
        pytest.skip("needs the simulated device: Metal has no call for a peak")
    words, tokens = 20_000, 256
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 16 * 4 * words)
    size = {**SIZE, "vocab_size": words, "max_position_embeddings": tokens, "tie_word_embeddings": True}
    peaks = {}
    for name in ("plain", "ours"):
        model = Qwen2ForCausalLM(Qwen2Config(**size)).to("mps").train()
        if name == "ours":
            deferred_head.install(model)
        ids = torch.arange(tokens, device="mps")[None]
        simulator.reset_peak_memory()
        before = simulator.peak_memory()
        model(input_ids=ids, labels=ids).loss.backward()
        peaks[name] = simulator.peak_memory() - before
        del model
    logits = 4 * words * tokens
    assert peaks["plain"] > 2.9 * logits
    # The gradient of the tied weight (words x 32), one chunk, and what the layers keep.
    assert peaks["ours"] < 0.35 * logits
