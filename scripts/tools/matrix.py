"""The tests of guards, shims and scripts with older and newer libraries: a virtual environment for each combination.

    python scripts/tools/matrix.py --folder /tmp/matrix
    python scripts/tools/matrix.py --folder /tmp/matrix --transformers 5.3 --accelerate 1.10 --tests tests/layer/compat

By default transformers 5.3 and the newest, accelerate 1.10 and the newest, with one torch: others are on PyPI for Linux
as CUDA builds of several gigabytes alone, and the simulated device needs a build for the CPU; where such a wheel
is at hand (`--index-url https://download.pytorch.org/whl/cpu`), `--torch 2.14.1` takes it. An environment that is there
already is used again. Prints a table with the versions that were found; exit code 1 where a test failed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import venv
import xml.etree.ElementTree as xml
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
ROOMS = ("layer/guards", "resume", "layer/compat", "layer/integrations", "scripts")
NEWEST = "newest"
PINNED = ("torch", "transformers", "accelerate")
# What the tests need beside the package; mypy, ruff and the builders of wheels they do not.
BESIDE = ("pytest>=8.3", "expecttest>=0.3", "peft>=0.15")


@dataclass(frozen=True)
class Outcome:
    """One line of the table: versions as found, counts of tests, the names of those that failed."""

    versions: tuple[str, ...]
    passed: int
    skipped: int
    failed: tuple[str, ...]
    seconds: float

    @property
    def good(self) -> bool:
        return self.passed > 0 and not self.failed


def main() -> int:
    """Make the environments, run the tests, print the table and return the exit code."""
    given = arguments()
    outcomes = []
    for versions in itertools.product(given.torch, given.transformers, given.accelerate):
        python = environment(given.folder, dict(zip(PINNED, versions, strict=True)), given.index_url)
        outcomes.append(run(python, given.tests or tests(), slow=given.slow))
        print(table(outcomes[-1:]), flush=True)
    print(f"\n{table(outcomes)}")
    for outcome in outcomes:
        for name in outcome.failed:
            print(f"failed with {' '.join(outcome.versions)}: {name}")
    return 0 if all(outcome.good for outcome in outcomes) else 1


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the environments are made; 2 GB for each")
    parser.add_argument("--torch", nargs="+", default=["2.13.0"], help="default 2.13.0")
    parser.add_argument("--transformers", nargs="+", default=["5.3", NEWEST], help=f"default 5.3 {NEWEST}")
    parser.add_argument("--accelerate", nargs="+", default=["1.10", NEWEST], help=f"default 1.10 {NEWEST}")
    parser.add_argument("--tests", nargs="+", help=f"default {' '.join(f'tests/{room}' for room in ROOMS)}")
    parser.add_argument("--slow", action="store_true", help="the slow tests too")
    parser.add_argument("--index-url", help="as pip's, for another torch")
    given = parser.parse_args()
    folder = given.folder.resolve()
    if folder.is_relative_to(CHECKOUT):
        parser.error(f"--folder {given.folder} lies in the checkout; next: --folder /tmp/matrix")
    return given


def tests() -> list[str]:
    """The rooms whose tests depend on the libraries' insides, as far as there are such."""
    return [f"tests/{room}" for room in ROOMS if (CHECKOUT / "tests" / room).is_dir()]


def environment(folder: Path, versions: dict[str, str], index_url: str | None) -> Path:
    """Return the Python of the environment for `versions`, made where it is not there. Ends the program on failure."""
    home = folder / "-".join(f"{name}{version}" for name, version in versions.items())
    python = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    if (home / ".ready").exists():
        return python
    print(f"making {home}", flush=True)
    venv.create(home, with_pip=True, clear=True)
    pins = [name if version == NEWEST else f"{name}=={version}.*" for name, version in versions.items()]
    torch = ["--index-url", index_url] if index_url else []
    install(python, *torch, pins[0].removesuffix(".*") if versions["torch"].count(".") > 1 else pins[0])
    install(python, *pins[1:], *BESIDE, "--editable", f"{CHECKOUT}[lightning]")
    (home / ".ready").touch()
    return python


def install(python: Path, *what: str) -> None:
    """pip install, quietly; what it says is shown where it fails."""
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", *what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"pip install {' '.join(what)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def run(python: Path, which: list[str], *, slow: bool) -> Outcome:
    """Run the tests in one environment."""
    asking = f"from importlib.metadata import version\nfor name in {PINNED}: print(f'{{name}} {{version(name)}}')"
    versions = subprocess.run([python, "-c", asking], capture_output=True, text=True, check=True).stdout.splitlines()
    chosen = [] if slow else ["-m", "not slow"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *chosen, *which]
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=CHECKOUT, env=variables, capture_output=True, text=True, check=False)
        if not report.is_file():
            sys.exit(f"pytest did not run in {python.parent.parent}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        (suite,) = xml.parse(report).getroot().iter("testsuite")
    cases = list(suite.iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return Outcome(
        versions=tuple(versions),
        passed=len(cases) - len(failed) - len(skipped),
        skipped=len(skipped),
        failed=tuple(f"{case.get('classname')}::{case.get('name')}" for case in failed),
        seconds=float(suite.get("time", 0)),
    )


def table(outcomes: list[Outcome]) -> str:
    """The outcomes, a line each."""
    return "\n".join(
        f"{'pass' if each.good else 'FAIL'}  {'  '.join(f'{version:<22}' for version in each.versions)}"
        f"  {each.passed} passed, {len(each.failed)} failed, {each.skipped} skipped  {each.seconds:.0f} s"
        for each in outcomes
    )


if __name__ == "__main__":
    sys.exit(main())
