"""Learning from thumbs up and down (KTO): a model learns which answers are wanted, each by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.models import language
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks._preference import SETTLED, WHOLE, PreferenceTask, disordered, prompted, said
from hf_mps.finetune.text import lengths
from hf_mps.metrics import Baseline

SINGLE, PAIR = ("prompt", "completion", "label"), ("chosen", "rejected")
KEPT = "each prompt is paired with another answer of its batch; leave it out"


class Columns(schema.Columns):
    """A prompt, an answer to it and whether that is wanted; or two answers, of which the `chosen` one is."""

    prompt: str | None = None
    """The column of the prompt."""
    completion: str | None = None
    """The column of the answer."""
    label: str | None = None
    """The column that says whether the answer is wanted."""
    chosen: str | None = None
    """The column of the wanted answer, where a row has two."""
    rejected: str | None = None
    """The column of the other answer."""

    @model_validator(mode="after")
    def _one_shape(self) -> Columns:
        pair = [role for role in PAIR if getattr(self, role)]
        single = [role for role in SINGLE[1:] if getattr(self, role)]
        if pair and (single or len(pair) == 1):
            raise ValueError(f"has {', '.join([*pair, *single])}; give chosen and rejected, or completion and label")
        return self

    def roles(self) -> dict[str, str]:
        """Return {role: column} of what is read: of a single answer the roles are the columns' names by default."""
        if self.chosen or self.rejected:
            return super().roles()
        return {role: getattr(self, role) or role for role in SINGLE}


class Data(schema.Data):
    """Adds the columns."""

    columns: Columns = Columns()


class Recipe(language.Chat):
    """Adds the chat template (`plain`, or a Jinja file). `training` takes KTOConfig's `beta`, `desirable_weight` and so
    on.
    """

    task: Literal["kto"]
    """What the model learns to do."""
    data: Data

    @model_validator(mode="after")
    def _several_in_a_batch(self) -> Recipe:
        if self.training.get("per_device_train_batch_size") == 1:
            told = "which leaves a prompt without another answer to be paired with; give 2 or more"
            raise ValueError(f"has training.per_device_train_batch_size: 1, {told}")
        return self


class KTO(PreferenceTask):
    """Learns which answers are wanted. A saved model rewards answers, or answers prompts alone."""

    name = "kto"
    recipe_class = Recipe
    metrics = ("rewards/margins",)
    truth = ("label",)
    optional = ("prompt", "completion", *PAIR)
    arguments_source = ("trl/trainer/kto_config.py", "KTOConfig")
    settled: ClassVar[Mapping[str, str]] = {
        **SETTLED,
        "pad_to_multiple_of": "it is a key of the recipe itself: pad_to_multiple_of: N",
        **dict.fromkeys(("precompute_ref_log_probs", "precompute_ref_batch_size"), KEPT),
    }
    unsharded = WHOLE
    ids = ("prompt_ids", "completion_ids")
    shapes = (("completion",), PAIR)
    counted = ("rows", "an answer each")
    alone = False
    label = ("label",)

    def kinds(self) -> tuple[type[Any], type[Any]]:
        from hf_mps.finetune.models.preference_trainer import AnswerArguments, AnswerTrainer

        return AnswerArguments, AnswerTrainer

    def reference(self) -> Any:
        return language.started_from(self.recipe)

    def each(self, rows: Rows) -> Rows:
        """Return the rows with each pair as two: the chosen answer, which is wanted, and the rejected one."""
        if not set(PAIR) <= set(rows.dataset.column_names):
            return rows
        pairs = len(rows.dataset)
        twice = rows.sample([place for place in range(pairs) for _ in PAIR])
        return twice.with_columns(twice.dataset.add_column("label", [True, False] * pairs))

    def answered(self, row: Mapping[str, Any]) -> tuple[list[dict[str, str]], list[str]]:
        side = "completion" if "completion" in row else PAIR[0] if row["label"] else PAIR[1]
        before, answer = said(row, side)
        return before or prompted(row), [answer]

    def told(self, left: Choice[str], features: Mapping[str, Any]) -> Choice[str]:
        """Add the share of wanted answers. Raises UserError for validation rows of one label, which have no margin."""
        shares = {split: sum(some["label"]) / len(some) for split, some in features.items()}
        for split, share in shares.items():
            if split != "train" and share in (0, 1):
                only = str(bool(share)).lower()
                raise UserError(f"every row of {split} has the label {only}; allowed: rows of both, to be told apart")
        return Choice(left.value, f"{left.reason}; {shares['train']:.0%} of the training ones are wanted")

    def make_collator(self, length: lengths.Lengths) -> Any:
        from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

        inner = DataCollatorForUnpairedPreference(self.loaded.tokenizer.pad_token_id, max_length=self.loaded.longest)
        return Mismatched(length.collator(inner, self.loaded.tokenizer, filled={"completion_mask": 0}))

    def baseline(self, sizes: Sequence[Sequence[int]]) -> Baseline:
        return Baseline("is the model before its first step, which rewards all alike", {"rewards/margins": 0.0})

    def rewarded(self, row: Mapping[str, Any], reward: Any) -> tuple[dict[str, Any], bool]:
        return {"reward": reward}, (reward > 0) == row["label"]

    @staticmethod
    def smoke_row(recipe: Recipe, made: synthetic.MadeUp) -> dict[str, Any]:
        """Return made-up sentences: a wanted answer is another sentence, any other one its words in disorder."""
        question, answer = synthetic.sentences(made.draw, 2)
        wrong, wanted = disordered(answer), made.number % 2 == 0
        values: dict[str, Any] = {"prompt": f"Say it in other words: {question}", "chosen": answer}
        values |= {"rejected": wrong, "completion": answer if wanted else wrong, "label": wanted}
        return {column: values[role] for role, column in {"prompt": "prompt", **recipe.data.columns.roles()}.items()}


@dataclass
class Mismatched:
    """Batches of `inner` with each prompt once more, before the answer to another: TRL's `KL_` columns.

    TRL takes the answer of the row before, within batches that are fixed before the training
    (trl/trainer/kto_trainer.py); this takes it within each batch as it comes.
    """

    inner: Any

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        answers = [row["completion_ids"] for row in rows]
        others = [{**row, "completion_ids": one} for row, one in zip(rows, answers[-1:] + answers[:-1], strict=True)]
        apart = {f"KL_{name}": column for name, column in self.inner(others).items() if name != "label"}
        return {**self.inner(rows), **apart}
