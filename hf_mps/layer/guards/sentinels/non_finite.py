"""non-finite: a loss or gradient that is NaN or infinite is told once for each training, or ends the run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from hf_mps.core.errors import RunError
from hf_mps.core.patching import Put
from hf_mps.layer.guards.explicit_args import FILTER, TARGET, track, was_given
from hf_mps.layer.guards.sentinels.base import BEFORE_CHECKPOINTS, STOPS, StoppingSentinel
from hf_mps.layer.guards.sentinels.stream import STREAM

LOWER = "a lower learning rate"


class NonFinite(StoppingSentinel):
    """Looks at what Trainer logs, at once, and in every loop at what the stream reads.

    An unchanged script goes on, as it does without this layer: its author may look at the numbers himself, and one
    infinite loss need not harm any weight. Where a run is to stop (HF_MPS_SENTINELS=stop, the recipe runner), all that
    there is is read before a checkpoint, so that none holds weights of a training that has ended. A step that fp16's
    GradScaler skips is no sign; many in a row, all without a loss, are. Somebody who asks Trainer for
    logging_nan_inf_filter wants to go on.
    """

    name = "non-finite"
    what = "a loss or gradient norm that is NaN or infinite"
    why = f"warns once for each training, which goes on as without it; {STOPS}"
    patches = {
        TARGET: Put(track),
        # What Trainer logs, and before it and Accelerator write checkpoints.
        "transformers.trainer:Trainer.train": "_trained",
        "transformers.trainer:Trainer.log": "_logged",
        **BEFORE_CHECKPOINTS,
    }

    def look(self, series: Any, losses: Sequence[tuple[int, float]], norms: Sequence[tuple[int, float]]) -> None:
        """Tell the first that is NaN or infinite.

        Of several losses before one step, those whose gradients cannot be in it do not count: its norm is finite.
        """
        finite = {step for step, norm in norms if math.isfinite(norm)}
        passes = Counter(step for step, _ in losses)
        for what, values in (("loss", losses), ("gradient norm", norms)):
            for step, value in values:
                elsewhere = what == "loss" and passes[step] > 1 and step in finite
                if not math.isfinite(value) and not elsewhere:
                    self._tell(series, f"the {what} is {value} at optimizer step {step}", LOWER)
                    return

    def look_at_skipped(self, training: Any, losses: Sequence[float]) -> None:
        """Tell where none is finite: another scale cannot mend that, as it mends gradients."""
        if not any(map(math.isfinite, losses)):
            line = f"the loss is {losses[-1]} in {len(losses)} steps in a row, all of which GradScaler skipped"
            self._tell(training, line, f"bf16 in place of fp16, or {LOWER}")

    def _trained(self, stock: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if trainer.optimizer is not None:  # of an earlier training
            STREAM.begin(trainer.optimizer)
        self._told.discard(trainer)
        if _goes_on(trainer.args):
            with self.left_alone():
                return stock(trainer, *args, **kwargs)
        done = stock(trainer, *args, **kwargs)
        STREAM.read(trainer.optimizer)
        return done

    def _logged(self, stock: Callable[..., None], trainer: Any, logs: Any, *args: Any, **kwargs: Any) -> None:
        stock(trainer, logs, *args, **kwargs)
        arguments = trainer.args
        sign = None if arguments.device.type != "mps" or _goes_on(arguments) else _sign(arguments, trainer.state, logs)
        if sign:
            STREAM.ask(trainer.optimizer)
            advice = f"a lower learning_rate (now {arguments.learning_rate:g})"
            self._tell(STREAM.series(trainer.optimizer) or trainer, sign, advice)


def refuse(args: Any, state: Any, logs: dict[str, Any] | None, advice: str, optimizer: Any = None) -> None:
    """Raise RunError where Trainer logs a loss or gradient norm that is not finite, with `advice` what to do next.

    Or for the reason behind it, where the work of `optimizer` was lost on the GPU.
    """
    sign = _sign(args, state, logs or {})
    if sign:
        STREAM.ask(optimizer)
        raise RunError(f"{sign}; next: {advice}")


def _sign(args: Any, state: Any, logs: dict[str, Any]) -> str | None:
    """What Trainer logs that is not finite, in words.

    Under fp16 the losses alone count: a gradient norm may overflow there, and GradScaler skips that step.
    """
    for name in ("loss", "eval_loss") if args.fp16 else ("loss", "eval_loss", "grad_norm"):
        value = logs.get(name)
        if isinstance(value, Real) and not math.isfinite(value):
            return f"{name} is {value} at step {state.global_step} of {state.max_steps}"
    return None


def _goes_on(arguments: Any) -> bool:
    return bool(was_given(arguments, FILTER) and getattr(arguments, FILTER, False))


SENTINEL = NonFinite()
