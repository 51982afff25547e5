"""A language model whose head returns the hidden states, so that `chunked` computes logits and loss together.

The model's forward pass stays as it is: called with labels, the head returns its input, and the model's loss function
(`PreTrainedModel.loss_function`) computes head and loss in chunks. Whatever else the forward pass adds to its loss
stays. A trial finds the models that do more to their logits than multiply them by a number, or that have a loss of
their own; these are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import Trainer

from hf_mps.core.choice import Choice
from hf_mps.finetune.loss import chunked
from hf_mps.finetune.loss.chunked import TiedEmbedding, TiedGradient, is_tied
from hf_mps.finetune.recipe.schema import Recipe
from hf_mps.finetune.run.logging import errors_only
from hf_mps.finetune.text.lengths import IGNORED

CHUNKS = "cross-entropy in chunks"
PLAIN = "the model's own"
# A trial's hidden states go from minus to plus this: far enough that a soft cap on the logits would show.
TRIAL_RANGE = 1000.0
TRIAL_TOKENS = 6


class DeferredHead(torch.nn.Linear):
    """A head that returns its input while `deferred`; otherwise it is the Linear whose weights it took over.

    `shared` takes the gradient of the current pass where the word embedding has the same weight.
    """

    deferred = False
    shared: TiedGradient | None = None

    def __init__(self, head: torch.nn.Linear) -> None:
        self.__dict__.update(head.__dict__)  # its weights and its hooks

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden if self.deferred else super().forward(hidden)


@dataclass
class ChunkedLoss:
    """A model's loss function: `plain`, or while the head is deferred the same loss from hidden states, in chunks.

    `embedding` is the word embedding where it shares the head's weight.
    """

    head: DeferredHead
    embedding: TiedEmbedding | None
    plain: Callable[..., Tensor]
    shifted: bool

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        if not self.head.deferred:
            if self.shifted:
                others["shift_labels"] = shift_labels
            return self.plain(logits, labels, vocab_size, num_items_in_batch, ignore_index, **others)
        if self.shifted:
            labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
            labels = labels if shift_labels is None else shift_labels
        head = self.head
        count, shared = num_items_in_batch, head.shared
        return chunked.cross_entropy(logits, head.weight, head.bias, labels, count, ignore_index, shared=shared)

    def defer(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Let the head return its input in this pass: a forward pre-hook of the model."""
        head, embedding = self.head, self.embedding
        head.deferred = kwargs.get("labels") is not None
        if embedding is not None and head.deferred and head.weight.requires_grad and torch.is_grad_enabled():
            # A Mac has little memory for its speed; on CUDA and the CPU computing the logits again costs more than it
            # saves.
            head.shared = embedding.shared = TiedGradient(recompute=head.weight.device.type == "mps")

    def resume(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Remove the hidden states from the output, where they would pass for logits: a forward hook of the model."""
        deferred, self.head.deferred = self.head.deferred, False
        self.head.shared = None
        if self.embedding is not None:
            self.embedding.shared = None
        if not deferred or output is None:
            return None
        if isinstance(output, tuple):
            return (output[0], *output[2:])
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})


def decide(recipe: Recipe, model: Any) -> Choice[str]:
    """Let `model`, as Trainer will get it (LoRA included), compute its loss in chunks; return the choice to be shown.

    From then on a call with labels returns no logits; a call without labels is unchanged.
    """
    training = recipe.training
    if not recipe.optimizations:
        return Choice(PLAIN, "optimizations is false in the recipe")
    for key, why in (
        ("label_smoothing_factor", "label smoothing needs every logit at once"),
        ("use_liger_kernel", "Liger's kernel takes the loss in chunks itself"),
        ("torch_compile", "a compiled model fuses head and loss itself"),
    ):
        if training.get(key):
            return Choice(PLAIN, why)
    return install(model)


def install(model: Any) -> Choice[str]:
    """Do as `decide` for a model without a recipe; return CHUNKS, or PLAIN with the reason to leave the model alone."""
    from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    head: Any = inner.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        kind = f"{type(head).__module__}.{type(head).__qualname__}"
        return Choice(PLAIN, f"its head is no plain linear layer ({kind})")
    plain = inner.loss_function
    if plain not in (ForCausalLMLoss, ForMaskedLMLoss):
        return Choice(PLAIN, f"its loss is {getattr(plain, '__name__', type(plain).__name__)}, of another kind")
    deferred = DeferredHead(head)
    loss = ChunkedLoss(deferred, None, plain, plain is ForCausalLMLoss)
    inner.set_output_embeddings(deferred)
    if not head.weight.is_meta:
        obstacle, reaches_embedding = _chunking_obstacle(inner, loss), True
    else:  # `hf-mps plan`: a tiny copy is tried in its place
        from hf_mps.finetune.smoke import tiny_copy

        obstacle, reaches_embedding = "there is no tiny model of its class to try it on", False
        if (tiny := tiny_copy(inner)) is not None:
            choice = install(tiny)
            obstacle = choice.reason if choice.value == PLAIN else ""
            reaches_embedding = isinstance(tiny.get_input_embeddings(), TiedEmbedding)
    if obstacle:
        inner.set_output_embeddings(head)
        inner.loss_function = plain
        return Choice(PLAIN, obstacle)
    inner.loss_function = loss
    embedding = inner.get_input_embeddings()
    if is_tied(embedding, head) and reaches_embedding and (head.weight.is_meta or _gradient_reaches(inner, loss)):
        loss.embedding = TiedEmbedding(embedding)
        inner.set_input_embeddings(loss.embedding)
    # On the model that Trainer calls; the head and the loss are those of the model inside LoRA.
    model.register_forward_pre_hook(loss.defer, with_kwargs=True)
    model.register_forward_hook(loss.resume, with_kwargs=True, always_call=True)
    bytes_per_token = 4 * len(head.weight)
    rows = max(1, chunked.CHUNK_BYTES // bytes_per_token)
    size = f"{bytes_per_token / 2**20:.2g} MiB a token"
    return Choice(CHUNKS, f"{rows} tokens at a time: a plain loss holds a batch's logits three times, {size}")


def _chunking_obstacle(model: Any, loss: ChunkedLoss) -> str:
    """Return why `model` cannot compute its loss from hidden states, or ""; three passes over a few tokens tell."""
    head, shown_inputs = loss.head, list[Tensor]()

    def show(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        wide = torch.linspace(-TRIAL_RANGE, TRIAL_RANGE, inputs[0].numel(), device=inputs[0].device)
        shown_inputs.append(wide.view_as(inputs[0]).to(inputs[0].dtype))
        return (shown_inputs[-1],)

    try:
        with torch.no_grad():
            plain_loss = _trial_pass(model, loss, loss, deferred=False).float()
            chunked_loss = _trial_pass(model, loss, loss, deferred=True).float()
            with head.register_forward_pre_hook(show):
                returned = _trial_pass(model, loss, _logits_alone, deferred=True)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        return f"its forward pass takes the loss itself ({type(error).__name__} without logits)"
    if not shown_inputs or returned.shape != shown_inputs[-1].shape:
        return "its forward pass does not ask for a loss function"
    got, shown = returned.float(), shown_inputs[-1].float()
    # Times one number, or times 1 where there is a bias, since that number would not scale it.
    factor = 1.0 if head.bias is not None else float((got * shown).sum() / (shown * shown).sum())
    if not torch.allclose(got, shown * factor, rtol=1e-2, atol=1e-3 * TRIAL_RANGE * abs(factor)):
        return "its forward pass changes the logits before the loss (a soft cap for instance)"
    if not torch.allclose(chunked_loss, plain_loss, rtol=1e-4 if head.weight.dtype == torch.float32 else 2e-2):
        return f"on {TRIAL_TOKENS} tokens its loss would be {chunked_loss:.4f} instead of {plain_loss:.4f}"
    return ""


def _gradient_reaches(model: Any, loss: ChunkedLoss) -> bool:
    """Return whether the gradient of the hidden states reaches the word embedding."""
    embedded: list[Tensor] = []
    embedding = model.get_input_embeddings()
    if not embedding.weight.requires_grad:
        return False
    with torch.enable_grad(), embedding.register_forward_hook(lambda _, ids, rows: embedded.append(rows)):
        hidden = _trial_pass(model, loss, _logits_alone, deferred=True)
    return torch.autograd.grad(hidden.sum(), embedded[0], allow_unused=True)[0] is not None


def _logits_alone(logits: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return the logits that a loss function is given."""
    return logits


def _trial_pass(model: Any, loss: ChunkedLoss, function: Callable[..., Tensor], *, deferred: bool) -> Tensor:
    """Return what `model` returns as its loss for a few tokens, with `function` as its loss function."""
    ids = torch.arange(TRIAL_TOKENS, device=loss.head.weight.device).remainder(len(loss.head.weight)).unsqueeze(0)
    training = model.training
    model.eval()
    model.loss_function, loss.head.deferred = function, deferred
    try:
        with errors_only():  # one of these ids may be the padding token, and the model would warn of it
            loss_value: Tensor = model(input_ids=ids, labels=ids).loss
        return loss_value
    finally:
        model.loss_function, loss.head.deferred = loss, False
        model.train(training)


# Two numbers of items in a step, far enough apart that a loss which reads them cannot come out equal.
ITEM_COUNTS = (1, 1000)
TRIAL_ROWS = 2


def fix_accumulation_scaling(trainer: Any) -> bool:
    """Let `trainer` divide the loss by the accumulation steps where the model's loss does not; return whether it does.

    Trainer hands a model the number of labels in a whole step (`num_items_in_batch`) and divides by nothing itself
    where `forward` takes keyword arguments. Many heads take that number and drop it (BERT's, RoBERTa's, BART's, T5's):
    their loss and gradients come out as many times too large as there are accumulation steps (transformers#47688). Two
    training rows tell whether the number makes a difference to this model. A trainer with its own loss is left alone,
    and so is a model without numbers, as `hf-mps plan` has it. With several processes it is the same: Trainer
    multiplies such a loss by their number, for the mean over them to be over all of the step's labels. There a loss
    that is the mean over a batch's tokens is replaced by that over the step's (`over_all_labels`), or processes whose
    rows have fewer labels would count too much.
    """

    has_own_loss = type(trainer).compute_loss is not Trainer.compute_loss or trainer.compute_loss_func is not None
    model, weight = trainer.model, next(trainer.model.parameters())
    without_numbers = weight.is_meta or isinstance(weight, FakeTensor)
    if has_own_loss or without_numbers or not trainer.model_accepts_loss_kwargs:
        return False
    dataset = getattr(trainer.train_dataset, "sample", trainer.train_dataset)  # of a stream its first rows
    rows = range(min(TRIAL_ROWS, len(dataset)))
    training, rng_state = model.training, torch.get_rng_state()
    with torch.device("cpu"):  # whatever the default is
        inputs = trainer.data_collator([dataset[row] for row in rows])
    # Under FSDP the weights are on the CPU still: the model is divided when the training begins.
    inputs = send_to_device(trainer._prepare_inputs(inputs), weight.device)
    torch.set_rng_state(rng_state)  # the collator may have drawn masks, and a run depends on its seed alone
    model.eval()
    try:
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        divides = isinstance(getattr(inner, "loss_function", None), ChunkedLoss)
        reads_count = divides or _loss_depends_on_count(model, inputs)
        shared = not reads_count and trainer.args.world_size > 1 and trainer.label_smoother is None
        by_tokens = shared and _is_mean_over_tokens(model, inputs)
    finally:
        model.train(training)
    if not reads_count:
        trainer.model_accepts_loss_kwargs = False
    if by_tokens:
        trainer.compute_loss_func = over_all_labels
    return not reads_count


def over_all_labels(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    """Return the cross-entropy of the labels, shape (rows, tokens), over the number of those of the whole step.

    It is Trainer's `compute_loss_func`; without a number (an evaluation) it is the mean.
    """
    from transformers.loss.loss_utils import fixed_cross_entropy

    logits = outputs["logits"].flatten(0, 1).float()
    loss: torch.Tensor = fixed_cross_entropy(logits, labels.to(logits.device).flatten(), num_items_in_batch)
    return loss


def _loss_depends_on_count(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Return whether the loss of a batch changes with the number of items in the step."""
    with torch.no_grad(), torch.device(next(model.parameters()).device):
        few, many = (model(**inputs, num_items_in_batch=torch.tensor(count)).loss for count in ITEM_COUNTS)
    return not torch.equal(few, many)


def _is_mean_over_tokens(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Return whether the model's loss is the mean of the cross-entropy over its labels, one for each token."""
    labels = inputs.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2:  # a detector's are a list of boxes
        return False
    given = {name: value for name, value in inputs.items() if name != "labels"}
    with torch.no_grad(), torch.device(next(model.parameters()).device):
        own = model(**inputs).loss
        try:
            outputs = model(**given)
        except (ValueError, TypeError, RuntimeError):  # a decoder that makes its inputs of the labels
            return False
        if outputs.get("logits") is None or outputs["logits"].shape[:-1] != labels.shape:
            return False
        return torch.allclose(own.float(), over_all_labels(outputs, labels), rtol=1e-4)
