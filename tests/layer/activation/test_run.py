"""hf-mps run: the layer on without autoload, and everything else as plain Python has it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from hf_mps.core.errors import UserError
from hf_mps.layer.activation import run
from tests.refusals import refusal

# No autoload: whatever the layer does here, it does because of `run`.
BARE: dict[str, str | None] = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
# Without the layer `run` costs no more than an import of torch, and all else is the same.
OFF: dict[str, str | None] = {"HF_MPS": "0", "HF_MPS_SIMULATE": None}

LOOK = """
import sys
import helper
print(__name__, __file__, __package__, __spec__, sys.argv, sys.path[0], sorted(vars()))
print(sys.modules["__main__"].__dict__ is globals(), helper.value)
"""


def both(run_python, script: Path, *arguments: str) -> list[tuple[int, str, str]]:
    """What plain Python and what `run` make of a script: exit code, stdout, stderr."""
    plain = run_python(script.name, *arguments, env=OFF)
    ours = run_python("-m", "hf_mps", "run", script.name, *arguments, env=OFF)
    return [(done.returncode, done.stdout, done.stderr) for done in (plain, ours)]


def test_a_script_sees_what_plain_python_shows_it(run_python, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("value = 3\n")
    script = tmp_path / "look.py"
    script.write_text(LOOK)
    plain, ours = both(run_python, script, "--flag", "-m", "x", "--", "--help")
    assert plain[0] == 0, plain[2]
    assert ours == plain


@pytest.mark.parametrize(
    "body",
    [
        "import sys\nsys.exit(7)",
        "raise SystemExit('a word')",
        "def f():\n    1 / 0\ntry:\n    f()\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e",
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
        "raise KeyboardInterrupt",
        "x = (\n",
        "import sys\nsys.excepthook = lambda *a: print('own hook', a[0].__name__, a[2].tb_lineno)\n1 / 0",
    ],
    ids=["exit code", "exit word", "chained error", "signal", "interrupt", "syntax error", "own excepthook"],
)
def test_a_script_ends_as_under_plain_python(run_python, tmp_path: Path, body: str) -> None:
    script = tmp_path / "ends.py"
    script.write_text(body)
    plain, ours = both(run_python, script)
    assert ours == plain
    assert plain[0] != 0


def test_a_killing_signal_is_the_process_s_own(run_python, tmp_path: Path) -> None:
    (tmp_path / "sleep.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    with subprocess.Popen(
        [sys.executable, "-m", "hf_mps", "run", "sleep.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM


def test_without_autoload_the_layer_is_on_before_the_first_line(run_python, tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(
        "from datasets import load_metric\nimport torch\nfrom hf_mps.layer.activation.activate import is_on\n"
        "print(is_on(), torch.ones(2, device='mps').device, load_metric('accuracy').compute(predictions=[1],"
        " references=[1]))\n"
    )
    done = run_python("-m", "hf_mps", "run", "early.py", env=BARE)
    assert done.stdout == snapshot("True mps:0 {'accuracy': 1.0}\n"), done.stderr
    assert "hf-mps: datasets.load_metric: accuracy is computed here, with evaluate's interface" in done.stderr


def test_a_module_runs_as_with_python_m(run_python, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(
        "import sys\nprint(__name__, __spec__.name, __package__, sys.argv, sys.path[0])\nassert len(sys.argv) == 2\n"
    )
    plain = run_python("-m", "package.train", "--x", env=OFF)
    ours = run_python("-m", "hf_mps", "run", "-m", "package.train", "--x", env=OFF)
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    wrong = run_python("-m", "hf_mps", "run", "-m", "package.train", env=OFF)
    assert wrong.returncode == 1
    assert wrong.stderr.splitlines()[1].startswith(f'  File "{package / "train.py"}"')
    missing = run_python("-m", "hf_mps", "run", "-m", "no_such_module", env=OFF)
    assert (missing.returncode, missing.stderr) == (2, snapshot("hf-mps: no module named no_such_module\n"))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "run needs a script"),
        (["-m"], "-m needs the name of a module"),
        (["--fast", "x.py"], "run has no option --fast; a script's own options stand behind its name"),
    ],
)
def test_a_command_line_without_a_target_is_refused(argv: list[str], said: str) -> None:
    assert refusal(run.resolve, argv).startswith(said)


def test_a_missing_file_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run.main(["nowhere.py"]) == 2
    assert capsys.readouterr().err.startswith("hf-mps: no file nowhere.py in ")
    assert run.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"hf-mps: {tmp_path} is a folder without a __main__.py; allowed: ")


def test_the_word_python_before_a_script_is_understood() -> None:
    assert run.resolve(["python", "a.py", "--b"]) == run.Target("a.py", ("--b",))
    assert run.resolve(["python3", "-m", "a.b"]) == run.Target("a.b", (), module=True)


def test_launchers_are_known_by_command_and_by_module(tmp_path: Path) -> None:
    for argv in (["torchrun"], ["-m", "torch.distributed.run"], ["accelerate", "launch"], ["/opt/bin/torchrun"]):
        assert run.launcher([*argv, "x.py"])[0]
    assert not run.launcher(["x.py", "torchrun"])[0]
    assert not run.launcher(["-m", "x", "accelerate"])[0]
    with pytest.raises(UserError, match=r"run knows `accelerate launch`, not `accelerate config`"):
        run.launcher(["accelerate", "config"])


@pytest.mark.parametrize(
    ("argv", "started"),
    [
        (["torchrun", "--nnodes", "1:2", "x.py"], ["--nnodes", "1:2", "x.py"]),
        (
            ["accelerate", "launch", "--num_machines", "2", "--num_processes", "2", "x.py"],
            ["--multi_gpu", "--num_machines", "2", "--num_processes", "2", "x.py"],
        ),
    ],
)
def test_one_process_on_each_of_several_hosts_is_the_launcher_s_own(
    argv: list[str], started: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    became: list[list[str]] = []

    def execv(_: str, words: list[str]) -> None:
        became.append(words)
        raise SystemExit

    monkeypatch.setattr("os.execv", execv)
    with pytest.raises(SystemExit):
        run.resolve(argv)
    assert [words[3:] for words in became] == [started]
    assert "hosts with a Metal device each" in capsys.readouterr().err


def test_torchrun_with_one_process_is_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    found = run.resolve(["torchrun", "--nproc-per-node=1", "--standalone", "train.py", "--nproc_per_node", "4"])
    assert found == run.Target("train.py", ("--nproc_per_node", "4"))
    found = run.resolve(["torchrun", "--nproc_per_node", "gpu", "-m", "pkg.train", "--x"])
    assert found == run.Target("pkg.train", ("--x",), module=True)
    assert "torchrun: one process on the one Metal device, this one: train.py runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["torchrun", "--nproc_per_node", "4", "x.py"], "torchrun --nproc_per_node=4: there is one Metal device"),
        (["torchrun", "--nnodes", "2", "--nproc_per_node", "2", "x.py"], "torchrun --nproc_per_node=2: there is one"),
        (
            ["accelerate", "launch", "--num_machines", "2", "--num_processes", "4", "x.py"],
            "accelerate launch: 4 processes on 2 machines: there is one Metal device on each",
        ),
        (["torchrun", "--no-python", "x.sh"], "torchrun --no_python starts a program that is no Python script"),
        (["accelerate", "launch", "--num_processes", "2", "x.py"], "accelerate launch --num_processes=2: there is one"),
        (["accelerate", "launch", "--multi_gpu", "--num_processes", "1", "x.py"], "accelerate launch: You need to use"),
    ],
)
def test_several_processes_on_one_metal_device_are_refused(argv: list[str], said: str) -> None:
    assert refusal(run.resolve, argv).startswith(said)


PRECISION = (
    "from accelerate import Accelerator\na = Accelerator()\nprint(a.device, a.mixed_precision, a.num_processes)\n"
)


def test_accelerate_launch_passes_its_settings_on(run_python, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(PRECISION)
    done = run_python(
        "-m",
        "hf_mps",
        "run",
        "accelerate",
        "launch",
        "--mixed_precision",
        "bf16",
        "--num_processes",
        "1",
        "loop.py",
        env=BARE,
    )
    assert done.stdout == "mps bf16 1\n", done.stderr


def test_off_metal_the_launcher_itself_takes_over(run_python, tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text("import os, sys\nprint(os.environ['WORLD_SIZE'], sys.argv)\n")
    done = run_python(
        "-m", "hf_mps", "run", "torchrun", "--nproc_per_node=1", "look.py", "--x", env={"HF_MPS_DEVICE": "cpu"}
    )
    assert done.stdout == "1 ['look.py', '--x']\n", done.stderr
    assert "torchrun itself starts the script, as the device is not Metal: cpu (HF_MPS_DEVICE=cpu" in done.stderr
