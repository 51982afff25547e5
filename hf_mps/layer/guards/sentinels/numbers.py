"""Sentinels of a training's numbers.

non-finite: a loss or gradient that is NaN or infinite is told once for each training, or ends the run.
gradient-norm: a gradient norm out of all proportion to those before it.
loss-frozen: a loss that agrees to the last bit for many steps, of a training that has not come to rest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any
from weakref import WeakKeyDictionary

from hf_mps.core.errors import RunError
from hf_mps.core.patching import Put
from hf_mps.layer.guards.base import then
from hf_mps.layer.guards.explicit_args import FILTER, TARGET, track, was_given
from hf_mps.layer.guards.sentinels.stream import BEFORE_CHECKPOINTS, STOPS, STREAM, Sentinel, StoppingSentinel

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
        "transformers.trainer:Trainer.log": then("_logged"),
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

    def _logged(self, trainer: Any, logs: Any, *_: Any, **__: Any) -> None:
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
    """Return what Trainer logs that is not finite, in words."""
    # A gradient norm may overflow under fp16, where GradScaler skips that step.
    for name in ("loss", "eval_loss") if args.fp16 else ("loss", "eval_loss", "grad_norm"):
        value = logs.get(name)
        if isinstance(value, Real) and not math.isfinite(value):
            return f"{name} is {value} at step {state.global_step} of {state.max_steps}"
    return None


def _goes_on(arguments: Any) -> bool:
    return bool(was_given(arguments, FILTER) and getattr(arguments, FILTER, False))


NON_FINITE = NonFinite()


HISTORY = 8
"""Norms before the first that is judged."""
TIMES = 100.0
"""How many times the largest norm before.

MiniLM on MRPC stayed below 2 times in four trainings of 100 to 300 steps, one of them on 96 rows that it learned by
heart, one at a learning rate of 1e-3 (scripts/bench/bench_sentinels.py --norms); pytorch#177116 makes 1e3 to 1e5 times.
"""


@dataclass
class _History:
    count: int = 0
    largest: float = 0.0
    told: bool = False


class GradientNorm(Sentinel):
    """Compares each norm with the largest before it, not with their median.

    A model that has learned its rows has norms near zero and then, at a row it has not, one as in its first steps:
    many times the median, and no fault.
    """

    name = "gradient-norm"
    what = f"a gradient norm more than {TIMES:.0f} times the largest of all before it, after at least {HISTORY}"
    why = (
        "warns, because a row that is far off can do it too; scripts/bench/bench_sentinels.py measures how far real"
        " training stays below"
    )

    def reset(self) -> None:
        """Also forget every training."""
        self._histories: WeakKeyDictionary[Any, _History] = WeakKeyDictionary()

    def look(self, series: Any, losses: Sequence[tuple[int, float]], norms: Sequence[tuple[int, float]]) -> None:
        """Judge each new norm, in their order."""
        history = self._histories.setdefault(series, _History())
        for step, norm in norms:
            if not math.isfinite(norm):  # another sentinel's business
                continue
            known = history.count >= HISTORY and history.largest > 0
            if known and norm > TIMES * history.largest and not history.told:
                history.told = True
                self.acted(
                    f"the gradient norm was {norm:.3g} at optimizer step {step}, {norm / history.largest:,.0f} times"
                    f" the largest of the {history.count} before it; next: a look at that batch's rows,"
                    " and hf-mps parity: does the device compute what the CPU does?"
                )
            history.count += 1
            history.largest = max(history.largest, norm)


FROZEN_TIMES = 30
FIRST = 8
"""Losses of a training that say where it began."""
LEARNED = 1e-3
"""Share of the first losses, and of the largest gradient norm, from which on a training has come to rest.

What learns nothing keeps both: its loss stays where it was, and its gradients are as large as before or were never
there. A batch learned by heart brings the loss to what its dtype can tell from zero, 1e-7 for a cross-entropy in
float32 and 1e-14 for a squared error; a minimum above zero brings the gradient there.
"""
STEPS_OF_DTYPE = 8
"""Losses of that many times the dtype's own resolution are learned too: bfloat16 tells 0.06 from no less."""


@dataclass
class _Run:
    value: float = math.nan
    length: int = 0
    told: bool = False
    seen: int = 0
    first: float = 0.0
    largest_norm: float = 0.0
    last_norm: float = math.nan

    def at_rest(self, resolution: float) -> bool:
        """Return whether the training has arrived: at a small share of its first losses, or at one of its gradients."""
        learned = abs(self.value) <= max(LEARNED, STEPS_OF_DTYPE * resolution) * self.first
        # A gradient of exactly zero is no minimum that rounding reaches: nothing comes through any more.
        flat = 0 < self.last_norm <= LEARNED * self.largest_norm
        return learned or (flat and abs(self.value) < self.first)


class LossFrozen(Sentinel):
    """Counts backward passes in a row whose losses are one number; a loss of exactly zero is learned, not frozen."""

    name = "loss-frozen"
    what = f"a loss that agrees to the last bit in {FROZEN_TIMES} backward passes in a row, of a training not at rest"
    why = (
        f"warns, because some losses are made so; at rest is a training at {LEARNED:g} of its first losses or of its"
        " largest gradient norm"
    )

    def reset(self) -> None:
        """Also forget every training."""
        self._runs: WeakKeyDictionary[Any, _Run] = WeakKeyDictionary()

    def look(self, series: Any, losses: Sequence[tuple[int, float]], norms: Sequence[tuple[int, float]]) -> None:
        """Count on."""
        run = self._runs.setdefault(series, _Run())
        for _, norm in norms:
            run.largest_norm, run.last_norm = max(run.largest_norm, norm), norm
        for step, loss in losses:
            if run.seen < FIRST and math.isfinite(loss):
                run.first = max(run.first, abs(loss))
            run.seen += 1
            run.length = run.length + 1 if loss == run.value else 1
            run.value = loss
            if run.length == FROZEN_TIMES and loss != 0 and not run.told and not run.at_rest(series.resolution):
                run.told = True
                self.acted(
                    f"the loss was {loss:.9g} in {FROZEN_TIMES} backward passes in a row, up to optimizer step {step}:"
                    " it agrees to the last bit, so nothing is learned; next: see that weights require gradients, the"
                    " learning rate is above 0 and batches reach the device whole"
                )
