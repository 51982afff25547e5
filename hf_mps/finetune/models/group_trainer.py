"""TRL's GRPOTrainer with exact evaluations and an exact resume: what it scores and draws is a run's own, to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy
import torch
from torch.utils.data import SequentialSampler
from transformers import GenerationConfig, Trainer
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import parse_response
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import add_fused_lm_head, use_adapter

from hf_mps.core import notices
from hf_mps.finetune.models import quantization
from hf_mps.finetune.models.trainer_mixins import KeptInCheckpoints, MeasuredBefore, PlainArguments, QuietTrl
from hf_mps.finetune.rewards.choose import Score
from hf_mps.metrics.selection import Chosen

ALIKE = 8
"""After so many steps in which no completion scored above another, a line says so."""
COLUMNS = ("reward", "tokens", "cut", "kl")
"""Of an answer, behind the score of each reward."""


@dataclass
class Arguments(PlainArguments, GRPOConfig):  # type: ignore[misc]
    """GRPOConfig with TrainingArguments' defaults."""


class GroupTrainer(KeptInCheckpoints, MeasuredBefore, QuietTrl, GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer that learns from the scores of `rewards`, and answers validation prompts once each, greedily.

    Equal weights then score equally, and no evaluation draws random numbers that the training would have drawn. The
    divergence (KL) is measured from `ref_model`, where there is one, or from the model without its adapters; with
    neither it is NaN. A checkpoint holds the completions that are still to be learned from, and the measures that are
    still to be logged. Where the loader gives a whole batch in place of rows ({input_ids, attention_mask}, as a step
    that is only looked at has it), no completion is generated, and each batch's last tokens count as one.
    """

    KEPT = "completions_{}.pth"
    generation_config: Any
    generation_kwargs: dict[str, Any]

    def __init__(self, *, model: Any, args: Any, rewards: Sequence[Score], ref_model: Any = None, **more: Any) -> None:
        # GRPOTrainer takes neither: it makes batches of prompts itself, and knows no metrics when it is made.
        compute_metrics, _ = (more.pop(name, None) for name in ("compute_metrics", "data_collator"))
        # TRL would read the reference's weights once more from where the model's came from, or copy the adapters.
        with patch.object(args, "beta", 0.0), quantization.adapters_kept(model):
            super().__init__(model=model, args=args, reward_funcs=list(rewards), **more)
        self.beta = args.beta
        self._alike: int | None = 0  # steps without any difference between rewards; None: there was one, or it was said
        self.compute_metrics = compute_metrics
        if ref_model is not None:
            add_fused_lm_head(ref_model, temperature=self.temperature)
            self.ref_model = self.accelerator.prepare_model(ref_model, evaluation_mode=True)

    # What is measured.

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Return minus the batch's mean objective (reward - beta KL), and a float32 row for each prompt: scores,
        COLUMNS.
        """
        lines = [[*one["scores"], *(one[name] for name in COLUMNS)] for one in self.answers(inputs)]
        table = torch.tensor(lines, dtype=torch.float32, device=self.args.device)
        loss = torch.tensor(objective(table.cpu().numpy(), self.beta), device=self.args.device)
        # Trainer computes metrics only where there are labels; nobody reads these.
        return (loss, None, None) if prediction_loss_only else (loss, table, table[:, 0])

    @torch.no_grad()
    def answers(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the greedy answer to each row's prompt: `completion`, its text; `scores`, by the rewards; and COLUMNS.

        `reward` is the weighted sum of the scores, `cut` whether the answer was not at its end; a score that does not
        apply is NaN. No other process takes part.
        """
        self.model.eval()
        prompts = [row["prompt"] for row in rows]
        with self._greedily():
            prompt_ids, *_ = self._tokenize_prompts(prompts)
            completion_ids, _ = self._generate_single_turn(prompt_ids, None, {}, 1)
        # As rewards get completions in training (GRPOTrainer._generate).
        reader = self._tokenizer
        if any(getattr(reader, name, None) is not None for name in ("response_template", "response_schema")):
            pairs = zip(prompt_ids, completion_ids, strict=True)
            said = [[parse_response(reader, ids, prefix=before, tools=[])] for before, ids in pairs]
        else:
            texts = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
            said = [[{"role": "assistant", "content": text}] for text in texts]
        columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        given = {"prompts": prompts, "completions": said, "completion_ids": completion_ids, **columns}
        each = [score(trainer_state=self.state, **given) for score in self.reward_funcs]
        scores = numpy.array(each, dtype=numpy.float64).T  # None becomes NaN
        weighted = scores * self.reward_weights.numpy()
        total = numpy.where(numpy.isnan(weighted).all(axis=1), numpy.nan, numpy.nansum(weighted, axis=1))
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        divergence = self._divergences(prompt_ids, completion_ids)
        return [
            {
                "completion": str(said[place][-1]["content"]),
                "scores": scores[place].tolist(),
                "reward": float(total[place]),
                "tokens": float(len(ids)),
                "cut": float(ids[-1] not in ends),
                "kl": divergence[place],
            }
            for place, ids in enumerate(completion_ids)
        ]

    def _divergences(self, prompt_ids: Sequence[Any], completion_ids: Sequence[Any]) -> list[float]:
        """Return each completion's mean divergence a token from the reference's distribution, in nats: TRL's estimate.

        That is exp(d) - d - 1 for d, the reference's log-probability less the model's
        (http://joschu.net/blog/kl-approx.html, k3).
        """
        whole = [[*before, *ids] for before, ids in zip(prompt_ids, completion_ids, strict=True)]
        batch = self._tokenizer.pad({"input_ids": whole}, padding_side="left", return_tensors="pt").to(self.args.device)
        ids, mask, said = batch["input_ids"], batch["attention_mask"], max(map(len, completion_ids))
        theirs = self._reference_log_probs(ids, mask, said)
        if theirs is None:
            return [float("nan")] * len(whole)
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            ours = self._get_per_token_logps_and_entropies(self.model, ids, mask, said)[0]
        apart = (theirs - ours).float()
        each = apart.exp() - apart - 1
        return [float(row[-len(own) :].mean()) for row, own in zip(each, completion_ids, strict=True)]

    def _reference_log_probs(self, ids: Any, mask: Any, said: int) -> Any:
        """Return the reference's log-probabilities of the last `said` tokens, (rows, said); None without one."""
        model = self.accelerator.unwrap_model(self.model)
        if self.ref_model is None and not hasattr(model, "disable_adapter"):
            return None
        alone = use_adapter(model, adapter_name=None) if self.ref_model is None else nullcontext()
        plainly = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        with torch.no_grad(), plainly, alone:
            return self._get_per_token_logps_and_entropies(self.ref_model or self.model, ids, mask, said)[0]

    def _greedily(self) -> AbstractContextManager[Any]:
        """Let `_generate_single_turn` take the likeliest token each time."""
        sampled = ("temperature", "top_p", "top_k", "min_p")
        kept = {name: value for name, value in self.generation_kwargs.items() if name not in sampled}
        greedy = kept | {"do_sample": False, "num_beams": 1, **dict.fromkeys(sampled)}
        config = GenerationConfig(**greedy, disable_compile=True)
        return patch.multiple(self, generation_kwargs=greedy, generation_config=config)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.model.training and self._alike is not None:
            shares = self._metrics["train"].get("frac_reward_zero_std", ())
            self._alike = self._alike + len(shares) if all(share == 1 for share in shares) else None
            if self._alike is not None and self._alike >= ALIKE:
                scored = f"the completions of each prompt scored alike in all of the first {self._alike} steps"
                way_on = "next: a reward that tells them apart, or a higher training.temperature"
                notices.warn_user(f"{scored}, so nothing was learned; {way_on}", notices.SentinelNotice)
                self._alike = None
        super().log(logs, start_time)

    # What is drawn, and goes on where it was.

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return EachEpochAnew(super()._get_train_sampler(dataset))

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """Return the rows in their order: predictions.csv and the gathered measures have them so."""
        return SequentialSampler(eval_dataset)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        # GRPOTrainer's own takes a list of rows and has the model answer them; a mapping has its answers.
        if isinstance(generation_batch, Mapping):
            return self._given(Trainer._prepare_inputs(self, generation_batch))
        return super()._prepare_inputs(generation_batch)

    def _given(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a loss's inputs for whole rows; every other one has scored above its group's mean."""
        ids, mask = batch["input_ids"], batch["attention_mask"]
        said = min(self.max_completion_length, ids.shape[1] - 1)
        signs = torch.tensor([1.0, -1.0], device=ids.device).repeat(len(ids))[: len(ids)]
        inputs = {
            "prompt_ids": ids[:, :-said],
            "prompt_mask": mask[:, :-said],
            "completion_ids": ids[:, -said:],
            "completion_mask": mask[:, -said:],
            "advantages": signs,
            "num_items_in_batch": mask[:, -said:].sum() * self.args.steps_per_generation,
        }
        if self.beta != 0.0:
            inputs["ref_per_token_logps"] = self._reference_log_probs(ids, mask, said)
        return inputs

    def _kept(self) -> dict[str, Any]:
        # Those of a step that is whole are learned from; the next step draws its own.
        left = self._step % (self.args.steps_per_generation * self.num_iterations) != 0
        inputs = self._buffered_inputs if left else None
        return {"step": self._step, "metrics": dict(self._metrics["train"]), "inputs": inputs}

    def _put_back(self, kept: dict[str, Any]) -> None:
        self._step, self._buffered_inputs = kept["step"], kept["inputs"]
        self._metrics["train"].update(kept["metrics"])


class EachEpochAnew:
    """TRL's RepeatSampler, whose order in an epoch follows from the seed and the epoch's number alone.

    TRL's draws each epoch's order after the last one's, and a run that resumes has a new sampler. The first epoch's
    order is TRL's.
    """

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; Trainer calls it before each one, also where it resumes (trainer.py)."""
        if self._stock.shuffle:
            self._stock.generator.manual_seed(self._stock.seed + epoch)

    def __len__(self) -> int:
        return len(self._stock)

    def __iter__(self) -> Iterator[int]:
        return iter(self._stock)


def objective(table: Any, beta: float) -> float:
    """Return minus what training raises, of a table of COLUMNS: the mean reward less `beta` times the mean KL."""
    total, *_, divergence = table[:, -len(COLUMNS) :].T
    apart = beta * float(divergence.mean()) if beta else 0.0
    return apart - float(numpy.nanmean(total)) if not numpy.isnan(total).all() else apart


def measured(table: Any, names: Sequence[str], chosen: Chosen, beta: float) -> dict[str, float]:
    """Return a split's metrics under TRL's names, from a row of scores and COLUMNS for each prompt.

    `names` are the rewards'; a reward that applies to no row is left at 0.
    """
    table = numpy.asarray(table, dtype=numpy.float64)
    applies = ~numpy.isnan(table)
    means = numpy.where(applies, table, 0).sum(axis=0) / numpy.maximum(applies.sum(axis=0), 1)
    found = dict(zip((*names, *COLUMNS), means.tolist(), strict=True))
    values = {
        "reward": found["reward"],
        **{mean_of(name): found[name] for name in names},
        "completions/mean_length": found["tokens"],
        "completions/clipped_ratio": found["cut"],
        "kl": found["kl"],
    }
    return {"loss": objective(table, beta), **chosen.of(values)}


def mean_of(name: str) -> str:
    """Return the name of a reward's mean in logs, as TRL has it."""
    return f"rewards/{name}/mean"
