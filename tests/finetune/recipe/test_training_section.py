"""TrainingArguments' fields are known without importing it, exactly as it has them."""

from __future__ import annotations

import dataclasses

import pytest
from inline_snapshot import snapshot
from transformers import SchedulerType, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.training_args import OptimizerNames

from hf_mps.core.errors import UserError
from hf_mps.finetune.recipe import training_section

ALL_FIELDS = "next, to see all: hf-mps recipes keys RECIPE"


def test_the_parsed_fields_are_those_of_the_real_class() -> None:
    assert list(training_section.fields()) == [field.name for field in dataclasses.fields(TrainingArguments)]


def test_listed_values_are_those_of_the_real_enums() -> None:
    known = training_section.fields()
    for name, enum in (
        ("lr_scheduler_type", SchedulerType),
        ("eval_strategy", IntervalStrategy),
        ("save_strategy", SaveStrategy),
        ("optim", OptimizerNames),
    ):
        assert known[name].values == tuple(item.value for item in enum)


def test_every_default_of_the_real_class_is_accepted() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    plain = {
        name: value
        for name, value in defaults.items()
        if name not in training_section.ELSEWHERE and isinstance(value, (bool, int, float, str))
    }
    assert len(plain) > 50
    assert training_section.problems(plain) == []


def test_no_removed_name_is_a_field_and_every_refused_one_is() -> None:
    known = training_section.fields()
    assert not training_section.REMOVED.keys() & known.keys()
    assert training_section.ELSEWHERE.keys() <= known.keys()


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("evaluation_strategy", "eval_strategy"),
        ("warmup_ratio", "warmup_steps (a number below 1 is the share of all steps)"),
        ("no_cuda", "use_cpu"),
        ("group_by_length", "train_sampling_strategy: group_by_length"),
    ],
)
def test_a_removed_name_gets_its_replacement_named(key: str, instead: str) -> None:
    assert training_section.problems({key: 1}) == [(key, f"was removed in transformers 5; in its place: {instead}")]


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("learning_rat", 1, f"is not a field of TrainingArguments; {ALL_FIELDS}; did you mean 'learning_rate'?"),
        ("learning_rate", "fast", "is 'fast'; allowed: a number"),
        ("learning_rate", True, "is True; allowed: a number"),
        ("learning_rate", -1, "is -1; allowed: 0 or more"),
        ("learning_rate", float("nan"), "is nan; allowed: a finite number"),
        ("num_train_epochs", 0, "is 0; allowed: a number above 0"),
        ("per_device_train_batch_size", 2.5, "is 2.5; allowed: a whole number"),
        ("per_device_train_batch_size", 0, "is 0; allowed: 1 or more"),
        ("max_steps", 0, "is 0; allowed: 1 or more, or -1 for as many as num_train_epochs has"),
        ("max_steps", -7, "is -7; allowed: 1 or more, or -1 for as many as num_train_epochs has"),
        ("label_smoothing_factor", 2, "is 2; allowed: 0 or more and less than 1"),
        ("adam_beta1", 1, "is 1; allowed: 0 or more and less than 1"),
        ("adam_beta2", 1, "is 1; allowed: 0 or more and less than 1"),
        ("adam_epsilon", -1e-08, "is -1e-08; allowed: 0 or more"),
        ("bf16", "yes", "is 'yes'; allowed: true or false"),
        ("eval_strategy", "epochs", "is 'epochs'; allowed: no, steps, epoch; did you mean 'epoch'?"),
        ("eval_strategy", True, "is True; allowed: no, steps, epoch"),
        ("per_device_train_batch_size", 10**12, "is 1000000000000; allowed: up to 1,000,000"),
        ("output_dir", "x", "is not set here: it is a top-level key of a recipe: output_dir: PATH"),
        ("hub_token", "secret", "is not set here: a recipe holds no token; log in once with: hf auth login"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(key: str, value: object, problem: str) -> None:
    found = training_section.problems({key: value})
    # The number of fields is the installed version's.
    count = len(training_section.fields()) - len(training_section.ELSEWHERE)
    assert found == [(key, problem.replace("74 fields", f"{count} fields"))]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", 2e-5),
        ("learning_rate", 1),
        ("warmup_steps", 0.1),
        ("lr_scheduler_kwargs", {"num_cycles": 2}),
        ("report_to", ["tensorboard"]),
        ("tf32", None),
        ("trackio_static_space_id", False),
        ("lr_scheduler_type", "cosine"),
    ],
)
def test_a_right_value_passes(key: str, value: object) -> None:
    assert training_section.problems({key: value}) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("transformers", ("transformers/training_args_seq2seq.py", "Seq2SeqTrainingArguments")),
        (
            "sentence_transformers",
            ("sentence_transformers/sentence_transformer/training_args.py", "SentenceTransformerTrainingArguments"),
        ),
        ("trl", ("trl/trainer/dpo_config.py", "DPOConfig")),
        ("trl", ("trl/trainer/kto_config.py", "KTOConfig")),
        ("trl", ("trl/trainer/grpo_config.py", "GRPOConfig")),
        ("trl", ("trl/trainer/sft_config.py", "SFTConfig")),
    ],
)
def test_a_subclass_has_the_fields_of_its_bases_and_its_own(
    libraries: None, module: str, source: training_section.Source
) -> None:
    library = pytest.importorskip(module, reason=f"{module} is an optional dependency")
    real = [field.name for field in dataclasses.fields(getattr(library, source[1]))]
    assert set(training_section.fields(source)) == set(real)
    assert training_section.problems({"learning_rate": 1e-4}, source) == []
    words = f"is not a field of {source[1]}; {ALL_FIELDS}; did you mean 'learning_rate'?"
    assert training_section.problems({"learning_rat": 1}, source)[0][1] == words


def test_what_a_task_settles_itself_is_refused_with_the_place_to_say_it() -> None:
    source = ("transformers/training_args_seq2seq.py", "Seq2SeqTrainingArguments")
    settled = {"predict_with_generate": "the task's metrics need the generated texts"}
    assert training_section.problems({"predict_with_generate": False}, source, settled) == [
        ("predict_with_generate", snapshot("is not set here: the task's metrics need the generated texts"))
    ]


def test_a_library_that_is_not_installed_is_named_with_the_command() -> None:
    with pytest.raises(UserError, match=r"^no_such_library is not installed; next: pip install no_such_library$"):
        training_section.fields(("no_such_library/args.py", "Arguments"))


@pytest.fixture(params=["activation_checkpointing", "gradient_checkpointing"])
def theirs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one name of checkpointing that an installed transformers has: the newer, or the older as in 5.0."""
    name = str(request.param)
    known = {key: field for key, field in training_section.fields().items() if "checkpointing" not in key}
    known |= {key: training_section.Field(key, "bool") for key in (name,)}
    known |= {key: training_section.Field(key, "dict[str, Any] | None") for key in (f"{name}_kwargs",)}
    monkeypatch.setattr(training_section, "fields", lambda source=None: known)
    return name


def test_both_names_of_checkpointing_are_taken_and_become_the_installed_one(theirs: str) -> None:
    assert training_section.checkpointing() == theirs
    for said in ("activation_checkpointing", "gradient_checkpointing"):
        asked = {said: True, f"{said}_kwargs": {"use_reentrant": False}}
        assert training_section.problems(asked) == []
        assert training_section.installed(asked) == {theirs: True, f"{theirs}_kwargs": {"use_reentrant": False}}
        assert training_section.problems({said: "yes"}) == [(said, snapshot("is 'yes'; allowed: true or false"))]


def test_only_one_name_of_checkpointing_is_given(theirs: str) -> None:
    assert training_section.problems({"activation_checkpointing": True, "gradient_checkpointing": False}) == [
        (
            "activation_checkpointing",
            snapshot("is the newer name of gradient_checkpointing, which is here too; give one of them"),
        )
    ]
