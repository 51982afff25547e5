"""What the tasks share whose models are sentence-transformers'."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hf_mps.core.choice import Choice
from hf_mps.finetune.data.load import SPLITS, Rows
from hf_mps.finetune.models import embeddings
from hf_mps.finetune.tasks._base import CALLS_PARTS, SENTENCE_TRANSFORMERS, Prepared, Task
from hf_mps.finetune.text import lengths, tokens


class SentenceTask(Task):
    """A task that sentence-transformers trains."""

    library = SENTENCE_TRANSFORMERS
    arguments_source = embeddings.ARGUMENTS
    settled: ClassVar[Mapping[str, str]] = embeddings.SETTLED
    unsharded = CALLS_PARTS
    trainer = staticmethod(embeddings.apart)
    recipe: Any
    length: Choice[lengths.Lengths]

    def begin(self, opened: tuple[Any, Choice[str]], chosen: Mapping[str, Any] | None = None) -> None:
        """Take the opened model and its description, and settle the longest length: that of `chosen` where saved."""
        self.model, self.choices["model"] = opened
        self.tokenizer = self.processing_class = self.model.tokenizer
        config = self.checkpoint.config()
        if chosen is None:
            self.longest = lengths.limit(self.recipe, self.tokenizer, config)
        else:
            self.length = lengths.kept(self.recipe, chosen, self.tokenizer, config)
            self.longest = self.length.value.longest

    def choose_lengths(self, counts: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Choose what batches are padded to, from the tokens of each text of each row."""
        flat = {split: list(itertools.chain(*some)) for split, some in counts.items()}
        others = itertools.chain(*flat.values())
        self.length = lengths.decide(self.recipe, flat["train"], self.longest, others=others, grouped=False)


class EmbeddingTask(SentenceTask):
    """A task whose model makes a vector of each text."""

    batch = embeddings.BATCH
    optional = ("text_pair",)

    def encoder(self) -> Any:
        """Return the model, with its own pooling or else sentence-transformers' default."""
        return self.checkpoint.of_sentence_transformers(self.auto_class, self.device)

    def open_encoder(self, chosen: Mapping[str, Any] | None = None) -> None:
        """Load and describe the model, and settle its longest length."""
        model = self.encoder()
        count = sum(parameter.numel() for parameter in model.parameters())
        parts = " + ".join(type(part).__name__ for part in model)
        self.begin((model, Choice(self.checkpoint.name, f"{parts}, {count / 1e6:.1f} M parameters")), chosen)
        self.model.max_seq_length = self.longest

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        embeddings.library(self.name)
        self.open_encoder(chosen)
        self._collate()
        return self.made()

    def encoded(
        self, rows: Mapping[str, Rows], span: tuple[float, float] = (0.0, 1.0)
    ) -> tuple[dict[str, Any], list[int]]:
        """Return the texts of each split with their scores, and the tokens of each training row's longest text."""
        roles = [role for role in self.recipe.data.columns.roles() if role != "score"]
        made = {split: embeddings.encoded(rows[split], self.tokenizer, self.longest, roles, span) for split in rows}
        counts = {split: made[split]["lengths"][:] for split in made}
        self.choose_lengths(counts)
        self._collate()
        columns = [
            *(embeddings.NAMES[role] for role in roles),
            *(["score"] if "score" in made["train"].features else []),
        ]
        data = {split: made[split].select_columns(columns) for split in SPLITS}
        return data, [max(row) for row in counts["train"]]

    def _collate(self) -> None:
        self.collator = embeddings.collator(self.model, self.length.value, self.recipe.training.get("prompts"))

    def inputs(self, rows: Rows) -> dict[str, list[str]]:
        """Return the texts of `rows` by their roles: alone, or in pairs."""
        roles = [role for role in ("text", "text_pair") if role in rows.dataset.column_names]
        tokens.refuse_other_than_text(rows, roles)
        every = range(len(rows.dataset))
        return {role: tokens.texts(rows, role, {role: rows.dataset[role][:]}, every) for role in roles}

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Any:
        """Yield what the model makes of each row; after a training `inputs` are the evaluator of all rows."""
        if isinstance(inputs, embeddings.EmbeddingEvaluator):
            return inputs.rows(trainer.model)
        return self.compared(trainer, inputs)

    def compared(self, trainer: Any, texts: Mapping[str, Sequence[str]]) -> Any:
        """Yield an answer for each text alone or each pair of texts."""
        raise NotImplementedError
