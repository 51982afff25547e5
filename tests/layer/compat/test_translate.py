"""Old arguments in today's words: what each becomes, in place, with one line; everything else stays as it was."""

from __future__ import annotations

import math

import pytest
from inline_snapshot import snapshot

from hf_mps.finetune.recipe import training_section
from hf_mps.layer.compat import removed_arguments

OPTIM = {"optim": ["adamw_torch", "adamw_torch_fused", "adafactor"]}


def line(*given: str) -> removed_arguments.Translated[list[str]]:
    return removed_arguments.command_line(list(given), removed_arguments.REMOVED, OPTIM)


@pytest.mark.parametrize(
    ("given", "now", "said"),
    [
        ("--use_mps_device", "", "--use_mps_device: dropped, mps is taken where it works (HF_MPS_DEVICE=mps insists o"),
        ("--no_cuda", "--use_cpu=True", "--no_cuda: --use_cpu takes its place"),
        ("--no_cuda False", "", "--no_cuda False: dropped, it is the default"),
        ("--evaluation_strategy steps", "--eval_strategy=steps", "--evaluation_strategy steps: --eval_strategy steps "),
        ("--evaluation-strategy=no", "--eval_strategy=no", "--evaluation_strategy no: --eval_strategy no takes its pl"),
        ("--evaluate_during_training", "--eval_strategy=steps", "--evaluate_during_training: --eval_strategy steps ta"),
        ("--warmup_ratio 0.06", "--warmup_steps=0.06", "--warmup_ratio 0.06: --warmup_steps 0.06 takes its place"),
        ("--warmup_ratio 0", "", "--warmup_ratio 0.0: dropped, it is the default"),
        (
            "--group_by_length",
            "--train_sampling_strategy=group_by_length",
            "--group_by_length: --train_sampling_strategy group_by_length takes its place",
        ),
        ("--logging_dir logs", "", "--logging_dir logs: kept for TensorBoard; transformers 5 has TENSORBOARD_LOGGING_"),
        ("--no_save_safetensors", "", "--save_safetensors False: dropped, models are always saved as safetensors"),
        ("--per_gpu_train_batch_size 8", "--per_device_train_batch_size=8", "--per_gpu_train_batch_size 8: --per_devi"),
        ("--per_gpu_eval_batch_size=8", "--per_device_eval_batch_size=8", "--per_gpu_eval_batch_size 8: --per_device_"),
        ("--fp16_backend apex", "", "--fp16_backend apex: dropped, mixed precision is fp16 or bf16 alone"),
        ("--half_precision_backend auto", "", "--half_precision_backend auto: dropped, mixed precision is fp16 or"),
        ("--optim adamw_hf", "--optim=adamw_torch", "--optim adamw_hf: --optim adamw_torch takes its place"),
        ("--optim=adamw_apex_fused", "--optim=adamw_torch_fused", "--optim adamw_apex_fused: --optim adamw_torch_fuse"),
        ("--adafactor", "--optim=adafactor", "--adafactor: --optim adafactor takes its place"),
        ("--include_inputs_for_metrics", "--include_for_metrics=inputs", "--include_inputs_for_metrics: --include_for"),
        ("--push_to_hub_token hf_abc", "--hub_token=hf_abc", "--push_to_hub_token …: --hub_token takes its place"),
    ],
)  # fmt: skip
def test_a_removed_flag_becomes_today_s_with_one_line(given: str, now: str, said: str) -> None:
    result = line("--first", "a", *given.split(), "--last", "b")
    assert result.given == ["--first", "a", *now.split(), "--last", "b"]
    assert len(result.lines) == 1
    assert result.lines[0].startswith(said)


def test_what_is_not_a_removed_flag_stays_as_it_is() -> None:
    same = ["script.json", "--optim", "sgd", "-x", "-1", "no_cuda", "--run_name=--no_cuda", "--eval_strat", "no"]
    result = line(*same)
    assert (result.given, result.lines, result.kept) == (same, [], {})


def test_behind_two_dashes_nothing_is_translated() -> None:
    assert line("--no_cuda", "--", "--no_cuda").given == ["--use_cpu=True", "--", "--no_cuda"]


def test_a_boolean_flag_takes_no_word_that_is_not_its_own() -> None:
    result = line("--overwrite_output_dir", "rest.txt", "--group_by_length", "false", "--use_mps_device", "True")
    assert result.given == ["rest.txt"]
    assert result.kept == {"overwrite_output_dir": True, "group_by_length": False, "use_mps_device": True}


def test_today_s_name_wins_over_the_old_one_and_says_so() -> None:
    result = line("--evaluation_strategy", "steps", "--eval-strategy", "epoch")
    assert result.given == ["--eval-strategy", "epoch"]
    assert result.lines == snapshot(["--evaluation_strategy steps: dropped, --eval_strategy is given too"])
    both = removed_arguments.keywords({"warmup_ratio": 0.1, "warmup_steps": 5}, removed_arguments.REMOVED, {})
    assert both.given == {"warmup_steps": 5}
    assert both.lines == snapshot(["warmup_ratio=0.1: dropped, warmup_steps is given too"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--warmup_ratio"], "argument --warmup_ratio: expected one argument"),
        (["--warmup_ratio", "--x"], "argument --warmup_ratio: expected one argument"),
        (["--warmup_ratio", "much"], "argument --warmup_ratio: invalid float value: 'much'"),
        (["--warmup_ratio", "1.5"], "argument --warmup_ratio: 1.5 is no share of all steps; allowed: 0 to 1"),
        (["--no_cuda=perhaps"], "argument --no_cuda: invalid bool value: 'perhaps'"),
        (["--push_to_hub_organization", "us"], "argument --push_to_hub_organization: hub_model_id takes its place, as"),
    ],
)
def test_a_wrong_value_is_refused_in_the_parser_s_words(given: list[str], said: str) -> None:
    with pytest.raises(ValueError, match="argument") as caught:
        line(*given)
    assert str(caught.value).startswith(said)


def test_a_warmup_over_all_steps_stays_one() -> None:
    steps = removed_arguments.REMOVED["warmup_ratio"].convert(1.0)["warmup_steps"]
    assert steps < 1
    assert math.ceil(10**9 * steps) == 10**9


def test_keywords_and_file_keys_are_translated_too() -> None:
    given = {"output_dir": "x", "evaluation_strategy": "epoch", "no_cuda": True, "optim": "adamw_hf"}
    result = removed_arguments.keywords(given, removed_arguments.REMOVED, OPTIM)
    assert result.given == {"output_dir": "x", "eval_strategy": "epoch", "use_cpu": True, "optim": "adamw_torch"}
    assert result.kept == {"evaluation_strategy": "epoch", "no_cuda": True}
    assert result.lines == snapshot(
        [
            "evaluation_strategy='epoch': eval_strategy='epoch' takes its place",
            "no_cuda=True: use_cpu=True takes its place",
            "optim='adamw_hf': optim='adamw_torch' takes its place",
        ]
    )
    assert given["no_cuda"] is True


def test_a_field_that_the_installed_version_has_is_not_missing() -> None:
    of_5_0 = {"warmup_ratio", "group_by_length", "logging_dir", "output_dir"}
    assert not removed_arguments.missing(of_5_0).keys() & of_5_0
    assert removed_arguments.missing(of_5_0).keys() == removed_arguments.REMOVED.keys() - of_5_0
    given = ["--warmup_ratio", "0.1"]
    assert removed_arguments.command_line(given, removed_arguments.missing(of_5_0), OPTIM).given == given
    known = {"optim": ["adamw_hf"]}
    assert removed_arguments.command_line(["--optim", "adamw_hf"], {}, known).given == ["--optim", "adamw_hf"]


def test_what_takes_a_place_is_a_field_of_the_installed_class() -> None:
    fields = training_section.fields()
    sample = {bool: True, int: 1, float: 0.5, str: "auto"}
    for name, old in removed_arguments.missing(fields).items():
        if name != "push_to_hub_organization":
            assert old.convert(sample[old.kind]).keys() <= fields.keys(), name
            assert old.convert(old.default) == {}, name


def test_recipes_say_what_took_a_name_s_place_in_the_same_words() -> None:
    assert training_section.REMOVED["no_cuda"] == removed_arguments.REMOVED["no_cuda"].instead == "use_cpu"
    assert removed_arguments.REMOVED.keys() <= training_section.REMOVED.keys()
