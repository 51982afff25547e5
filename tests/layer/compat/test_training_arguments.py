"""TrainingArguments and HfArgumentParser take what transformers 4 had, in every way that arguments come."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from inline_snapshot import snapshot
from transformers import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments
from transformers.integrations import integration_utils

from hf_mps.layer.compat import training_arguments
from tests.layer.compat.arming import arm
from tests.snapshots import masked


@dataclass
class Own:
    """A script's own arguments, one of which has a removed name."""

    fp16_backend: str = field(default="mine")
    max_seq_length: int = field(default=5)


@dataclass
class More(TrainingArguments):
    """A script's own training arguments, one of which has a removed name."""

    logging_dir: str = field(default="here")
    mixture: float = field(default=0.5)


def parser(*kinds: Any) -> HfArgumentParser:
    return HfArgumentParser(kinds, allow_abbrev=True)


def test_a_command_line_of_transformers_4_is_parsed(said, tmp_path: Path) -> None:
    line = (
        f"--output_dir {tmp_path} --evaluation_strategy=epoch --no_cuda --per_gpu_train_batch_size 4 --optim adamw_hf"
    )
    (got,) = parser(TrainingArguments).parse_args_into_dataclasses(line.split())
    assert (got.eval_strategy, got.use_cpu, got.per_device_train_batch_size) == ("epoch", True, 4)
    assert got.optim == "adamw_torch"
    assert said() == snapshot(
        [
            "--evaluation_strategy epoch: --eval_strategy epoch takes its place",
            "--no_cuda: --use_cpu takes its place",
            "--per_gpu_train_batch_size 4: --per_device_train_batch_size 4 takes its place",
            "--optim adamw_hf: --optim adamw_torch takes its place",
        ]
    )


def test_a_line_of_today_is_parsed_without_a_word(said, tmp_path: Path) -> None:
    line = f"--output_dir {tmp_path} --eval_strategy epoch --optim sgd --do_train"
    (got,) = parser(TrainingArguments).parse_args_into_dataclasses(line.split())
    assert (got.eval_strategy, got.optim, got.do_train) == ("epoch", "sgd", True)
    assert said() == []


def test_a_name_that_the_script_defines_itself_is_its_own(said, tmp_path: Path) -> None:
    line = ["--fp16_backend", "x", "--output_dir", str(tmp_path)]
    own, got = parser(Own, Seq2SeqTrainingArguments).parse_args_into_dataclasses(line)
    assert (own.fp16_backend, got.fp16) == ("x", False)
    more = More(output_dir=str(tmp_path), logging_dir="there", evaluation_strategy="epoch")
    assert (more.logging_dir, more.eval_strategy, more.mixture) == ("there", "epoch", 0.5)
    assert said() == snapshot(["evaluation_strategy='epoch': eval_strategy='epoch' takes its place"])


def test_a_parser_without_training_arguments_is_left_alone() -> None:
    with pytest.raises(ValueError, match=r"not used by the HfArgumentParser: \['--no_cuda'\]$"):
        HfArgumentParser(Own).parse_args_into_dataclasses(["--no_cuda"])


def test_an_unknown_flag_keeps_its_error_and_gains_a_hint() -> None:
    with pytest.raises(ValueError, match="Some specified arguments") as caught:
        parser(TrainingArguments).parse_args_into_dataclasses(["--lerning_rate", "3"])
    assert str(caught.value) == snapshot(
        "Some specified arguments are not used by the HfArgumentParser: ['--lerning_rate', '3']; "
        "did you mean '--learning_rate'?"
    )
    with pytest.raises(ValueError, match="did you mean '--eval_strategy'"):
        parser(TrainingArguments).parse_dict({"output_dir": "x", "evaluaton_strategy": "no"})


def test_remaining_strings_are_returned_without_the_translated(tmp_path: Path) -> None:
    got, rest = parser(TrainingArguments).parse_args_into_dataclasses(
        ["--use_mps_device", "--strange", "1", "--output_dir", str(tmp_path)], return_remaining_strings=True
    )
    assert rest == ["--strange", "1"]
    assert got.output_dir == str(tmp_path)


def test_a_wrong_value_ends_as_the_parser_s_own_errors_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parser(TrainingArguments).parse_args_into_dataclasses(["--per_gpu_train_batch_size", "much"])
    assert caught.value.code == 2
    assert "error: argument --per_gpu_train_batch_size: invalid int value: 'much'" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_a_file_of_arguments_is_read_in_old_words(ending: str, said, tmp_path: Path) -> None:
    given = {"output_dir": str(tmp_path), "evaluation_strategy": "steps", "no_cuda": True, "optim": "adamw_hf"}
    file = tmp_path / f"arguments.{ending}"
    file.write_text(json.dumps(given) if ending == "json" else yaml.safe_dump(given))
    reader = parser(Own, TrainingArguments)
    _, got = reader.parse_json_file(file) if ending == "json" else reader.parse_yaml_file(file)
    assert (got.eval_strategy, got.use_cpu, got.optim) == ("steps", True, "adamw_torch")
    assert got.no_cuda is True
    assert len(said()) == 3


def test_an_args_file_beside_the_script_is_translated_too(said, tmp_path: Path) -> None:
    (tmp_path / "run.args").write_text(f"--no_cuda --output_dir {tmp_path}")
    (got,) = parser(TrainingArguments).parse_args_into_dataclasses([], args_filename=str(tmp_path / "run.args"))
    assert got.use_cpu
    assert said() == snapshot(["--no_cuda: --use_cpu takes its place"])


def test_keywords_of_transformers_4_are_taken_by_every_subclass(said, tmp_path: Path) -> None:
    for kind in (TrainingArguments, Seq2SeqTrainingArguments, More):
        got = kind(str(tmp_path), evaluation_strategy="no", no_cuda=True, save_safetensors=True)
        assert (got.eval_strategy, got.use_cpu) == ("no", True)
    assert len(said()) == 3
    with pytest.raises(TypeError, match="unexpected keyword argument 'evaluaton'"):
        TrainingArguments(str(tmp_path), evaluaton="no")


def test_script_bodies_read_removed_attributes(said, tmp_path: Path) -> None:
    got = TrainingArguments(str(tmp_path), eval_strategy="steps", use_cpu=True)
    assert (got.overwrite_output_dir, got.evaluation_strategy) == (False, "steps")
    assert (got.no_cuda, got.fp16_backend, got.framework) == (True, "auto", "pt")
    assert (got.group_by_length, got.adafactor, got.use_legacy_prediction_loop) == (False, False, False)
    assert said()[:2] == snapshot(
        [
            "training_args.overwrite_output_dir is gone from transformers 5; in its place: nothing: files of the same"
            " name are written over and no file is deleted",
            "training_args.evaluation_strategy is gone from transformers 5; in its place: eval_strategy",
        ]
    )


def gone(name: str) -> pytest.MarkDecorator:
    """A test of a name that the oldest supported transformers still has."""
    there = name in TrainingArguments.__dataclass_fields__
    return pytest.mark.skipif(there, reason=f"this transformers still has {name}")


@gone("warmup_ratio")
def test_a_warmup_ratio_is_a_share_of_warmup_steps(said, tmp_path: Path) -> None:
    assert TrainingArguments(str(tmp_path), warmup_ratio=0.1).warmup_steps == 0.1
    assert said() == snapshot(["warmup_ratio=0.1: warmup_steps=0.1 takes its place"])
    assert TrainingArguments(str(tmp_path), warmup_steps=0.2).warmup_ratio == 0.2
    assert said() == snapshot(
        [
            "training_args.warmup_ratio is gone from transformers 5; in its place: warmup_steps (a number below 1 is"
            " the share of all steps)"
        ]
    )


@gone("warmup_ratio")
def test_a_subclass_s_own_field_of_a_removed_name_is_its_own(said, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformerTrainingArguments

    got = SentenceTransformerTrainingArguments(str(tmp_path), warmup_ratio=0.1)
    assert (got.warmup_steps, got.warmup_ratio) == (0.1, None)
    assert said() == []


def test_a_library_that_asks_whether_a_removed_name_is_there_makes_no_noise(said, tmp_path: Path) -> None:
    got = TrainingArguments(str(tmp_path))
    program = compile("found = hasattr(got, 'save_safetensors')", "/venv/lib/site-packages/other/trainer.py", "exec")
    here = {"got": got}
    exec(program, here)
    assert here["found"]
    assert said() == []


@gone("group_by_length")
def test_group_by_length_is_a_sampling_strategy(said, tmp_path: Path) -> None:
    got = TrainingArguments(str(tmp_path), group_by_length=True)
    assert (got.train_sampling_strategy, got.group_by_length) == ("group_by_length", True)
    assert len(said()) == 1


def test_a_removed_attribute_that_is_set_sets_today_s(said, tmp_path: Path) -> None:
    got = TrainingArguments(str(tmp_path))
    got.evaluation_strategy = "epoch"
    got.overwrite_output_dir = True
    assert (got.eval_strategy, got.overwrite_output_dir) == ("epoch", True)
    assert said() == snapshot(["training_args.evaluation_strategy='epoch': eval_strategy='epoch' takes its place"])


def test_what_was_given_survives_a_pickle_and_stays_out_of_the_fields(tmp_path: Path) -> None:
    got = TrainingArguments(str(tmp_path), overwrite_output_dir=True)
    assert pickle.loads(pickle.dumps(got)).overwrite_output_dir is True
    assert "overwrite_output_dir" not in got.to_dict()
    assert "overwrite_output_dir" not in {f.name for f in fields(TrainingArguments)}


def test_overwriting_names_what_stays_of_an_earlier_run(said, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-7").mkdir()
    TrainingArguments(str(tmp_path), overwrite_output_dir=True, save_total_limit=1)
    assert [masked(line, folder=tmp_path) for line in said()] == [
        snapshot(
            "overwrite_output_dir: files of the same name in <folder> are written over, nothing is deleted; of an"
            " earlier run stay checkpoint-7; save_total_limit counts them too"
        )
    ]


@gone("logging_dir")
def test_logging_dir_reaches_tensorboard_and_the_variable_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: True)
    got = TrainingArguments(str(tmp_path), logging_dir=str(tmp_path / "logs"))
    state = SimpleNamespace(is_world_process_zero=True, is_hyper_param_search=False)
    for variable, expected in ((None, tmp_path / "logs"), (str(tmp_path / "theirs"), tmp_path / "theirs")):
        callback = integration_utils.TensorBoardCallback.__new__(integration_utils.TensorBoardCallback)
        callback.tb_writer, callback._SummaryWriter, callback.logging_dir = None, None, variable
        callback.on_train_begin(got, state, None)
        assert callback.logging_dir == str(expected)


def test_a_version_that_has_the_fields_keeps_them() -> None:
    @dataclass
    class TrainingArguments:
        output_dir: str = "x"
        warmup_ratio: float = 0.0
        no_cuda: bool = False

    module: Any = SimpleNamespace(TrainingArguments=TrainingArguments)
    arm(training_arguments, module, "transformers.training_args")
    got = TrainingArguments(warmup_ratio=0.3, no_cuda=True)
    assert (got.warmup_ratio, got.no_cuda) == (0.3, True)
    assert TrainingArguments.__dict__["warmup_ratio"] == 0.0


@pytest.mark.parametrize(
    ("name", "value", "off", "today"),
    [
        ("no_cuda", True, False, "use_cpu=False"),
        ("warmup_ratio", 0.1, 0.0, "warmup_steps=0"),
        ("include_inputs_for_metrics", True, False, "include_for_metrics=[]"),
    ],
)
def test_a_removed_attribute_that_is_taken_back_takes_today_s_back(
    name: str, value: Any, off: Any, today: str, said, tmp_path: Path
) -> None:
    got = TrainingArguments(str(tmp_path))
    setattr(got, name, value)
    field = today.partition("=")[0]
    assert getattr(got, field)
    said()
    setattr(got, name, off)
    assert not getattr(got, field)
    assert said() == [f"training_args.{name}={off!r}: {today} takes its place"]
    setattr(got, name, off)
    assert said() == [f"training_args.{name}={off!r}: dropped, it is the default"]
