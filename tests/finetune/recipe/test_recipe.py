"""A recipe: every key known, none ignored, and each mistake told in one line that says where it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from inline_snapshot import snapshot

from hf_mps.core.errors import UserError
from hf_mps.finetune import tasks
from hf_mps.finetune.recipe import catalogue
from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.run import checks, run_dir
from tests.snapshots import masked

PLAIN = {
    "task": "text-classification",
    "model": "some/model",
    "data": {"files": {"train": "train.csv", "validation": "dev.csv"}},
}
TASKS = ", ".join(tasks.names())


def write(folder: Path, content: Any) -> str:
    """Write a recipe and return its path."""
    path = folder / "my.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return str(path)


def refused(folder: Path, content: Any, *overrides: str) -> str:
    """The one line that refuses a recipe, with its folder taken out."""
    with pytest.raises(UserError) as error:
        load_recipe(write(folder, content), overrides)
    text = str(error.value)
    assert "\n" not in text
    return text.replace(f"{folder}/", "")


def test_every_recipe_opens_with_purpose_expectation_command_override_and_hardware() -> None:
    for entry in catalogue.entries():
        text = entry.path.read_text(encoding="utf-8")
        assert entry.purpose
        for word in (
            "# Expected ",
            f"# Command    python -m hf_mps.finetune {entry.name}\n",
            "# Override ",
            "# Hardware ",
        ):
            assert word in text, entry.name


def test_other_values_make_another_recipe_of_the_same_file(tmp_path: Path) -> None:
    first = load_recipe(write(tmp_path, PLAIN), ["seed=3", "data.train=own.csv"])
    second = first.with_overrides({"seed": 4, "output_dir": "a b, c", "training.bf16": True})
    assert (first.recipe.seed, second.recipe.seed, second.recipe.output_dir) == (3, 4, "a b, c")
    assert first.changed == ("data.files.train", "seed")
    assert second.changed == ("data.files.train", "output_dir", "seed", "training.bf16")
    assert second.words[1:] == ("data.train=own.csv", "seed=4", 'output_dir="a b, c"', "training.bf16=true")
    assert load_recipe(second.given, second.words[1:]).recipe == second.recipe
    with pytest.raises(UserError, match=r"^command line: seed is 'x'; allowed: a whole number$"):
        first.with_overrides({"seed": "x"})
    with pytest.raises(UserError, match=r"^command line: seed\.a: seed is a value here \(4\), not a section"):
        second.with_overrides({"seed.a": 1})


def test_mrpc_is_as_hugging_face_documents_it() -> None:
    recipe = load_recipe("glue/mrpc").recipe
    assert recipe.model == "google-bert/bert-base-cased"
    assert (recipe.data.hub, recipe.data.config) == ("nyu-mll/glue", "mrpc")
    assert recipe.max_length == 128  # type: ignore[attr-defined]
    assert recipe.training == {"per_device_train_batch_size": 32, "learning_rate": 2e-5, "num_train_epochs": 3}


def test_a_recipe_is_found_by_name_or_by_path_and_the_nearest_name_is_offered() -> None:
    called = {"glue/mrcp": "glue/mrpc", "mrpc": "glue/mrpc", "GLUE/MRPC": "glue/mrpc", "quikstart": "quickstart"}
    for wrong, near in (called | {"ner": "token-classification/conll2003"}).items():
        with pytest.raises(UserError, match=f"^'{wrong}' is not a recipe; did you mean '{near}'\\?; allowed: "):
            load_recipe(wrong)
    with pytest.raises(UserError, match=r"^no/such.yaml: no such recipe file; next: hf-mps recipes list$"):
        load_recipe("no/such.yaml")


REMOVED = "link was removed: gradients are sent whole at every step; leave it out (in a script of your own, "


@pytest.mark.parametrize(
    ("changes", "words", "beginning", "end"),
    [
        ({"max_lenght": 3}, "", "my.yaml:5: max_lenght is not a key here; allowed: task, model, ", "'max_length'?"),
        (
            {"data": {**PLAIN["data"], "columns": {"txt": "a"}}},  # type: ignore[dict-item]
            "",
            "my.yaml:3: data.columns.txt is not a key here; allowed: text, text_pair, label; did you mean 'text'?",
            "",
        ),
        ({}, "training.learning_rat=1", "command line: training.learning_rat is not a field of TrainingArguments", ""),
        ({}, "sed=1", "command line: sed is not a key here; ", "; did you mean 'seed'?"),
        # What has no near name still leads to a page that lists what there is.
        ({}, "training.zzz=1", "command line: training.zzz is not a field", "hf-mps recipes keys text-classification"),
        ({}, "trainin.max_steps=1", "command line: trainin is not a key here; allowed: task, model, ", "'training'?"),
        (
            {"training": {"max_steps": 1}},
            'training={"max_steps":x}',
            "command line: training.max_steps is 'x'; allowed: a whole number",
            "",
        ),
        (
            {"seed": "x", "training": {"warmup_ratio": 0.1}},
            "",
            "my.yaml:6: seed is 'x'; allowed: a whole number (also wrong: training.warmup_ratio)",
            "",
        ),
        ({"metrics": ["acuracy"]}, "", "my.yaml:5: metrics has 'acuracy'; allowed: accuracy, ", "'accuracy'?"),
        ({"train_file": "a.csv"}, "", "my.yaml:7: train_file is not a key here", "; it is called data.files.train"),
        ({}, "seed=1 seed=2", "command line: seed is given twice; give it once", ""),
        ({}, "link.compression=bf16", f"command line: {REMOVED}", ""),
        ({"link": {"local_steps": 8}}, "", f"my.yaml:5: {REMOVED}", ""),
        ({}, "speedups=0", "command line: speedups is called optimizations now; next: optimizations=", ""),
        (
            {},
            "data.broken_rows=0",
            "command line: data.broken_rows is called data.max_bad_row_fraction now; next: ",
            "",
        ),
    ],
)
def test_a_key_that_is_wrong_is_told_by_its_place_with_the_right_one(
    tmp_path: Path, changes: dict[str, Any], words: str, beginning: str, end: str
) -> None:
    line = refused(tmp_path, PLAIN | changes, *words.split())
    assert line.startswith(beginning)
    assert line.endswith(end)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("training={1: 2}", "training.1 is not text; allowed: keys that are text (also wrong: training.1)"),
        ("data={1: 2}", "data.1 is not text; allowed: keys that are text"),
        ("expect={f1: {a: 1}}", "expect.f1 is a section; allowed: a number or a list, such as [a, b]"),
        ("metrics=[]", "metrics is []; allowed: at least 1 of them"),
        ("seed=-1", "seed is -1; allowed: 0 or more"),
        ("seed=true", "seed is true; allowed: a whole number"),
        ("model=", "model is empty; allowed: text"),
        ("fallback=x", "fallback is 'x'; allowed: a list, such as [a, b]"),
        ("training=", "training is empty; allowed: a section of keys, such as {a: b}"),
    ],
)
def test_a_value_of_the_wrong_kind_is_told_in_words_of_yaml(tmp_path: Path, override: str, line: str) -> None:
    assert refused(tmp_path, PLAIN, override) == f"command line: {line}"


def test_a_text_with_a_colon_is_a_text_and_a_mapping_stands_in_braces(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, PLAIN), ["model=translate: "]).recipe.model == "translate: "
    assert refused(tmp_path, PLAIN, "training=max_steps: 3") == snapshot(
        "command line: training is 'max_steps: 3'; allowed: a section of keys, such as {a: b}"
    )


def test_the_short_names_of_ones_own_data_are_offered_where_they_are_taken(tmp_path: Path) -> None:
    allowed = (
        "hub, config, revision, splits, files, field, header, folder, generated, sources, streaming, shuffle_buffer,"
        " max_bad_row_fraction, rows, hold_out, split_seed, columns, labels"
    )
    assert masked(refused(tmp_path, PLAIN, "data.txt=body"), allowed=allowed) == snapshot(
        "command line: data.txt is not a key here; allowed: <allowed>, separator, train, validation, test,"
        " text, text_pair, label; did you mean 'text'?"
    )
    assert masked(refused(tmp_path, {**PLAIN, "data": {**PLAIN["data"], "txt": "body"}}), allowed=allowed) == snapshot(
        "my.yaml:5: data.txt is not a key here; allowed: <allowed>, separator"
    )


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("", "my.yaml: a recipe is a mapping of keys to values, this file holds nothing"),
        ("- a\n", "my.yaml: a recipe is a mapping of keys to values, this file holds a list"),
        (
            "a: [1\n",
            "my.yaml:2: is not valid YAML: expected ',' or ']', but got '<stream end>'; allowed: a value of YAML, or a"
            " text in quotation marks",
        ),
        ("seed: 1\nseed: 2\n", "my.yaml:2: seed is given twice, first in line 1; give it once"),
        ("model: m\n", f"my.yaml: task is missing; allowed: {TASKS}"),
        ("task: text-clasification\n", None),
        ("a: &x {b: *x}\n", "my.yaml:1: is not valid YAML: *x contains itself; write it flatter"),
    ],
)
def test_a_malformed_recipe_is_refused(tmp_path: Path, content: str, line: str | None) -> None:
    if line is None:
        line = f"my.yaml:1: task is 'text-clasification'; allowed: {TASKS}; did you mean 'text-classification'?"
    assert refused(tmp_path, content) == line


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({}, "data has no source; give exactly one of hub, files, folder, generated, sources"),
        (
            {"hub": "a/b", "generated": "pairs"},
            "data has hub and generated; give exactly one of hub, files, folder, generated, sources",
        ),
        (
            {"generated": "pairs", "config": "x"},
            "data has config, which belongs to hub, beside generated; leave config out",
        ),
        ({"files": {"validation": "x.csv"}}, "data has no train split; give one"),
        (
            {"files": {"train": "x.csv"}},
            "data has no validation split; give one, or hold_out=0.1 to keep a tenth of the training rows for it",
        ),
        ({"generated": "pears"}, "data.generated is 'pears'; allowed: pairs; did you mean 'pairs'?"),
        (
            {"files": {"train": "a", "dev": "b"}},
            "data has no validation split; give one, or hold_out=0.1 to keep a tenth of the training rows for it"
            " (dev is a further split, measured after training)",
        ),
        (
            {"files": {"train": "a", "validation": "b", "Dev": "c"}},
            "data names a split 'Dev'; allowed: small letters, digits and underscores",
        ),
        (
            {"generated": "pairs", "field": "data"},
            "data has field, which belongs to files, beside generated; leave field out",
        ),
        (
            {"generated": "pairs", "splits": {"train": "a", "validation": "b"}},
            "data has splits, which belongs to hub and folder, beside generated; leave splits out",
        ),
    ],
)
def test_data_has_exactly_one_source(tmp_path: Path, data: dict[str, Any], problem: str) -> None:
    assert refused(tmp_path, {**PLAIN, "data": data}).partition(": ")[2] == problem


@pytest.mark.parametrize("name", [entry.name for entry in catalogue.entries()])
def test_two_roles_never_share_a_column_whatever_the_task(name: str) -> None:
    roles = load_recipe(name).recipe.data.columns.roles()
    first, *others = [role for role in roles if not role.startswith("choice_")]
    for other in others:
        with pytest.raises(UserError, match=rf"names one column for two roles \(.*{re.escape(roles[first])}.*\)"):
            load_recipe(name, [f"data.columns.{other}={roles[first]}"])


def test_values_are_yaml_1_2(tmp_path: Path) -> None:
    overrides = ("training.learning_rate=2e-5", "training.eval_strategy=no", "training.weight_decay=1E-2", "seed=010")
    resolved = load_recipe(write(tmp_path, PLAIN), overrides)
    assert resolved.recipe.training == {"learning_rate": 2e-5, "eval_strategy": "no", "weight_decay": 0.01}
    assert resolved.recipe.seed == 10


def test_an_override_is_split_at_the_first_equals_sign(tmp_path: Path) -> None:
    resolved = load_recipe(write(tmp_path, PLAIN), ["training.optim_args=a=1,b=2"])
    assert resolved.recipe.training["optim_args"] == "a=1,b=2"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("seed", "'seed' is not an override; allowed: key=value, for example training.learning_rate=2e-5"),
        (
            "model.size=3",
            "command line: model.size: model is a value here ('some/model'), not a section with keys;"
            " next: model=VALUE",
        ),
        ("seed=[1", None),
    ],
)
def test_a_wrong_override_is_refused(tmp_path: Path, override: str, line: str | None) -> None:
    line = line or (
        "command line: seed: '[1' is not valid YAML: expected ',' or ']', but got '<stream end>'; allowed: a value of"
        " YAML, or a text in quotation marks"
    )
    assert refused(tmp_path, PLAIN, override) == line


@pytest.mark.parametrize(
    ("override", "next_one"),
    [
        ("learning_rate=1e-4", "training.learning_rate=0.0001"),
        ("epochs=3", "training.num_train_epochs=3"),
        ("training.batch_size=8", "training.per_device_train_batch_size=8"),
        ("model_name_or_path=some/model", "model='some/model'"),
        ("train_file=a.csv", "data.train='a.csv'"),
        ("data.text_column=body", "data.text='body'"),
        ("max_train_samples=10", "data.rows.train=10"),
        ("data=a.csv", "data.train=a.csv"),
        ("data.files=a.csv", "data.train=a.csv"),
        ("device=cpu", "HF_MPS_DEVICE=cpu, or cuda or mps, before the command"),
    ],
)
def test_another_tools_name_of_a_key_is_answered_by_the_word_to_type(override: str, next_one: str) -> None:
    with pytest.raises(UserError) as refusal:
        load_recipe("text-classification", [override])
    assert str(refusal.value).endswith(f"; next: {next_one}")
    if not next_one.startswith("HF_MPS"):
        load_recipe("text-classification", shlex.split(next_one))


def test_a_key_that_this_task_does_not_have_is_not_offered() -> None:
    with pytest.raises(UserError) as refusal:
        load_recipe("sft/chat", ["label_column=x"])
    assert "next: data.label" not in str(refusal.value)


def test_a_file_without_a_key_is_answered_by_the_word_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.csv").write_text("text,label\na,b\n", encoding="utf-8")
    assert refused(tmp_path, PLAIN, "my.csv").endswith("allowed: key=value; next: data.train=my.csv")


def test_files_on_the_command_line_take_the_place_of_a_hub_data_set() -> None:
    resolved = load_recipe("glue/mrpc", ["data.files.train=a.csv", "data.files.validation=b.csv"])
    assert (resolved.recipe.data.hub, resolved.recipe.data.config, resolved.recipe.data.splits) == (None, None, None)
    assert resolved.recipe.data.files == {"train": "a.csv", "validation": "b.csv"}
    assert resolved.recipe.data.columns.text == "sentence1"  # type: ignore[attr-defined]


def test_row_limits_go_with_the_data_that_they_were_for() -> None:
    resolved = load_recipe("quickstart", ["data.hub=some/data"])
    assert resolved.recipe.data.rows.train is None


def test_a_folder_of_ones_own_brings_the_tasks_own_names_of_columns() -> None:
    assert load_recipe("image-classification").recipe.data.columns.label == "labels"  # type: ignore[attr-defined]
    resolved = load_recipe("image-classification", ["data.folder=photos"])
    assert resolved.recipe.data.columns.label == "label"  # type: ignore[attr-defined]
    resolved = load_recipe("image-classification", ["data.folder=photos", "data.label=kind"])
    assert resolved.recipe.data.columns.label == "kind"  # type: ignore[attr-defined]


def test_paths_in_a_file_are_relative_to_it_and_those_of_the_command_line_are_not(tmp_path: Path) -> None:
    resolved = load_recipe(write(tmp_path, PLAIN), ["data.files.validation=own.csv"])
    assert resolved.recipe.data.files == {"train": str(tmp_path / "train.csv"), "validation": "own.csv"}


CHAT = {"task": "sft", "model": "some/model", "data": {"folder": "rows", "columns": {"messages": "messages"}}}


@pytest.mark.parametrize(
    ("said", "found"),
    [("mine.jinja", "{folder}/mine.jinja"), ("plain", "plain"), ("/over/there.jinja", "/over/there.jinja")],
)
def test_a_chat_template_in_a_file_is_relative_to_it(tmp_path: Path, said: str, found: str) -> None:
    written = load_recipe(write(tmp_path, {**CHAT, "chat_template": said})).recipe
    assert written.chat_template == found.format(folder=tmp_path)  # type: ignore[attr-defined]
    typed = load_recipe(write(tmp_path, CHAT), [f"chat_template={said}"]).recipe
    assert typed.chat_template == said  # type: ignore[attr-defined]


def test_every_path_of_a_recipe_is_kept_whole_in_its_runs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "recipes/weights").mkdir(parents=True)
    content = {**CHAT, "model": "weights", "chat_template": "~/mine.jinja"}
    content["training"] = {"resume_from_checkpoint": "old/checkpoint-3"}
    monkeypatch.chdir(tmp_path)
    resolved = load_recipe(write(Path("recipes"), content))
    assert run_dir.stored_values(resolved) == {
        "task": "sft",
        "model": str(tmp_path / "recipes/weights"),
        "data": {"folder": str(tmp_path / "recipes/rows"), "columns": {"messages": "messages"}},
        "chat_template": str(tmp_path / "home/mine.jinja"),
        "training": {"resume_from_checkpoint": str(tmp_path / "recipes/old/checkpoint-3")},
    }


def test_validation_tells_of_a_chat_template_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "rows/train").mkdir(parents=True)
    (tmp_path / "rows/val").mkdir()
    (tmp_path / "mine.jinja").touch()
    path = write(tmp_path, {**CHAT, "chat_template": "mein.jinja"})
    assert [masked(str(problem), recipe=path, folder=tmp_path) for problem in checks.problems(path)] == [
        snapshot(
            "<recipe>:1: chat_template: <folder>/mein.jinja: there is no such file; did you mean 'mine.jinja'?;"
            " allowed: plain, a Jinja file"
        )
    ]
