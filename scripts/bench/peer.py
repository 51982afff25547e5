"""One side of compare_peers.py in this process: it trains, and writes what its clock has read.

python scripts/bench/peer.py SIDE FILE BEGAN DEVICE WORDS…    BEGAN is time.monotonic() when the command was given,
                                                              or "cpu": processor seconds of this process count

`script` runs a script with its words, `hf_mps` a recipe, `accelerate` and `lightning` are loops of this file around the
examples' own models and batches. All learn with the same settings as the Trainer's defaults: AdamW without decay, a
rate that falls to zero, gradients clipped at 1. Seconds of training run from the first batch to the end of each epoch's
last step, with the device's work done; evaluations are not among them.
"""

from __future__ import annotations

import argparse
import functools
import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


class Clock:
    """Seconds from the command to the end of the first step, of training, and the F1 at the end of each epoch."""

    def __init__(self, began: str, device: str) -> None:
        self._now = time.process_time if began == "cpu" else time.monotonic
        self._began = 0.0 if began == "cpu" else float(began)
        self.first_step: float | None = None
        self.seconds = 0.0
        self.steps = 0
        self.scores: list[tuple[float, float]] = []
        self._device = device
        self._mark: float | None = None
        self._peak = 0
        self._over = False

    def begin(self) -> None:
        """An epoch's first batch is about to be made."""
        if self._mark is None:
            self._mark = self._now()

    def step(self) -> None:
        """An optimizer step was given to the device."""
        self.steps += 1
        if self.first_step is None:
            self._synchronize()
            self.first_step = self._now() - self._began
        if self._device == "mps":
            import torch

            self._peak = max(self._peak, torch.mps.driver_allocated_memory())

    def epoch(self) -> None:
        """An epoch's last step was given to the device."""
        if self._mark is None:
            return
        self._synchronize()
        self.seconds += self._now() - self._mark
        self._mark = None

    def evaluated(self, f1: float | None) -> None:
        """The model was evaluated as it is at the end of an epoch."""
        if f1 is not None and not self._over:
            self.scores.append((self.seconds, f1))

    def over(self) -> None:
        """What is evaluated from here on is said twice."""
        self._over = True

    def figures(self) -> dict[str, Any]:
        """What is written."""
        return {
            "first_step": self.first_step,
            "seconds": self.seconds,
            "steps": self.steps,
            "scores": self.scores,
            "peak_memory_bytes": self._memory(),
        }

    def _synchronize(self) -> None:
        import torch

        if self._device != "cpu":
            getattr(torch, self._device).synchronize()

    def _memory(self) -> int:
        """CUDA counts its own, Metal is looked at after each step, the CPU's is the process's largest."""
        if self._device == "cuda":
            import torch

            return int(torch.cuda.max_memory_reserved())
        if self._device == "mps":
            return self._peak
        import resource

        unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, kilobytes on Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> int:
    """Train one side and write its figures."""
    side, file, began, device, *words = sys.argv[1:]
    clock = Clock(began, device)
    if device == "mps" and sys.platform != "darwin":
        import torch  # noqa: F401

        from hf_mps.metal import simulator

        simulator.load("1")  # with HF_MPS=0 nobody else does
    code = SIDES[side](words, clock, device)
    Path(file).write_text(json.dumps(clock.figures()), encoding="utf-8")
    return int(code or 0)


def script(words: list[str], clock: Clock, device: str) -> int:
    """A script as plain Python runs it; its Trainer tells the clock."""
    _listen(clock)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")
    return 0


def recipe(words: list[str], clock: Clock, device: str) -> int:
    """`hf-mps finetune` with its words."""
    _listen(clock)
    from hf_mps.cli.main import main as command

    return command(["finetune", *words])


def _listen(clock: Clock) -> None:
    """Let every Trainer of this process tell the clock, after its own callbacks."""
    from transformers.trainer_callback import CallbackHandler

    def told(name: str, tell: Any) -> None:
        stock = getattr(CallbackHandler, name)

        @functools.wraps(stock)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            answer = stock(self, *args, **kwargs)
            tell(args)
            return answer

        setattr(CallbackHandler, name, method)

    told("on_epoch_begin", lambda args: clock.begin())
    told("on_step_end", lambda args: clock.step())
    told("on_epoch_end", lambda args: clock.epoch())
    told("on_evaluate", lambda args: clock.evaluated(args[3].get("eval_f1")))
    told("on_train_end", lambda args: clock.over())


def _settings(words: list[str]) -> argparse.Namespace:
    """The words of the two loops of this file."""
    parser = argparse.ArgumentParser()
    for name in ("model_name_or_path", "train_file", "validation_file"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--learning_rate", type=float)
    for name in ("batch", "epochs", "seed", "max_length"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("bf16", "tf32"):
        parser.add_argument(f"--{name}", action="store_true")
    given = parser.parse_args(words)
    if given.tf32:
        import torch

        torch.set_float32_matmul_precision("high")
    given.per_device_train_batch_size = given.per_device_eval_batch_size = given.batch
    sys.path.insert(0, str(EXAMPLES))
    return given


def _rows(given: argparse.Namespace) -> tuple[Any, list[str], dict[Any, int]]:
    """The rows, the columns of their texts, and the ids of their labels."""
    import sources

    rows = sources.sentences("", given.train_file, given.validation_file)
    labels = sorted(set(rows["train"]["label"]))
    return rows, sources.sentence_columns(rows["train"]), {label: number for number, label in enumerate(labels)}


def _optimizer(model: Any, given: argparse.Namespace, steps: int, *, fused: bool = True) -> tuple[Any, Any]:
    """Trainer's defaults: AdamW in one kernel, and a rate that falls to zero."""
    import torch
    from transformers import get_scheduler

    made = torch.optim.AdamW(model.parameters(), lr=given.learning_rate, weight_decay=0.0, fused=fused)
    return made, get_scheduler("linear", made, num_warmup_steps=0, num_training_steps=steps)


def accelerate(words: list[str], clock: Clock, device: str) -> int:
    """A bare loop with Accelerate: dynamic padding, nothing read from the device while it trains."""
    given = _settings(words)
    import run_glue_no_trainer as example
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(cpu=device == "cpu", mixed_precision="bf16" if given.bf16 else "no")
    set_seed(given.seed)
    rows, columns, ids = _rows(given)
    tokenizer, model = example.build(given, (), len(ids))
    batches, validation = example.loaders(given, rows, tokenizer, columns, ids)
    optimizer, schedule = _optimizer(model, given, given.epochs * len(batches))
    model, optimizer, batches, validation, schedule = accelerator.prepare(
        model, optimizer, batches, validation, schedule
    )
    for _ in range(given.epochs):
        model.train()
        clock.begin()
        for batch in batches:
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            clock.step()
        clock.epoch()
        clock.evaluated(example.evaluate(accelerator, model, validation, len(ids))["f1"])
    return 0


def lightning(words: list[str], clock: Clock, device: str) -> int:
    """Lightning's Trainer around the example's module, with the others' settings."""
    given = _settings(words)
    import lightning as L
    import lightning_glue as example
    import torch
    from run_glue_no_trainer import evaluate

    L.seed_everything(given.seed, verbose=False)
    rows, columns, ids = _rows(given)
    tokenizer, model = example.build(given, (), len(ids))
    data = example.Sentences(rows, tokenizer, columns, ids, given.batch, given.max_length)
    total = given.epochs * len(data.train_dataloader())

    class Module(example.Classifier):
        """The example's, without a look at every loss."""

        def training_step(self, batch: dict, index: int) -> torch.Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            # Lightning refuses to clip for a fused optimizer under autocast (plugins/precision/amp.py).
            optimizer, schedule = _optimizer(self, given, total, fused=not given.bf16)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Watch(L.Callback):
        """Tells the clock, and scores each epoch."""

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            clock.begin()

        def on_train_batch_end(self, *_: Any) -> None:
            clock.step()

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            clock.epoch()
            moved = (trainer.strategy.batch_to_device(batch) for batch in data.val_dataloader())
            with trainer.precision_plugin.forward_context():
                clock.evaluated(evaluate(_Alone(), module.model, moved, len(ids))["f1"])
            module.model.train()

    trainer = L.Trainer(
        accelerator={"cuda": "gpu"}.get(device, device),
        devices=1,
        max_epochs=given.epochs,
        precision="bf16-mixed" if given.bf16 else "32-true",
        gradient_clip_val=1.0,
        callbacks=[Watch()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=Path.cwd(),
    )
    trainer.fit(Module(model, given.learning_rate), data.train_dataloader())
    return 0


class _Alone:
    """What the example's evaluation asks of Accelerate, in a single process."""

    def gather_for_metrics(self, pair: Any) -> Any:
        return pair


SIDES = {"script": script, "hf_mps": recipe, "accelerate": accelerate, "lightning": lightning}


if __name__ == "__main__":
    sys.exit(main())
