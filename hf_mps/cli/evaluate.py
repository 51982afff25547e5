"""`hf-mps evaluate`."""

from __future__ import annotations

from typing import Any

from hf_mps.cli.options import Batch, Debug, Json, Overrides, SavedModel, SavedTask, deferred
from hf_mps.core import status
from hf_mps.core.errors import UserError


@deferred
def evaluate(
    run: SavedModel,
    overrides: Overrides = None,
    batch: Batch = None,
    task: SavedTask = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure a saved model by the metrics of its run; nothing is trained or written.

    Without further words it measures the validation rows of the run, and so prints the run's metrics again.
    data.validation=other.csv measures your own rows with labels, data.test=more.csv a further split.

    Example: `hf-mps evaluate runs/quickstart`
    """
    wrong = [word for word in overrides or () if "=" not in word]
    if wrong:
        raise UserError(f"'{wrong[0]}' is not KEY=VALUE; next, to measure a file: data.validation={wrong[0]}")
    from hf_mps.tools.saved.run import open_run

    saved = open_run(run, task)
    with status.shown("loading PyTorch …"):
        from hf_mps.tools.saved.evaluate import evaluate as measure

        measured = measure(saved, overrides or (), batch=batch)
    if json:
        from json import dumps

        from hf_mps.core.files import plain

        content: dict[str, Any] = {
            "run": measured.run.where,
            "task": measured.run.task,
            "device": measured.device,
            "choices": measured.choices,
            "main_metric": measured.main,
            "splits": {
                split: {"rows": measured.rows[split], "of": measured.where[split], "metrics": metrics}
                for split, metrics in measured.metrics.items()
            },
        }
        print(dumps(plain(content), indent=2, ensure_ascii=False))
        return
    from hf_mps.core.text import aligned, counted

    for split, metrics in measured.metrics.items():
        before = measured.of_the_run(split)
        heads = ("metric", split, *(("its run",) if before else ()))
        lines = [
            (name, f"{metrics[name]:.4f}", *((f"{before[name]:.4f}" if name in before else "",) if before else ()))
            for name in sorted(metrics, key=lambda name: (name != measured.main, name == "loss"))
        ]
        for line in aligned([heads, *lines], right=(1, 2)):
            print(line)
        print(f"rows  {counted(measured.rows[split], 'row')}, {measured.where[split]}")
