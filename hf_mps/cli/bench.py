"""`hf-mps bench`."""

from __future__ import annotations

import shlex
from pathlib import Path

from typer import Option

from hf_mps.cli.options import Json, Overrides, Task, Torch, deferred, recipe_names
from hf_mps.core.errors import UserError


@deferred
def bench(
    overrides: Overrides = None,
    recipe: str | None = Option(None, metavar="RECIPE", help="A recipe's unfused step.", autocompletion=recipe_names),
    model: str | None = Option(None, metavar="NAME", help="A model's step instead, with --task; needs no weights."),
    task: Task = None,
    quick: bool = Option(False, "--quick", help="Measure smaller batches, fewer times, in under two minutes."),
    launches: bool = Option(
        False, "--launches", help="Count launches, waits and copies of a training step instead of time."
    ),
    release: Torch = None,
    warm_up: int | None = Option(None, min=1, help="Steps before the measured ones. Default: 3; --quick 1."),
    repetitions: int | None = Option(None, min=3, help="Measured steps. Default: 10; --quick 3."),
    output: Path | None = Option(None, help="A new folder for the files. Default: runs/bench, or runs/bench-2 …"),
    sign: str | None = Option(None, metavar="NAME", help="Print one line for the collected benchmarks, in your NAME."),
    json: Json = False,
) -> None:
    """Measure how much faster the device trains and evaluates ResNet50, BERT and VGG16 than the CPU.

    These networks and batches are those of the announcement of Metal training. It writes a table, results.json and a
    chart, and marks the figures of a simulated device. Exit code 1 where a batch does not fit into memory.

    Example: `hf-mps bench --quick`
    """
    from hf_mps.tools.bench import Asked, run, run_count
    from hf_mps.tools.bench.cases import target_of

    timed_only = {"--output": output, "--sign": sign, "--warm-up": warm_up, "--repetitions": repetitions}
    unused = [name for name, value in timed_only.items() if value is not None]
    if launches and unused:
        raise UserError(f"{unused[0]} cannot be combined with --launches, which measures no time; give one")
    if release is not None and not launches:
        raise UserError("--torch works only with --launches; add --launches, or leave it out")
    words = {"--recipe": recipe, "--model": model, "--task": task, "--warm-up": warm_up, "--repetitions": repetitions}
    command = ["hf-mps", "bench", *(["--quick"] if quick else [])]
    command += [str(word) for pair in words.items() if pair[1] is not None for word in pair] + list(overrides or [])
    asked = Asked(shlex.join(command), target_of(recipe, model, task, overrides or []), quick, warm_up, repetitions)
    if launches:
        run_count(asked, release, as_json=json)
    else:
        run(asked, output, sign, as_json=json)
