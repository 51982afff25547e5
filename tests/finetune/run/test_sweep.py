"""`--sweep`: every combination once, compared over seeds, whatever one of them does."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from hf_mps.cli.finetune import swept
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import load
from hf_mps.finetune.recipe import resolve
from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.run import runner
from hf_mps.finetune.run.sweep import plan_sweep
from tests.finetune import tiny
from tests.finetune.tiny import Command

SHORT = ("my.yaml", "training.max_steps=2")


def said(place: Path) -> dict[str, Any]:
    return json.loads((place / "sweep.json").read_text(encoding="utf-8"))


def test_each_combination_runs_once_and_seeds_are_averaged(desk: Path, finetune: Command) -> None:
    ended = finetune(*SHORT, "--sweep", "training.learning_rate=1e-3,1e-2", "seed=1,2").finished()
    place = desk / "runs/my-sweep"
    folders = [f"learning_rate={rate},seed={seed}" for rate in ("1e-3", "1e-2") for seed in (1, 2)]
    assert sorted(path.name for path in place.iterdir()) == sorted([*folders, "sweep.csv", "sweep.json"])
    losses = {}
    for name in folders:
        results = json.loads((place / name / "results.json").read_text(encoding="utf-8"))
        assert results["recipe"]["training"]["learning_rate"] == float(name.partition("=")[2].partition(",")[0])
        losses[name] = results["metrics"]["loss"]
    assert len(set(losses.values())) == 4
    groups = said(place)["groups"]
    assert [group["values"] for group in groups] == [
        {"training.learning_rate": "1e-3"},
        {"training.learning_rate": "1e-2"},
    ]
    for group, names in zip(groups, (folders[:2], folders[2:]), strict=True):
        numbers = [losses[name] for name in names]
        assert group["runs"] == 2
        assert group["metrics"]["loss"]["mean"] == pytest.approx(sum(numbers) / 2)
        assert group["metrics"]["loss"]["deviation"] == pytest.approx(statistics.stdev(numbers))
        assert f"{sum(numbers) / 2:.4f} ± {statistics.stdev(numbers):.4f}" in ended.out
    with (place / "sweep.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["training.learning_rate"], row["seed"], row["state"]) for row in rows] == [
        (rate, seed, "finished") for rate in ("1e-3", "1e-2") for seed in ("1", "2")
    ]
    assert [float(row["loss"]) for row in rows] == [losses[name] for name in folders]
    assert "hf_mps sweep of my: 4 runs (simulated)\n" in ended.out
    assert {row["simulated"] for row in rows} == {"True"}
    assert all(one["simulated"] is True for one in said(place)["runs"])

    # The same call repeats nothing; one more value runs it alone.
    written = {path: path.stat().st_mtime_ns for path in place.glob("*/results.json")}
    assert finetune(*SHORT, "--sweep", "training.learning_rate=1e-3,1e-2", "seed=1,2,3").code == 0
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert [group["runs"] for group in said(place)["groups"]] == [3, 3]


def test_a_failed_run_does_not_stop_the_others(desk: Path, finetune: Command) -> None:
    ended = finetune(*SHORT, "training.max_grad_norm=0", "--sweep", "training.learning_rate=1e38,1e-3")
    assert ended.code == 1
    assert ended.err.startswith("hf-mps: 1 of 2 runs failed, first training.learning_rate=1e38: loss is nan at step 2")
    assert ended.err.count("\n") == 1
    runs = said(desk / "runs/my-sweep")["runs"]
    assert [run["state"] for run in runs] == ["failed", "finished"]
    assert runs[0]["error"].startswith("loss is nan at step 2")
    assert runs[1]["metrics"]["f1"] >= 0


def test_a_sweep_that_was_stopped_goes_on(desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    train = runner.train

    def stopped(resolved: Any, *given: Any, **settings: Any) -> Any:
        if resolved.recipe.seed == 2:
            raise runner.Interrupted("interrupted")
        return train(resolved, *given, **settings)

    monkeypatch.setattr(runner, "train", stopped)
    ended = finetune(*SHORT, "--sweep", "seed=1,2")
    assert (ended.code, ended.err) == (
        130,
        snapshot(
            "hf-mps: interrupted after 1 of 2 runs; to go on: hf-mps finetune my.yaml training.max_steps=2 --sweep"
            " seed=1,2\n"
        ),
    )
    assert [run["state"] for run in said(desk / "runs/my-sweep")["runs"]] == ["finished", "not run"]
    monkeypatch.setattr(runner, "train", train)
    no_process = 2**22 + 1  # Linux's numbers end before
    half = tiny.write_jsonl(desk / f"runs/my-sweep/.sweep.csv.{no_process}-0a1b2c3d.tmp", [])
    ended = finetune(*SHORT, "--sweep", "seed=1,2")
    assert (ended.code, half.exists()) == (0, False)
    assert "seed=1 holds this recipe's finished run" in ended.out
    assert [run["state"] for run in said(desk / "runs/my-sweep")["runs"]] == ["finished", "finished"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("seed",), None),
        (("seed=",), "--sweep '' has an empty value between commas; allowed: VALUE,VALUE"),
        (("seed=1,,2",), "--sweep '1,,2' has an empty value between commas; allowed: VALUE,VALUE"),
        (("seed=1", "seed=2"), "--sweep seed is given twice; give it once"),
        (("training.max_steps=1,2",), "--sweep training.max_steps is given twice; give it once"),
        (("output_dir=a,b",), "--sweep output_dir: every run gets its own folder below it; give output_dir=PATH"),
        (("sed=1,2",), None),
        (("seed=1,x",), "command line: seed is 'x'; allowed: a whole number"),
    ],
)
def test_axes_that_cannot_be_are_refused_before_the_first_run(
    desk: Path, finetune: Command, words: tuple[str, ...], line: str | None
) -> None:
    ended = finetune(*SHORT, "--sweep", *words)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.count("\n") == 1
    assert line is None or ended.err == f"hf-mps: {line}\n"
    assert not (desk / "runs").exists()


def test_a_changed_recipe_is_refused_before_the_first_run(desk: Path, finetune: Command) -> None:
    assert finetune(*SHORT, "--sweep", "seed=1").code == 0
    ended = finetune("my.yaml", "training.max_steps=3", "--sweep", "seed=1")
    assert (ended.code, ended.out) == (2, "")
    assert (
        "holds a finished run of a recipe that has changed since: training.max_steps 2 → 3; next: hf-mps" in ended.err
    )
    assert " --fresh --sweep " in ended.err
    assert finetune("my.yaml", "training.max_steps=3", "--sweep", "seed=1", "--fresh").code == 0
    assert (desk / "runs/my-sweep-2/seed=1/results.json").is_file()


def test_a_sweep_of_other_values_leaves_the_first_ones_table_as_it_is(desk: Path, finetune: Command) -> None:
    assert finetune(*SHORT, "--sweep", "seed=1").code == 0
    kept = (desk / "runs/my-sweep/sweep.json").read_bytes()
    other = ("--sweep", "training.learning_rate=1e-3")
    assert finetune(*SHORT, *other).code == 0
    assert (desk / "runs/my-sweep/sweep.json").read_bytes() == kept
    assert [run["values"] for run in said(desk / "runs/my-sweep-2")["runs"]] == [{"training.learning_rate": "1e-3"}]
    assert plan_sweep(load_recipe(SHORT[0], SHORT[1:]), ["seed=1,2"]).folder == Path("runs/my-sweep")
    assert plan_sweep(load_recipe(SHORT[0], SHORT[1:]), other[1:]).folder == Path("runs/my-sweep-2")
    assert finetune(*SHORT, "output_dir=runs/my-sweep", *other).refused() == snapshot(
        "output_dir runs/my-sweep holds a sweep of other values (seed=1); next: hf-mps finetune my.yaml"
        " training.max_steps=2 output_dir=runs/my-sweep --fresh --sweep training.learning_rate=1e-3"
    )
    ended = finetune(*SHORT, "output_dir=runs/my-sweep", "--sweep", "seed=1..5")
    assert ended.refused() == "command line: seed is '1..5'; allowed: a whole number"


def test_equal_runs_have_no_best_one(desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_mps.finetune.run import runner

    outcomes = {1e-3: 0.5, 1e-2: 0.5, 1e-1: 0.75}

    def trained(resolved: Any, *_: Any) -> dict[str, Any]:
        value = outcomes[resolved.recipe.training["learning_rate"]]
        return {"metrics": {"f1": value}, "train_seconds": 1.0, "main_metric": "f1", "greater_is_better": True}

    monkeypatch.setattr(runner, "train", trained)
    for rates, best in (("1e-3,1e-2", []), ("1e-3,1e-2,1e-1", ["1e-1"])):
        out = finetune(*SHORT, "--sweep", f"training.learning_rate={rates}").finished().out
        assert [line.split()[0] for line in out.splitlines() if line.endswith("best")] == best


def test_a_value_with_commas_of_its_own_stays_whole(desk: Path) -> None:
    sweep = plan_sweep(load_recipe("my.yaml"), ["metrics=[f1, accuracy],accuracy", 'data.columns.text="first",third'])
    assert [one.values["metrics"] for one in sweep.runs] == ["[f1, accuracy]"] * 2 + ["accuracy"] * 2
    assert sweep.runs[0].resolved.recipe.metrics == ["f1", "accuracy"]
    assert len({one.folder for one in sweep.runs}) == 4


def test_long_values_that_differ_at_their_ends_have_two_folders(desk: Path) -> None:
    layers = ", ".join(f"model.layers.{number}.self_attn.q_proj" for number in range(8))
    axis = ",".join(f"{{target_modules: [{layers}], r: {rank}}}" for rank in (8, 16))
    sweep = plan_sweep(load_recipe("sft/alpaca"), [f"lora={axis}"])
    first, second = (one.folder.name for one in sweep.runs)
    assert first != second
    assert len(first) == len(second) == 120


def test_a_sweep_reads_its_recipe_once(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = load_recipe("my.yaml", ["data.text=first"])
    monkeypatch.setattr(resolve, "read_yaml", None)
    sweep = plan_sweep(resolved, ["seed=1,2", "training.learning_rate=1e-3"])
    assert [one.resolved.recipe.seed for one in sweep.runs] == [1, 2]
    assert sweep.runs[0].resolved.words == (
        *("my.yaml", "data.text=first", "seed=1", "training.learning_rate=1e-3"),
        'output_dir="runs/my-sweep/seed=1,learning_rate=1e-3"',
    )
    with pytest.raises(UserError, match=r"^--sweep data\.columns\.text is given twice; give it once$"):
        plan_sweep(resolved, ["data.columns.text=a,b"])


def test_the_words_behind_the_option_are_its_own() -> None:
    typed = ["finetune", "a", "x=1", "--sweep", "seed=1,2", "y=3,4", "--fresh", "z=5"]
    assert swept(typed) == [*("finetune", "a", "x=1", "--sweep", "seed=1,2", "--sweep", "y=3,4", "--fresh", "z=5")]
    scripts = ["audit", "--", "python", "train.py", "--sweep", "seed=1,2", "y=3,4"]
    assert swept(scripts) == scripts


def test_a_sweep_over_seeds_compares_them_on_the_same_held_out_rows(desk: Path) -> None:
    words = ["data.hold_out=0.2"]

    def held_out(*more: str) -> list[list[str]]:
        runs = plan_sweep(load_recipe("my.yaml", [*words, *more]), ["seed=1,2"]).runs
        recipes = [one.resolved.recipe for one in runs]
        rows = [load.load(recipe.data, recipe.seed)["validation"].dataset for recipe in recipes]
        assert [recipe.seed for recipe in recipes] == [1, 2]
        return [[json.dumps(row) for row in one] for one in rows]

    first, second = held_out()
    assert first == second
    other, again = held_out("data.split_seed=7")
    assert other == again != first
    alone = load_recipe("my.yaml", [*words, "seed=2"]).recipe
    assert [json.dumps(row) for row in load.load(alone.data, alone.seed)["validation"].dataset] != first


def test_values_that_differ_in_what_a_folder_name_cannot_hold_have_folders_each(desk: Path) -> None:
    (desk / "x_y").mkdir()
    axis = "data.columns.text=a/b,a b,a_b,A_b"
    folders = [run.folder.name for run in plan_sweep(load_recipe("my.yaml"), [axis]).runs]
    assert folders[0] == "text=a_b"
    assert len({name.casefold() for name in folders}) == 4
    assert [run.folder.name for run in plan_sweep(load_recipe("my.yaml"), [axis]).runs] == folders
