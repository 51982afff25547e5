"""Learning from preferences: DPO, measured against the model before training, ORPO, in one pass without it, and KTO.

DPO and ORPO learn from pairs of answers, KTO from thumbs up and down: which answers are wanted, each by itself. Answers
become ids, and TRL's trainers reward them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_mps.core import notices
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.text import counted
from hf_mps.finetune.data import synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks import Dataset, Prepared, R, _language
from hf_mps.finetune.tasks._language import ChatTask, asked, left_out
from hf_mps.finetune.text import chat, lengths, tokens
from hf_mps.metrics import Baseline

# TRL's default for all weights; adapters take ten times that (TRL's documentation, "Training adapters").
RATE, RATE_OF_ADAPTERS = 1e-6, 1e-5
SETTLED = {
    "max_length": "it is a key of the recipe itself: max_length: N",
    "model_init_kwargs": "the runner loads the model itself; leave it out",
}
WHOLE = "its reference model would stay whole on every rank"
NO_ENCODER = "it is for encoder-decoder models, and the task trains decoders; leave it out"
SINGLE, PAIR = ("prompt", "completion", "label"), ("chosen", "rejected")
KEPT = "each prompt is paired with another answer of its batch; leave it out"


class PreferenceTask(ChatTask[R]):
    """Learns to prefer answers over others. A saved model rewards answers, or answers prompts alone."""

    asked: ClassVar[Mapping[str, str]] = {"prompt": "prompt"}
    ids: ClassVar[tuple[str, ...]]
    """The columns of ids: the prompt's, and those of the answers to it."""
    counted: ClassVar[tuple[str, str]]
    """What a row is: the name of the choice that says how many there are, and in words."""
    shapes: ClassVar[tuple[tuple[str, ...], ...]]
    """The columns of answers that a row may have, one of these tuples or another."""
    alone: ClassVar[bool] = True
    """Whether an answer is read behind its own prompt alone, and so is cut to the room that this leaves."""
    label: ClassVar[tuple[str, ...]] = ()
    """The column that says whether an answer is wanted, where a row has one."""

    def kinds(self) -> tuple[type[Any], type[Any]]:
        """Return the classes of its arguments and its trainer."""
        raise NotImplementedError

    def answered(self, row: Mapping[str, Any]) -> tuple[list[dict[str, str]], list[str]]:
        """Return a row's prompt and the answers to it, as in `ids`. Raises chat.ConversationError without them."""
        raise NotImplementedError

    def make_collator(self, length: lengths.Lengths) -> Any:
        """Return TRL's collator, its batches padded to the lengths."""
        raise NotImplementedError

    def baseline(self, sizes: Sequence[Sequence[int]]) -> Baseline:
        """Return what a model is measured against; `sizes` has the lengths of the validation rows for each of `ids`."""
        raise NotImplementedError

    def rewarded(self, row: Mapping[str, Any], reward: Any) -> tuple[dict[str, Any], bool]:
        """Return a row's rewards as predictions.csv has them, and whether they are as the row wants them."""
        raise NotImplementedError

    def begin(self) -> None:
        super().begin()
        self.arguments, self.trainer = self.kinds()
        self.arguments_defaults = {"max_length": self.longest}
        self.tokenizer.padding_side = "right"  # as TRL's collators pad
        self.content = tokens.digest(self.tokenizer)

    def each(self, rows: Rows) -> Rows:
        """Return the rows with those of several answers apart, where the task learns from single ones."""
        return rows

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        self.refuse_without_trl()
        recipe = self.recipe
        chosen = self.measures()
        self.begin()
        longest = self.longest
        rows = {split: self.each(some) for split, some in rows.items()}
        features = {split: self._tokenised(some) for split, some in rows.items()}
        sizes = {split: [tokens.counts(some, name) for name in self.ids] for split, some in features.items()}
        counts = {
            split: [min(before + max(answers), longest) for before, *answers in zip(*some, strict=True)]
            for split, some in sizes.items()
        }
        length = lengths.decide(recipe, counts, longest)
        self.load_language(chunks=False)  # TRL takes its log-probabilities in chunks itself
        name, what = self.counted
        left = left_out(rows, features, "their prompt alone is max_length or longer", f"{what}; ")
        return self.made(
            splits=features,
            collator=self.make_collator(length.value),
            metrics=chosen,
            compute_metrics=lambda evaluated: chosen.of(self.trainer.measured(evaluated)),
            baseline=self.baseline(sizes["validation"]),
            choices={"lengths": length, **self.choices, name: self.told(left, features)},
            arguments_defaults={**self.arguments_defaults, "learning_rate": RATE_OF_ADAPTERS if recipe.lora else RATE},
            token_counts=counts["train"],
            predicted=(rows["validation"], features["validation"]),
        )

    def told(self, left: Choice[str], features: Mapping[str, Any]) -> Choice[str]:
        """Return the choice that says how many rows there are, with what else is to be known of them."""
        return left

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        made = super().open(chosen)
        made.trainer = None  # it answers by Trainer itself
        self.length = lengths.kept(self.recipe, chosen, self.tokenizer, self.config)
        self._rewarding: Any = None
        return made

    def inputs(self, rows: Rows) -> Any:
        if any(set(shape) <= set(rows.dataset.column_names) for shape in self.shapes):
            return self._tokenised(self.each(rows))
        return asked(rows, prompted)

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Iterator[dict[str, Any]]:
        """Yield each row with the model's rewards, and after a training whether they are as the row wants them."""
        if isinstance(inputs, list):
            yield from super().answers(trainer, rows, inputs)
            return
        trained = trainer.train_dataset is not None
        if not trained:  # a saved model's own trainer computes no rewards
            if self._rewarding is None:  # beside `trainer`, which has put the model on its device
                reference = self.reference()
                parts = {
                    "data_collator": self.make_collator(self.length.value),
                    "processing_class": trainer.processing_class,
                }
                parts |= {} if reference is None else {"ref_model": reference}
                self._rewarding = self.trainer(model=self.model, args=trainer.args, train_dataset=inputs, **parts)
            trainer = self._rewarding
        decode = self.tokenizer.decode
        for row, reward in zip(inputs, trainer.predict(inputs).predictions.tolist(), strict=True):
            texts = {name.removesuffix("_ids"): decode(row[name], skip_special_tokens=True) for name in self.ids}
            rewards, right = self.rewarded(row, reward)
            known = {**{name: row[name] for name in self.label}, "right": right} if trained else {}
            yield {**texts, **rewards, **known}

    def _tokenised(self, rows: Rows) -> Dataset:
        """Return prompt and answers of one split as ids, cut at their ends; rows whose prompt fills the length are
        dropped.
        """
        tokenizer, longest = self.tokenizer, self.longest
        columns = {**dict.fromkeys(self.ids, ("int32",)), **dict.fromkeys(self.label, "bool")}

        def make(row: Mapping[str, Any], index: int) -> dict[str, Any] | None:
            prompt, answers = self.answered(row)
            (before, *_), found = zip(*(_split(tokenizer, prompt, one) for one in answers), strict=True)
            room = longest - len(before)
            cut = room if self.alone else longest
            values = (before, *(one[:cut] for one in found), *(wanted(row) for _ in self.label))
            return dict(zip(columns, values, strict=True)) if room > 0 else None

        empty = f"every prompt is {longest} tokens or longer; give a longer max_length"
        return self.mapped(rows, (self.name, longest), columns, make, empty)


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


class PairRecipe(_language.Chat):
    """What a recipe of pairs has."""

    data: PairData


class PairTask(PreferenceTask[R]):
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

    def each(self, rows: Rows) -> Rows:
        """Return the rows as they are; equal answers, from which no preference is learned, are told of."""
        if equal := sum(map(operator.eq, *(rows.dataset[side] for side in PAIR))):
            told = f"{rows.where}: {equal} of {counted(len(rows.dataset), 'pair')} have two equal answers"
            notices.warn_user(f"{told}, which no reward can tell apart; next: leave them out")
        return rows

    def make_collator(self, length: lengths.Lengths) -> Any:
        from trl.trainer.dpo_trainer import DataCollatorForPreference

        inner = DataCollatorForPreference(self.tokenizer.pad_token_id)
        return length.collator(inner, self.tokenizer, filled={"completion_mask": 0})

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
        question, answer = synthetic.sentences(made.draw, 2)
        asked = {"role": "user", "content": f"Say it in other words: {question}"}
        sides = {"chosen": answer, "rejected": disordered(answer)}
        if recipe.data.columns.prompt:
            return {"prompt": asked["content"], **sides}
        return {side: [asked, {"role": "assistant", "content": text}] for side, text in sides.items()}


def conversation(row: Mapping[str, Any]) -> tuple[list[dict[str, str]], str, str]:
    """Return a row's prompt messages and its two answers. Raises chat.ConversationError for a row without them."""
    (before, answer), (other, worse) = (said(row, side) for side in ("chosen", "rejected"))
    if before != other:
        raise chat.ConversationError("has answers to two different prompts; allowed: two answers to one")
    return asked_before(row, before), answer, worse


class DPORecipe(PairRecipe):
    """`training` takes DPOConfig's `beta`, `loss_type` and so on."""


class DPO(PairTask[DPORecipe]):
    """Learns to prefer one of two answers, from its start on."""

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
        return _language.started_from(self.recipe)


class ORPORecipe(PairRecipe):
    """`training` takes ORPOConfig's `beta`."""


class ORPO(PairTask[ORPORecipe]):
    """Learns one of two answers, and to prefer it to the other."""

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


class AnswerColumns(schema.Columns):
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

    def wrong(self) -> Iterator[str]:
        pair = [role for role in PAIR if getattr(self, role)]
        single = [role for role in SINGLE[1:] if getattr(self, role)]
        if pair and (single or len(pair) == 1):
            yield f"has {', '.join([*pair, *single])}; give chosen and rejected, or completion and label"

    def roles(self) -> dict[str, str]:
        """Return {role: column} of what is read: of a single answer the roles are the columns' names by default."""
        if self.chosen or self.rejected:
            return super().roles()
        return {role: getattr(self, role) or role for role in SINGLE}


class AnswerData(schema.Data):
    """Adds the columns."""

    columns: AnswerColumns = AnswerColumns()


class KTORecipe(_language.Chat):
    """`training` takes KTOConfig's `beta`, `desirable_weight` and so on."""

    data: AnswerData

    def wrong(self) -> Iterator[str]:
        if self.training.get("per_device_train_batch_size") == 1:
            told = "which leaves a prompt without another answer to be paired with; give 2 or more"
            yield f"has training.per_device_train_batch_size: 1, {told}"


class KTO(PreferenceTask[KTORecipe]):
    """Learns which answers are wanted. A saved model rewards answers, or answers prompts alone."""

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
        return _language.started_from(self.recipe)

    def each(self, rows: Rows) -> Rows:
        """Return the rows with each pair as two: the chosen answer, which is wanted, and the rejected one."""
        if not set(PAIR) <= set(rows.dataset.column_names):
            return rows
        pairs = len(rows.dataset)
        twice = rows.sample([place for place in range(pairs) for _ in PAIR])
        return twice.with_columns(twice.dataset.add_column("label", [True, False] * pairs))

    def answered(self, row: Mapping[str, Any]) -> tuple[list[dict[str, str]], list[str]]:
        before, answer = said(row, "completion" if "completion" in row else PAIR[0] if row["label"] else PAIR[1])
        return asked_before(row, before), [answer]

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

        inner = DataCollatorForUnpairedPreference(self.tokenizer.pad_token_id, max_length=self.longest)
        return Mismatched(length.collator(inner, self.tokenizer, filled={"completion_mask": 0}))

    def baseline(self, sizes: Sequence[Sequence[int]]) -> Baseline:
        return Baseline("is the model before its first step, which rewards all alike", {"rewards/margins": 0.0})

    def rewarded(self, row: Mapping[str, Any], reward: Any) -> tuple[dict[str, Any], bool]:
        return {"reward": reward}, (reward > 0) == row["label"]

    @staticmethod
    def smoke_row(recipe: KTORecipe, made: synthetic.MadeUp) -> dict[str, Any]:
        """Return made-up sentences: a wanted answer is another sentence, any other one its words in disorder."""
        question, answer = synthetic.sentences(made.draw, 2)
        wrong, wanted = disordered(answer), made.number % 2 == 0
        values: dict[str, Any] = {"prompt": f"Say it in other words: {question}", "chosen": answer}
        return values | {"rejected": wrong, "completion": answer if wanted else wrong, "label": wanted}


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


def disordered(answer: str) -> str:
    """Return the words of an answer in the order of the alphabet."""
    return " ".join(sorted(answer.split()))


def said(row: Mapping[str, Any], side: str) -> tuple[list[dict[str, str]], str]:
    """Return the messages before an answer in the column `side`, where it holds any, and the answer.

    Raises chat.ConversationError for one that is missing or not the assistant's.
    """
    raw = row[side]
    if not isinstance(raw, (str, Mapping, Sequence)):
        came = "no" if raw is None else f"a {type(raw).__name__} for its"
        raise chat.ConversationError(f"has {came} {side} answer; allowed: a text, or messages")
    *before, last = [{"role": "assistant", "content": raw}] if isinstance(raw, str) else chat.messages(raw)
    if (role := last["role"]) != "assistant":
        raise chat.ConversationError(f"has a {side} answer whose last words are the {role}'s, not the assistant's")
    return before, last["content"]


def asked_before(row: Mapping[str, Any], before: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the messages that a row's answer follows: `before`, with which it begins, or else those of its prompt.

    Raises chat.ConversationError where neither is there, and where the prompt is not among the messages before.
    """
    if not before:
        return prompted(row)
    if row.get("prompt") is not None and any(one not in before for one in chat.messages(row["prompt"])):
        raise chat.ConversationError("has a prompt that its answers do not begin with; next: data.columns.prompt=null")
    return before


def prompted(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the messages of a row's prompt. Raises chat.ConversationError where it has none."""
    if row.get("prompt") is None:
        way_on = "name its column with data.columns.prompt, or let each answer be a conversation that begins with it"
        raise chat.ConversationError(f"has no prompt; {way_on}")
    return chat.messages(row["prompt"])


def wanted(row: Mapping[str, Any]) -> bool:
    """Return whether a row's answer is wanted; one without a label, which is only to be rewarded, counts as wanted.

    Raises chat.ConversationError for another label than true and false.
    """
    label = row.get("label", True)
    found = str(label).lower()
    if found not in WANTED:
        raise chat.ConversationError(f"has the label {label!r}; allowed: true, false, 1, 0")
    return WANTED[found]


WANTED = {"true": True, "1": True, "false": False, "0": False}


def _split(tokenizer: Any, prompt: Sequence[chat.Message], answer: str) -> tuple[list[int], list[int]]:
    """Return the ids before the answer and the answer's own: the last run of the assistant's words, with its end."""
    found = chat.encode(tokenizer, [*prompt, {"role": "assistant", "content": answer}])
    if not any(found.assistant_mask):
        raise chat.ConversationError("has an empty answer")
    end = len(found.assistant_mask) - found.assistant_mask[::-1].index(True)
    start = next((at for at in range(end - 1, -1, -1) if not found.assistant_mask[at]), -1) + 1
    return found.input_ids[:start], found.input_ids[start:end]
