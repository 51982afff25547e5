"""Speech written by generation: transformers' Seq2SeqTrainer."""

from __future__ import annotations

from typing import Any

from transformers import Seq2SeqTrainer

from hf_mps.finetune.models.trainer_mixins import MeasuredBefore
from hf_mps.finetune.run.logging import errors_only


class SpeechTrainer(MeasuredBefore, Seq2SeqTrainer):  # type: ignore[misc]
    """Seq2SeqTrainer without the warnings that Whisper's generation draws from transformers' own."""

    def prediction_step(self, *arguments: Any, **settings: Any) -> Any:
        # Whisper's own generate hands transformers' a configuration and settings beside it, which is warned of.
        with errors_only():
            return super().prediction_step(*arguments, **settings)
