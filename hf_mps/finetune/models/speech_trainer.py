"""Speech written by generation: transformers' Seq2SeqTrainer, and the texts of what a model generated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import Seq2SeqTrainer

from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.media import transcripts
from hf_mps.finetune.models.language import decoded
from hf_mps.finetune.models.trainer_mixins import MeasuredBefore
from hf_mps.finetune.run.logging import errors_only
from hf_mps.metrics import Metrics


class SpeechTrainer(MeasuredBefore, Seq2SeqTrainer):  # type: ignore[misc]
    """Seq2SeqTrainer without the warnings that Whisper's generation draws from transformers' own."""

    def prediction_step(self, *arguments: Any, **settings: Any) -> Any:
        # Whisper's own generate hands transformers' a configuration and settings beside it, which is warned of.
        with errors_only():
            return super().prediction_step(*arguments, **settings)


@dataclass
class Transcriber:
    """Reads what was generated for the rows `kept` of a split, and measures it after `clean`."""

    rows: Rows
    kept: Sequence[int]
    seconds: Sequence[float]
    truths: Sequence[str]
    tokenizer: Any
    clean: Callable[[str], str]

    def measure(self, evaluated: Any, measured: Metrics) -> dict[str, float]:
        """Return the metrics of an evaluation's generated ids, shape (rows, tokens).

        Rows whose truth is nothing after `clean` are not measured: they hold no word to get wrong.
        """
        said = decoded(evaluated.predictions, self.tokenizer)
        pairs = [(self.clean(text), self.clean(truth)) for text, truth in zip(said, self.truths, strict=True)]
        answers, truths = zip(*(pair for pair in pairs if pair[1]), strict=True)
        return measured.compute(list(answers), list(truths))

    def lines(self, trainer: Any, features: Any) -> Iterator[dict[str, Any]]:
        """Yield the rows of predictions.csv."""
        said = decoded(trainer.predict(features).predictions, self.tokenizer)
        return transcripts.lines(self.rows, self.seconds, said, self.truths, kept=self.kept, clean=self.clean)
