"""Distillation: a model learns a larger one's next-token probabilities over answers of the data and over its own."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks import sft
from hf_mps.finetune.tasks._base import Prepared


class Distillation(schema.Section):
    """How the teacher is followed, in the words of TRL's GKDConfig."""

    beta: float = Field(default=0.5, ge=0, le=1)
    """0 covers all that the teacher says (KL), 1 keeps to what it says most (reverse KL), between them is their mix."""
    lmbda: float = Field(default=0.5, ge=0, le=1)
    """The share of batches in which the model's own answers are judged; 0 generates nothing."""
    temperature: float = Field(default=0.9, gt=0)
    """The temperature at which it answers."""
    max_new_tokens: int = Field(default=128, ge=1)
    """The most tokens of such an answer."""


class Recipe(sft.Recipe):
    """Adds the teacher and how it is followed to what sft has.

    `packing` is for rows whose prompts the model does not answer itself (`distillation.lmbda: 0`).
    """

    task: Literal["distill"]  # type: ignore[assignment]
    """What the model learns to do."""
    teacher: str
    """The model that is learned from: a hub id or a folder, with the same vocabulary."""
    distillation: Distillation = Distillation()

    @model_validator(mode="after")
    def _packs_no_prompts(self) -> Recipe:
        if self.packing and self.distillation.lmbda:
            told = "which has the model answer the prompt of each row; give distillation.lmbda: 0, or leave packing out"
            raise ValueError(f"has packing and distillation.lmbda: {self.distillation.lmbda}, {told}")
        return self


class Distill(sft.SFT):
    """Learns the teacher's probabilities of the assistant's words."""

    name = "distill"
    recipe_class = Recipe
    architectures: ClassVar[tuple[str, ...]] = ()  # a saved model is one of sft's
    unsharded = "its teacher would stay whole on every rank"

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        self.refuse_without_trl()
        import transformers

        from hf_mps.finetune.models.distill_trainer import DistillTrainer

        recipe: Any = self.recipe
        if recipe.distillation.lmbda:
            self.recipe = recipe.model_copy(update={"packing": False})
        made = super().prepare(rows)
        source = self.checkpoint.beside(recipe.teacher)
        if source.tokenizer().get_vocab() != self.loaded.tokenizer.get_vocab():
            told = f"its tokenizer has other words than that of {recipe.model}, and they are compared word by word"
            raise UserError(f"teacher {recipe.teacher}: {told}; give a larger model of the same family: teacher=NAME")
        teacher, told_of = source.model(getattr(transformers, self.auto_class))
        made.choices["teacher"] = Choice(told_of.value, f"{told_of.reason}; it is asked, and does not learn")
        made.trainer = DistillTrainer
        made.trainer_settings |= {"ref_model": teacher, "distillation": recipe.distillation}
        return made

    def load_language(self, **settings: Any) -> None:
        """Load the model with whole logits, which are compared."""
        super().load_language(**{**settings, "chunks": False})
