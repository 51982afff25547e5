"""What the tasks share that read texts: one tokenizer, rows padded to a few lengths; and of encoders one model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hf_mps.core.choice import Choice
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.tasks import Prepared, R, Task
from hf_mps.finetune.text import lengths, tokens


class TokenTask(Task[R]):
    """A task whose rows are tokens."""

    longest_default: ClassVar[int] = lengths.DEFAULT
    """The most tokens of a row where the recipe does not say."""
    tokenizer: Any
    config: Any
    longest: int
    content: str
    """The tokenizer's digest."""
    length: Choice[lengths.Lengths]

    def read_by(self, tokenizer: Any, config: Any, chosen: Mapping[str, Any] | None = None) -> None:
        """Take the tokenizer, and settle the longest length of a row: that of `chosen` for a saved model.

        Raises UserError for a length that the model has not.
        """
        self.tokenizer, self.config, self.processing_class = tokenizer, config, tokenizer
        if chosen is None:
            self.longest = lengths.limit(self.recipe, tokenizer, config, self.longest_default)
        else:
            self.length = lengths.kept(self.recipe, chosen, tokenizer, config)
            self.longest = self.length.value.longest


class TextTask(TokenTask[R]):
    """A task of an encoder; `inputs` makes features of one tokenizer, which a collator of transformers pads."""

    collator_class: ClassVar[str] = "DataCollatorWithPadding"

    def tokenizer_of(self) -> Any:
        """Return the checkpoint's tokenizer."""
        return self.checkpoint.tokenizer()

    def begin(self, config: Any, chosen: Mapping[str, Any] | None = None) -> None:
        """Open the tokenizer, and settle the longest length of a row: that of `chosen` for a saved model."""
        self.read_by(self.tokenizer_of(), config, chosen)
        self.choices |= tokens.set_pad_token(self.tokenizer, config)
        # Before the tokenizer's first call, whose padding and truncation would be part of it.
        self.content = tokens.digest(self.tokenizer)

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        config = self.checkpoint.config()
        self.recall(config, chosen)
        self.begin(config, chosen)
        self.finish()
        return self.made()

    def recall(self, config: Any, chosen: Mapping[str, Any]) -> None:
        """Take what a saved model's run decided from its configuration or choices, as `open` has them."""

    def counts(self, features: Any) -> list[int]:
        """Return the length in tokens that each row of `features` is padded from."""
        return tokens.counts(features)

    def encoded(self, rows: Mapping[str, Rows]) -> tuple[dict[str, Any], list[int]]:
        """Return the features of each split, and the lengths of the training rows, from which all are chosen."""
        features = {split: self.inputs(some) for split, some in rows.items()}
        counts = {split: self.counts(some) for split, some in features.items()}
        self.length = lengths.decide(self.recipe, counts, self.longest)
        return features, counts["train"]

    def finish(self) -> None:
        """Load the model, and make the collator."""
        from transformers.data import data_collator

        self.load(self.config)
        self.choices = {"lengths": self.length, **self.choices}
        kind = getattr(data_collator, self.collator_class)
        self.collator = self.length.value.collator(kind(self.tokenizer), self.tokenizer)
