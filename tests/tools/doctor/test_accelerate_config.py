"""`hf-mps config`: the file that it writes, what it repairs, and what it leaves alone."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.config.default import write_basic_config
from inline_snapshot import snapshot

from hf_mps.cli.main import main
from hf_mps.tools.doctor import accelerate_config
from tests import CHECKOUT
from tests.snapshots import masked

GIB = 2**30


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "accelerate" / "config.yaml"


def config(*arguments: str) -> int:
    return main(["config", *arguments])


def test_without_a_question_it_writes_what_accelerate_reads(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert config("--yes", "--config_file", str(place)) == 0
    read = load_config_from_file(str(place))
    assert (read.use_cpu, read.num_processes, read.mixed_precision) == (False, 1, "no")
    assert read.distributed_type.value == "NO"
    out = capsys.readouterr().out
    assert "  + num_processes: 1    # there is one Metal device\n" in out
    assert f"next: accelerate test --config_file {place}, then accelerate launch --config_file {place} script.py" in out


MACHINES = ("--num_machines", "2", "--main_process_ip", "10.0.0.1")


def test_each_of_several_macs_gets_a_file_with_a_number_of_its_own(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config("--yes", "--config_file", str(place), *MACHINES, "--machine_rank", "1") == 0
    read = load_config_from_file(str(place))
    assert (read.num_machines, read.num_processes, read.machine_rank) == (2, 2, 1)
    assert (read.main_process_ip, read.main_process_port, read.use_cpu) == ("10.0.0.1", 29500, False)
    assert read.distributed_type.value == "MULTI_GPU", "accelerate launch would start one process that trains alone"
    other = "hf-mps config --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 --main_process_port 29500"
    assert other in capsys.readouterr().out
    assert config("--check", "--config_file", str(place)) == 0


def test_a_file_of_several_macs_that_would_train_alone_is_repaired(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place.parent.mkdir()
    place.write_text("distributed_type: 'NO'\nnum_machines: 2\nnum_processes: 4\nmain_process_ip: 10.0.0.1\n")
    assert config("--check", "--config_file", str(place)) == 1
    line = capsys.readouterr().err
    assert "distributed_type: NO -> MULTI_GPU: accelerate launch starts one process, which trains alone" in line
    assert "num_processes: 4 -> 2: one Metal device on each of 2 Macs" in line
    assert config("--yes", "--config_file", str(place)) == 0
    read = load_config_from_file(str(place))
    assert (read.num_processes, read.distributed_type.value, read.machine_rank) == (2, "MULTI_GPU", 0)


def test_a_file_of_several_macs_becomes_one_of_this_mac_alone(place: Path) -> None:
    config("--yes", "--config_file", str(place), *MACHINES, "--machine_rank", "1")
    assert config("--yes", "--config_file", str(place), "--num_machines", "1") == 0
    read = load_config_from_file(str(place))
    assert (read.num_machines, read.num_processes, read.distributed_type.value) == (1, 1, "NO")
    assert "main_process_ip" not in yaml.safe_load(place.read_text())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--num_machines", "2"), "2 Macs meet at the main one, and there is no address; next: --main_process_ip"),
        ((*MACHINES, "--machine_rank", "2"), "--machine_rank 2 is none of 2 Macs; allowed: 0 to 1"),
        ((*MACHINES, "--main_process_port", "70000"), "--main_process_port 70000: allowed: 1 to 65535"),
        (("--main_process_ip", "10.0.0.1"), "--main_process_ip 10.0.0.1 is for several Macs; next: hf-mps config"),
    ],
)
def test_what_several_macs_cannot_have_is_refused(
    words: tuple[str, ...], line: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config("--yes", "--config_file", str(place), *words) == 2
    assert line in capsys.readouterr().err
    assert not place.exists()


def test_by_default_it_writes_where_accelerate_launch_looks() -> None:
    assert accelerate_config.default_place() == Path(default_config_file)


def test_a_second_time_there_is_nothing_to_do(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config("--yes", "--config_file", str(place))
    before = place.read_bytes()
    assert config("--yes", "--config_file", str(place)) == 0
    assert place.read_bytes() == before
    assert list(place.parent.iterdir()) == [place]
    assert f"{place}: nothing to repair" in capsys.readouterr().out


def test_accelerates_own_cpu_file_is_found_and_repaired(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_basic_config(save_location=str(place))
    written = place.read_bytes()
    assert json.loads(written)["use_cpu"] is True
    assert config("--check", "--config_file", str(place)) == 1
    assert masked(capsys.readouterr().err, config=place) == snapshot(
        "hf-mps: <config>: use_cpu: true -> false: it sends Accelerate to the CPU while TrainingArguments"
        " stays on mps; `accelerate config default` writes it on a Mac (accelerate#3453); next: hf-mps config"
        " --config_file <config>\n"
    )
    assert place.read_bytes() == written
    assert config("--yes", "--config_file", str(place)) == 0
    assert load_config_from_file(str(place)).use_cpu is False
    assert place.with_name("config.yaml.bak").read_bytes() == written
    assert "  - use_cpu: true\n  + use_cpu: false    # it sends" in capsys.readouterr().out
    assert config("--check", "--config_file", str(place)) == 0


def test_the_retired_type_and_older_keys_are_repaired(place: Path) -> None:
    place.parent.mkdir()
    said = {"distributed_type": "MPS", "use_mps_device": True, "num_processes": 2, "fp16": True, "gpu_ids": "all"}
    place.write_text(yaml.safe_dump(said), encoding="utf-8")
    with pytest.raises(ValueError, match=r"unknown keys .*use_mps_device"):
        load_config_from_file(str(place))
    assert config("--yes", "--config_file", str(place)) == 0
    read = load_config_from_file(str(place))
    assert (read.distributed_type.value, read.num_processes, read.mixed_precision) == ("NO", 1, "fp16")
    assert read.gpu_ids == "all"


def test_a_backup_never_replaces_another(place: Path) -> None:
    for said in ({"distributed_type": "MPS"}, {"distributed_type": "NO", "use_cpu": True}):
        place.parent.mkdir(exist_ok=True)
        place.write_text(yaml.safe_dump(said), encoding="utf-8")
        assert config("--yes", "--config_file", str(place)) == 0
    assert yaml.safe_load(place.with_name("config.yaml.bak").read_text()) == {"distributed_type": "MPS"}
    assert yaml.safe_load(place.with_name("config.yaml.bak-2").read_text())["use_cpu"] is True


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("distributed_type: MULTI_GPU\nnum_processes: 8\n", "is for other machines (distributed_type MULTI_GPU)"),
        ("compute_environment: AMAZON_SAGEMAKER\n", "is for other machines (compute_environment AMAZON_SAGEMAKER)"),
        ("distributed_type: MULTI_NPU\nnum_machines: 4\n", "is for other machines (distributed_type MULTI_NPU)"),
        ("distributed_type: 'NO'\nmain_process_ip: 10.0.0.1\n", "is for other machines (main_process_ip)"),
        ("distributed_type: 'NO'\nfsdp_config: {fsdp_version: 2}\n", "is for other machines (fsdp_config)"),
        ("distributed_type: 'NO'\nsparkle: true\n", "has keys that the installed accelerate does not know (sparkle)"),
        ("- one\n- two\n", "holds a list, not keys"),
        ("use_cpu: [\n", "cannot be read as YAML: "),
        ("debug: 2026-02-30\n", "cannot be read as YAML: day is out of range for month"),
        ("num_machines: 2\nmachine_rank: '1'\n", "machine_rank is no whole number ('1')"),
    ],
)
def test_what_it_does_not_understand_stays_as_it_is(
    text: str, words: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place.parent.mkdir()
    place.write_text(text, encoding="utf-8")
    assert config("--yes", "--config_file", str(place)) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"hf-mps: {place}: {words}")
    assert line.endswith(f"it stays as it is; next: hf-mps config --config_file {place.with_name('mac.yaml')}\n")
    assert place.read_text(encoding="utf-8") == text
    assert list(place.parent.iterdir()) == [place]


def test_a_command_that_it_names_works_where_the_path_has_a_space(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "Application Support" / "config.yaml"
    place.parent.mkdir()
    place.write_text("use_cpu: true\n", encoding="utf-8")
    assert config("--check", "--config_file", str(place)) == 1
    words = shlex.split(capsys.readouterr().err.rpartition("; next: hf-mps ")[2])
    assert main([*words, "--yes"]) == 0
    assert f"accelerate test --config_file '{place}'" in capsys.readouterr().out
    place.write_text("- one\n", encoding="utf-8")
    assert config("--check", "--config_file", str(place)) == 2
    assert capsys.readouterr().err.endswith(f" --config_file '{place.with_name('mac.yaml')}'\n")


def test_a_home_folder_that_there_is_not_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert config("--check", "--config_file", "~nobody-of-that-name/config.yaml") == 2
    assert capsys.readouterr().err.startswith("hf-mps: ~nobody-of-that-name/config.yaml cannot be opened: ")


def test_a_bare_no_is_the_word_and_not_false(place: Path) -> None:
    place.parent.mkdir()
    place.write_text("distributed_type: NO\nmixed_precision: no\nuse_cpu: true\n", encoding="utf-8")
    assert config("--yes", "--config_file", str(place)) == 0
    read = load_config_from_file(str(place))
    assert (read.distributed_type.value, read.mixed_precision) == ("NO", "no")


@pytest.mark.parametrize("answer", [True, False])
def test_it_writes_what_is_confirmed_and_nothing_else(
    answer: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import typer

    asked: list[str] = []
    monkeypatch.setattr(typer, "confirm", lambda question, **_: asked.append(question) or answer)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert config("--config_file", str(place)) == 0
    assert asked == ["Write it?"]
    assert place.exists() is answer


def test_nobody_to_ask_is_misuse(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert config("--config_file", str(place)) == 2
    assert capsys.readouterr().err == snapshot(
        "hf-mps: config asks on a terminal before it writes, and stdin is none; next: hf-mps config --yes\n"
    )


def test_json_is_one_object(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_basic_config(save_location=str(place))
    assert config("--json", "--config_file", str(place)) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["written"] is True
    assert told["simulated"] is True
    assert told["backup"] == f"{place}.bak"
    assert [repair["key"] for repair in told["repairs"]] == ["use_cpu"]
    assert told["choices"]["mixed_precision"]["value"] == "no"


def test_without_metal_there_is_nothing_to_configure(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_MPS_DEVICE", "cpu")
    assert config("--yes", "--config_file", str(place)) == 2
    assert capsys.readouterr().err == snapshot(
        "hf-mps: config writes for Metal, and there is none: "
        "HF_MPS_DEVICE=cpu switches Metal off; to switch it on: unset HF_MPS_DEVICE\n"
    )


def test_a_precision_that_there_is_not_is_repaired() -> None:
    found = accelerate_config.find({"mixed_precision": "bf61"})
    assert [str(each) for each in found] == snapshot(["mixed_precision: bf61 -> no"])
    assert found[0].reason == snapshot("bf61 is no precision; allowed: fp32, bf16, fp16; did you mean 'bf16'?")


def test_accelerate_launch_takes_the_file_and_trains_on_mps(place: Path, run_python, tmp_path: Path) -> None:
    config("--yes", "--config_file", str(place))
    script = CHECKOUT / "scripts" / "examples" / "run_glue_no_trainer.py"
    output = tmp_path / "run"
    ended = run_python(
        *("-m", "accelerate.commands.launch", "--config_file", str(place), script),
        *("--max_train_steps", "2", "--per_device_train_batch_size", "4", "--output_dir", str(output)),
    )
    assert ended.returncode == 0, ended.stderr
    assert "Device: mps, mixed precision: no" in ended.stdout
    assert (output / "config.json").is_file()


@pytest.mark.process
def test_ctrl_c_at_a_question_ends_in_one_line_and_writes_nothing(place: Path) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "hf_mps", "config", "--config_file", str(place)]
    with subprocess.Popen(command, cwd=CHECKOUT, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE) as process:
        os.close(theirs)
        printed = b""
        while b"Write it?" not in printed:
            printed += os.read(ours, 4096)
        # A signal between the question and the read behind it waits for the next key, or the next signal.
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
        assert process.stderr.read().decode().strip() == snapshot("hf-mps: interrupted")
        assert process.returncode == 130
    os.close(ours)
    assert not place.exists()
