"""Learning from pairs of answers: DPO, measured against the model before training, and ORPO, in one pass without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from hf_mps.finetune.data import synthetic
from hf_mps.finetune.models import language
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks._preference import SETTLED, WHOLE, PreferenceTask, disordered, prompted, said
from hf_mps.finetune.text import chat, lengths
from hf_mps.metrics import Baseline

NO_ENCODER = "it is for encoder-decoder models, and the task trains decoders; leave it out"


class PairColumns(schema.Columns):
    """The two answers, and the prompt where they do not hold it: texts, messages, or whole conversations."""

    prompt: str | None = None
    """The column of the prompt."""
    chosen: str = "chosen"
    """The column of the better answer."""
    rejected: str = "rejected"
    """The column of the worse answer."""


class PairData(schema.Data):
    """Adds the columns."""

    columns: PairColumns = PairColumns()


class PairRecipe(language.Chat):
    """What a recipe of pairs has."""

    data: PairData


class PairTask(PreferenceTask):
    """Learns to prefer one of two answers. A saved model rewards pairs of answers, or answers prompts alone."""

    metrics = ("rewards/accuracies", "rewards/margins")
    # A row to be answered has a pair, whose rewards are measured, or a prompt alone.
    optional = ("prompt", "chosen", "rejected")
    ids = ("prompt_ids", "chosen_ids", "rejected_ids")
    shapes = (("chosen", "rejected"),)
    counted = ("pairs", "pairs of answers to one prompt")

    def answered(self, row: Mapping[str, Any]) -> tuple[list[dict[str, str]], list[str]]:
        prompt, *answers = conversation(row)
        return prompt, answers

    def make_collator(self, length: lengths.Lengths) -> Any:
        from trl.trainer.dpo_trainer import DataCollatorForPreference

        inner = DataCollatorForPreference(self.loaded.tokenizer.pad_token_id)
        return length.collator(inner, self.loaded.tokenizer, filled={"completion_mask": 0})

    def baseline(self, sizes: Sequence[Sequence[int]]) -> Baseline:
        # The habit that preferences teach most easily.
        longer = [better > worse for _, better, worse in zip(*sizes, strict=True)]
        return Baseline("always prefers the longer answer", {"rewards/accuracies": sum(longer) / len(longer)})

    def rewarded(self, row: Mapping[str, Any], reward: Any) -> tuple[dict[str, Any], bool]:
        better, worse = reward
        return {"reward_chosen": better, "reward_rejected": worse}, better > worse

    @staticmethod
    def smoke_row(recipe: Any, made: synthetic.MadeUp) -> dict[str, Any]:
        """Return made-up sentences: the chosen answer is another sentence, the rejected one its words in disorder."""
        named = recipe.data.columns
        question, answer = synthetic.sentences(made.draw, 2)
        asked = {"role": "user", "content": f"Say it in other words: {question}"}
        sides = {named.chosen: answer, named.rejected: disordered(answer)}
        if named.prompt:
            return {named.prompt: asked["content"], **sides}
        return {side: [asked, {"role": "assistant", "content": text}] for side, text in sides.items()}


def conversation(row: Mapping[str, Any]) -> tuple[list[dict[str, str]], str, str]:
    """Return a row's prompt messages and its two answers. Raises chat.ConversationError for a row without them."""
    (before, answer), (other, worse) = (said(row, side) for side in ("chosen", "rejected"))
    if before != other:
        raise chat.ConversationError("has answers to two different prompts")
    return before or prompted(row), answer, worse


class DPORecipe(PairRecipe):
    """Adds the chat template (`plain`, or a Jinja file). `training` takes DPOConfig's `beta`, `loss_type` and so on."""

    task: Literal["dpo"]
    """What the model learns to do."""


class DPO(PairTask):
    """Learns to prefer one of two answers, from its start on."""

    name = "dpo"
    recipe_class = DPORecipe
    arguments_source = ("trl/trainer/dpo_config.py", "DPOConfig")
    settled: ClassVar[Mapping[str, str]] = {
        **SETTLED,
        "truncation_mode": "the task cuts the answers' ends itself; leave it out",
        "pad_to_multiple_of": "it is a key of the recipe itself: pad_to_multiple_of: N",
        "use_weighting": "the rewards that are measured are those of the unweighted loss; leave it out",
        "ld_alpha": "the rewards that are measured are those of whole answers; leave it out",
    }
    unsharded = WHOLE

    def kinds(self) -> tuple[type[Any], type[Any]]:
        from hf_mps.finetune.models.preference_trainer import PairArguments, PairTrainer

        return PairArguments, PairTrainer

    def reference(self) -> Any:
        return language.started_from(self.recipe)


class ORPORecipe(PairRecipe):
    """Adds the chat template (`plain`, or a Jinja file). `training` takes ORPOConfig's `beta`."""

    task: Literal["orpo"]
    """What the model learns to do."""


class ORPO(PairTask):
    """Learns one of two answers, and to prefer it to the other."""

    name = "orpo"
    recipe_class = ORPORecipe
    arguments_source = ("trl/experimental/orpo/orpo_config.py", "ORPOConfig")
    settled: ClassVar[Mapping[str, str]] = {
        **SETTLED,
        **dict.fromkeys(("max_completion_length", "is_encoder_decoder"), NO_ENCODER),
        "padding_value": "it is the tokenizer's; leave it out",
        "generate_during_eval": "predictions.csv has the rewards of the validation rows; leave it out",
    }

    def kinds(self) -> tuple[type[Any], type[Any]]:
        from hf_mps.finetune.models.odds_trainer import Arguments, OddsTrainer

        return Arguments, OddsTrainer
