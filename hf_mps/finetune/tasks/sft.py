"""Supervised fine-tuning of an instruction model: it learns the assistant's words in conversations and nothing else.

Distillation learns a larger model's next-token probabilities in place of the words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.recipe import schema, training_section
from hf_mps.finetune.stream.batches import Encoded, Making
from hf_mps.finetune.stream.files import Broken
from hf_mps.finetune.tasks import Dataset, Prepared, _language
from hf_mps.finetune.tasks._language import Asked, ChatTask, asked, learned
from hf_mps.finetune.text import chat, lengths, packing, tokens

ALPACA = ("instruction", "input", "output", "system")
ASK = "Say it in other words: "


class Columns(schema.Columns):
    """Either `messages`, or `instruction` and `output` with, where the data has it, `input`; `system` beside both."""

    messages: str | None = None
    """The column of conversations."""
    instruction: str | None = None
    """The column of the instruction."""
    input: str | None = None
    """The column of the instruction's input."""
    output: str | None = None
    """The column of the answer."""
    system: str | None = None
    """The column of the system's words."""

    def wrong(self) -> Iterator[str]:
        alpaca = [role for role in ALPACA if getattr(self, role)]
        if self.messages and (others := [role for role in alpaca if role != "system"]):
            yield f"has messages beside {', '.join(others)}; give one or the other"
        if not self.messages and alpaca and not (self.instruction and self.output):
            yield f"has {', '.join(alpaca)}; give instruction and output, or messages"

    def roles(self) -> dict[str, str]:
        """Return {role: column} of what is read; the column `messages` where the recipe names none."""
        said = {role: name for role in ("messages", *ALPACA) if (name := getattr(self, role))}
        return said or {"messages": "messages"}


class Data(schema.Data):
    """Adds the columns of the conversations."""

    STREAMS = True

    columns: Columns = Columns()


class Recipe(_language.Chat):
    """Adds predictions, and `packing`: none of the conversations in a row sees another."""

    data: Data
    generate: _language.Generate = _language.Generate()
    packing: bool | None = None
    """Whether several examples share a row; by default where that saves padding."""


class SFT(ChatTask[Recipe]):
    """Learns the assistant's words in conversations."""

    truth = ("output",)
    optional = ("input", "system")
    architectures: ClassVar[tuple[str, ...]] = ("ForCausalLM", "LMHeadModel")
    needs_template = True
    shows = "texts"

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        recipe = self.recipe
        chosen = self.measures()
        self.begin()
        tokenizer, longest = self.tokenizer, self.longest
        features = {split: self._tokenised(some) for split, some in rows.items()}
        counts = {split: tokens.counts(features[split]) for split in features}
        self.choices["learned"] = learned(rows, features)
        self.load_language()
        parts = self.by_token(chosen)
        # After the model is loaded: it decides whether rows can be packed.
        train, trained = features["train"], counts["train"]
        packed = packing.decide(recipe, recipe.packing, self.model, trained, longest)
        if packed.value:
            train = packing.Packed(train, trained, longest, tokenizer.pad_token_id)
            trained = [longest] * len(train)
            parts["arguments_defaults"]["per_device_train_batch_size"] = train.batch(training_section.DEFAULT_BATCH)
        of, grouped = ("validation", False) if packed.value else ("train", None)
        length = lengths.decide(recipe, counts, longest, of=of, grouped=grouped)
        if packed.value:
            length = Choice(length.value, f"of validation rows, which are not packed; {length.reason}")
        return self.made(
            splits={**features, "train": self._streamed(rows["train"], train, packed=packed.value)},
            collator=packing.Collator(length.value.collator(_language.Labelled(tokenizer), tokenizer)),
            choices={"packing": packed, "lengths": length, **self.choices},
            token_counts=trained,
            predict=self.answers_to(rows["validation"], recipe.generate.rows, conversation),
            **parts,
        )

    def _tokenised(self, rows: Rows) -> Dataset:
        """Return one split's conversations, with labels -100 for all but the assistant's words.

        Rows are cut to the longest length; a row without any of the assistant's words left is dropped.
        """
        if not getattr(self.tokenizer, "is_fast", False):
            told = "the model's tokenizer is no fast one (tokenizer.json), so words cannot be found in its tokens"
            raise UserError(told)
        tokenizer, longest = self.tokenizer, self.longest
        empty = f"no row holds a word of the assistant within max_length {longest}; give a longer one"

        def make(row: Mapping[str, Any], _: int) -> dict[str, list[int]] | None:
            return _encoded(tokenizer, longest, row)

        return self.mapped(rows, ("sft", longest), _language.LABELLED, make, empty)

    def _streamed(self, rows: Rows, sample: Any, *, packed: bool) -> Any:
        """Return the rows to train on: `sample`, or the stream of all rows where they have one, packed or not."""
        if rows.stream is None:
            return sample
        from hf_mps.finetune.stream import loader

        tokenizer, longest = self.tokenizer, self.longest  # not the task, whose model no worker needs

        def encode(some: Sequence[Mapping[str, Any]]) -> list[Encoded]:
            made: list[Encoded] = []
            for row in some:
                try:
                    example = _encoded(tokenizer, longest, row)
                    made.append([example] if example else [])
                except chat.ConversationError as error:
                    made.append(Broken(str(error)))
            return made

        def pack(examples: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
            fitted = packing.best_fit([len(one["input_ids"]) for one in examples], longest)
            return [[examples[place] for place in row] for row in fitted]

        making = Making(encode, longest, pack=pack if packed else None, filler=tokenizer.pad_token_id)
        return loader.train(rows, sample, making)

    def inputs(self, rows: Rows) -> list[Asked]:
        # Rows to be answered need no `output`, and a conversation in columns is not one without it.
        return asked(rows, lambda row: chat.without_answer(conversation({**row, "output": ""})))

    def generates(self) -> _language.Generate:
        return self.recipe.generate

    @staticmethod
    def smoke_row(recipe: Recipe, made: synthetic.MadeUp) -> dict[str, Any]:
        """Return a made-up sentence with another one as its answer."""
        asked, answer = synthetic.sentences(made.draw, 2)
        said = [{"role": "user", "content": ASK + asked}, {"role": "assistant", "content": answer}]
        return {"messages": said, "instruction": ASK + asked, "input": "", "output": answer, "system": ""}


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


class DistillRecipe(Recipe):
    """Adds the teacher to what sft has.

    `packing` is for rows whose prompts the model does not answer itself (`distillation.lmbda: 0`).
    """

    teacher: str
    """The model that is learned from: a hub id or a folder, with the same vocabulary."""
    distillation: Distillation = Distillation()

    def wrong(self) -> Iterator[str]:
        if self.packing and self.distillation.lmbda:
            told = "which has the model answer the prompt of each row; give distillation.lmbda: 0, or leave packing out"
            yield f"has packing and distillation.lmbda: {self.distillation.lmbda}, {told}"


class Distill(SFT):
    """Learns the teacher's probabilities of the assistant's words."""

    recipe_class = DistillRecipe
    architectures: ClassVar[tuple[str, ...]] = ()  # a saved model is one of sft's
    unsharded = "its teacher would stay whole on every rank"

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        self.refuse_without_trl()
        from hf_mps.finetune.models.distill_trainer import DistillTrainer

        recipe: Any = self.recipe
        if recipe.distillation.lmbda:
            self.recipe = recipe.model_copy(update={"packing": False})
        made = super().prepare(rows)
        source = self.checkpoint.beside(recipe.teacher)
        if source.tokenizer().get_vocab() != self.tokenizer.get_vocab():
            told = f"its tokenizer has other words than that of {recipe.model}, and they are compared word by word"
            raise UserError(f"teacher {recipe.teacher}: {told}; give a larger model of the same family: teacher=NAME")
        teacher, told_of = source.model(self.auto_class)
        made.choices["teacher"] = Choice(told_of.value, f"{told_of.reason}; it is asked, and does not learn")
        made.trainer = DistillTrainer
        made.trainer_settings |= {"ref_model": teacher, "distillation": recipe.distillation}
        return made

    def load_language(self, *, chunks: bool = False, **settings: Any) -> None:
        """Load the model with whole logits, which are compared."""
        super().load_language(chunks=chunks, **settings)


def conversation(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the conversation in one row's columns. Raises chat.ConversationError for a row that holds none."""
    first = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    if "messages" in row:
        said = chat.messages(row["messages"])
        return said if said[0]["role"] == "system" else [*first, *said]
    chat.refuse_other_than_text(row, ("instruction", "output"))
    # Alpaca's input comes after an empty line.
    asked = f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]
    return [*first, {"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]


def _encoded(tokenizer: Any, longest: int, row: Mapping[str, Any]) -> dict[str, list[int]] | None:
    """Return a row's tokens and labels; None where none of the assistant's words is within `longest`."""
    encoded = chat.encode(tokenizer, conversation(row))
    return chat.Encoded(encoded.input_ids[:longest], encoded.assistant_mask[:longest]).learned()
