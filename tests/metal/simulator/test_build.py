"""What compiling the simulated device promises. The sources here are tiny: the real ones take a minute."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_mps.core import cache
from hf_mps.core.errors import UserError
from hf_mps.metal.simulator import build
from tests.conftest import Run

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the simulator's compiler tests are written for Linux")
pytestmark = [ON_LINUX, pytest.mark.process]

MODULE_SOURCE = """
#include <Python.h>
int answer();
static PyObject* get(PyObject*, PyObject*) { return PyLong_FromLong(answer()); }
static PyMethodDef methods[] = {{"answer", get, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_metal", "", -1, methods};
PyMODINIT_FUNC PyInit__metal() { return PyModule_Create(&module); }
"""

# Needs torch's library at run time, and names its own file in an error as torch's headers name theirs.
OF_TORCH = """
#include <c10/core/Device.h>
int answer() {
  const int found = c10::Device("mps:0").index() + 42;
  TORCH_CHECK(found == 42, "another number");
  return found;
}
"""


@pytest.fixture
def native(own_folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of two small C++ sources in the place of the device's, with an empty cache of its own."""
    folder = tmp_path / "native"
    folder.mkdir()
    (folder / "module.cpp").write_text(MODULE_SOURCE)
    (folder / "answer.cpp").write_text("int answer() { return 42; }\n")
    monkeypatch.setattr(build, "NATIVE", folder)
    monkeypatch.setattr(build, "MODULE", "hf_mps_test_build._metal")
    monkeypatch.delenv("CXX", raising=False)
    yield folder
    sys.modules.pop(build.MODULE, None)


def forget() -> None:
    sys.modules.pop(build.MODULE, None)


def test_it_compiles_once_says_so_and_is_silent_afterwards_and_needs_no_compiler(
    native: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.extension().answer() == 42
    said = capfd.readouterr().err
    assert f"compiling the simulated Metal device for torch {torch.__version__} (once" in said
    assert "… done in" in said
    made = tmp_path / "cache" / "hf_mps" / "simulator" / build.build_name()
    assert {path.name for path in made.iterdir()} <= {"_metal.so", ".lock"}

    forget()
    monkeypatch.setenv("PATH", "/nowhere")
    start = time.perf_counter()
    assert cache.find(f"{build.build_name()}/{build.NAME}.so") is not None
    assert time.perf_counter() - start < 0.05
    assert build.extension().answer() == 42
    assert capfd.readouterr().err == ""
    assert build.extension() is build.extension()


def test_it_does_not_import_torchs_own_build_tools(run_python) -> None:
    code = "import sys, torch; from hf_mps.metal.simulator import build; build.build_name(); print(*sys.modules)"
    done = run_python("-c", code, env={"HF_MPS": "0", "HF_MPS_SIMULATE": None})
    assert done.returncode == 0, done.stderr
    assert not {"torch.utils.cpp_extension", "setuptools", "filelock"} & set(done.stdout.split())


def test_a_changed_source_is_compiled_anew(native: Path) -> None:
    before = build.build_name()
    (native / "answer.cpp").write_text("int answer() { return 43; }\n")
    assert build.build_name() != before
    assert build.extension().answer() == 43


ELSEWHERE = """
import torch
from pathlib import Path
from hf_mps.metal.simulator import build
assert torch.__file__.startswith({folder!r}), torch.__file__
build.NATIVE = Path({native!r})
print(build.build_name(), build.extension().answer())
"""


def test_an_environment_at_another_place_with_the_same_torch_takes_the_same_build(
    native: Path, tmp_path: Path, run_python
) -> None:
    (native / "answer.cpp").write_text(OF_TORCH)
    assert build.extension().answer() == 42
    folder = tmp_path / "environment"
    folder.mkdir()
    here = Path(torch.__file__).parent
    for package in (here, here.parent / "torchgen"):
        (folder / package.name).symlink_to(package)
    code = ELSEWHERE.format(folder=str(folder), native=str(native))
    variables = {"HF_MPS": "0", "HF_MPS_SIMULATE": None, "PATH": "/nowhere", "PYTHONPATH": str(folder)}
    done = run_python("-c", code, env=variables)
    assert (done.stdout, done.stderr) == (f"{build.build_name()} 42\n", "")


def test_a_build_names_no_folder_of_the_environment(native: Path, tmp_path: Path) -> None:
    (native / "answer.cpp").write_text(OF_TORCH)
    build.extension()
    (built,) = (tmp_path / "cache").rglob("_metal.so")
    content = built.read_bytes()
    assert b"hf_mps/metal/simulator/native/answer.cpp" in content
    for folder in (Path(torch.__file__).parent, native, Path(sysconfig.get_paths()["include"])):
        assert str(folder).encode() not in content
    dynamic = subprocess.run(["readelf", "-d", str(built)], capture_output=True, text=True, check=True).stdout
    assert "libc10.so" in dynamic
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic


def test_a_torch_that_was_built_otherwise_gets_a_build_of_its_own(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {build.build_name()}
    with monkeypatch.context() as other:
        other.setattr(torch.version, "git_version", "0" * 40)
        names.add(build.build_name())
    with monkeypatch.context() as other:
        other.setattr(torch, "compiled_with_cxx11_abi", lambda: False)
        names.add(build.build_name())
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "2.99.0")
        names.add(build.build_name())
        assert build.build_name().startswith("2.99.0-")
    with monkeypatch.context() as other:  # the same commit, without MKL
        header = tmp_path / "torch" / "include" / "ATen" / "Config.h"
        header.parent.mkdir(parents=True)
        header.write_text("#define AT_MKL_ENABLED() 0\n")
        other.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
        names.add(build.build_name())
    assert len(names) == 5


@pytest.mark.nightly
def test_processes_that_start_together_compile_once(native: Path, tmp_path: Path) -> None:
    count = tmp_path / "calls"
    compiler = tmp_path / "slow-c++"
    compiler.write_text(f'#!/bin/sh\necho x >> "{count}"\nsleep 1\nexec {shutil.which("c++")} "$@"\n')
    compiler.chmod(0o755)
    code = textwrap.dedent(f"""
        import torch
        from pathlib import Path
        from hf_mps.metal.simulator import build
        build.NATIVE = Path({str(native)!r})
        print(build.extension().answer())
    """)
    variables = {**os.environ, "HF_MPS": "0", "CXX": str(compiler)}
    variables.pop("HF_MPS_SIMULATE", None)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    ended = [process.communicate(timeout=120) for process in started]
    assert [out.strip() for out, _ in ended] == ["42"] * 3, ended
    assert count.read_text().count("x") == 3, "two sources and one link"
    assert sum("waiting for another process" in err for _, err in ended) <= 2


def test_a_cache_that_cannot_be_written_gives_way_to_a_temporary_folder(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a-file" / "below"))
    assert build.extension().answer() == 42
    said = capfd.readouterr().err
    assert "cannot be written (Not a directory)" in said
    assert str(tmp_path / "temporary") in said

    forget()
    assert build.extension().answer() == 42
    assert capfd.readouterr().err == "", "the spare folder is found again"


def test_a_temporary_folder_that_others_may_write_to_is_not_trusted(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache.spare() is not None
    planted = tmp_path / "temporary" / f"hf_mps-{os.getuid()}"
    planted.chmod(0o777)
    assert cache.spare() is None


def test_no_compiler_is_one_line_that_says_what_to_install(native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"there is no C\+\+ compiler: apt-get install g\+\+, or set CXX"):
        build.extension()
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(UserError, match=r"CXX=no-such-compiler -O1 is not found"):
        build.extension()


def test_missing_python_headers_are_named(native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(UserError, match=r"Python\.h\): apt-get install python3-dev"):
        build.extension()


def test_a_failed_compilation_shows_its_first_error_and_keeps_the_log(native: Path) -> None:
    (native / "answer.cpp").write_text("int answer() { return nonsense; }\nint again() { return second; }\n")
    with pytest.raises(UserError) as caught:
        build.extension()
    message = str(caught.value)
    assert "nonsense" in message
    assert "second" not in message
    assert "\n" not in message
    log = Path(message.rsplit("the full log: ", 1)[1].rstrip(")"))
    assert "second" in log.read_text()
    assert not list(log.parent.glob("*.so")), "a failed build leaves nothing that could be loaded"
    assert not list(log.parent.glob(".work-*"))

    (native / "answer.cpp").write_text("int answer() { return 44; }\n")
    assert build.extension().answer() == 44


def test_a_log_holds_what_the_locale_cannot_say(run_python: Run, tmp_path: Path) -> None:
    log = tmp_path / "compile.log"
    code = (
        "import subprocess\n"
        "from pathlib import Path\n"
        "from hf_mps.metal.simulator import build\n"
        "ended = subprocess.CompletedProcess(['c++'], 1, 'a.cpp: error: \\u201cx\\u201d')\n"
        f"build._refuse_failures([ended], Path({str(log)!r}))\n"
    )
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "HF_MPS_SIMULATE": None}
    done = run_python("-c", code, env=plain)
    assert "UserError: the simulated Metal device does not compile: a.cpp: error" in done.stderr
    assert "\u201cx\u201d" in log.read_text(encoding="utf-8")


def test_a_damaged_library_is_named_with_the_way_out(native: Path, tmp_path: Path) -> None:
    # Never loaded whole before: Python remembers an extension by its path.
    folder = tmp_path / "cache" / "hf_mps" / "simulator" / build.build_name()
    folder.mkdir(parents=True)
    (folder / "_metal.so").write_bytes(b"not a library")
    with pytest.raises(UserError, match=r"does not load .*; remove the folder .* and it is compiled anew"):
        build.extension()


def test_the_working_folder_of_a_killed_process_is_cleared(native: Path, tmp_path: Path) -> None:
    left = tmp_path / "cache" / "hf_mps" / "simulator" / build.build_name() / ".work-killed"
    left.mkdir(parents=True)
    build.extension()
    assert not left.exists()


@pytest.mark.parametrize(
    ("before", "variable", "said"),
    [
        (
            "torch.ones(1, requires_grad=True).sum().backward(), torch.backends.mps.is_available()",
            None,
            "the simulated device comes too late (",
        ),
        ("", "yes", "PYTORCH_ENABLE_MPS_FALLBACK is no number, and PyTorch reads it as one (stoi)"),
        ("", "", "PYTORCH_ENABLE_MPS_FALLBACK is no number, and PyTorch reads it as one (stoi)"),
        ("", "99999999999", "PYTORCH_ENABLE_MPS_FALLBACK is no number, and PyTorch reads it as one (stoi)"),
    ],
    ids=["too late", "no number", "empty", "too large a number"],
)
def test_a_device_that_cannot_start_says_so_each_time_and_the_process_goes_on(
    run_python: Run, before: str, variable: str | None, said: str
) -> None:
    code = (
        "import torch\n"
        "from hf_mps.metal import simulator\n"
        "from hf_mps.core.errors import UserError\n"
        f"{before}\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        simulator.load()\n"
        "    except UserError as error:\n"
        "        print(error)\n"
        "print('went on')\n"
    )
    variables = {"HF_MPS_SIMULATE": None, "HF_MPS": "0", "PYTORCH_ENABLE_MPS_FALLBACK": variable}
    done = run_python("-c", code, env=variables)
    first, second, last = done.stdout.splitlines()
    assert first == second
    assert first.startswith(said)
    assert (last, done.returncode) == ("went on", 0), done.stderr
