"""What GitHub, pre-commit and citation tools read is well formed, pinned, and asks for no more than it needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import hf_mps
from hf_mps.tools.doctor import versions
from tests import CHECKOUT

GITHUB = CHECKOUT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
USES = re.compile(r"^\s*(?:- )?uses: (?P<action>[\w.-]+/[\w./-]+)@(?P<sha>[0-9a-f]{40}) # v\d+\.\d+\.\d+$")


def _read(path: Path) -> dict[Any, Any]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def _uses(path: Path) -> Iterator[str]:
    yield from (line for line in path.read_text(encoding="utf-8").splitlines() if re.search(r"\buses:", line))


def test_every_action_is_pinned_by_sha_with_its_version_and_everywhere_the_same() -> None:
    pinned: dict[str, set[str]] = {}
    for path in (*WORKFLOWS, CHECKOUT / "action.yml", CHECKOUT / "docs" / "guide-ci.md"):
        for line in _uses(path):
            match = USES.match(line)
            if "hf-mps/hf_mps@main" in line:  # our own, which has no release yet
                continue
            assert match, f"{path.name}: {line.strip()}"
            pinned.setdefault(match["action"], set()).add(match["sha"])
    assert {"actions/checkout", "actions/setup-python", "pypa/gh-action-pypi-publish"} <= set(pinned)
    assert all(len(shas) == 1 for shas in pinned.values()), pinned


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_read_the_sources_and_its_jobs_end(path: Path) -> None:
    workflow = _read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert "group" in workflow["concurrency"]
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 90, name
        # Only the job that hands the wheel to PyPI has an identity, and it runs nothing of ours.
        publishes = any("pypi-publish" in step.get("uses", "") for step in job["steps"])
        assert job.get("permissions") == ({"id-token": "write"} if publishes else None), name
        assert not (publishes and any("run" in step for step in job["steps"])), name
        for step in job["steps"]:
            if "checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False, name


def test_the_matrix_goes_from_the_lowest_supported_to_the_newest_that_was_tried() -> None:
    python = metadata.metadata("hf-mps")["Requires-Python"]
    (lowest,) = [line for line in metadata.requires("hf-mps") or () if line.startswith("torch>=")]
    matrix = _read(GITHUB / "workflows" / "tests.yml")["jobs"]["versions"]["strategy"]["matrix"]
    assert f">={matrix['python'][0]}" == python
    assert matrix["torch"] == [versions.TRIED[0], versions.TRIED[-1]]
    assert matrix["torch"][0].startswith(lowest.removeprefix("torch>="))


def test_the_newest_torch_is_tried_where_it_has_a_python_and_the_one_before_elsewhere() -> None:
    matrix = _read(GITHUB / "workflows" / "tests.yml")["jobs"]["versions"]["strategy"]["matrix"]
    assert matrix["exclude"] == [{"python": "3.10", "torch": versions.TRIED[-1]}]
    assert matrix["include"] == [{"python": "3.10", "torch": versions.TRIED[-2]}]


def test_a_mac_gets_the_tools_of_linux_and_a_torch_whose_gpu_works_on_its_macos() -> None:
    def pins(name: str) -> list[Requirement]:
        lines = (CHECKOUT / name).read_text(encoding="utf-8").splitlines()
        return [Requirement(line) for line in lines if line and not line.startswith("#")]

    linux = {pin.name: pin.specifier for pin in pins("constraints.txt")}
    tools = {pin.name: pin.specifier for pin in pins("constraints-darwin.txt") if pin.name != "torch"}
    assert {"mypy", "ruff", "pytest"} <= tools.keys()
    assert tools == {name: linux[name] for name in tools}

    def torch(darwin: str, python: str) -> str:
        here = {"sys_platform": "darwin", "platform_release": darwin, "python_version": python}
        found = [pin for pin in pins("constraints-darwin.txt") if pin.marker is not None and pin.marker.evaluate(here)]
        (pin,) = found
        return str(pin.specifier)

    # Darwin 23 is macOS 14.
    assert [torch("23.6.0", "3.12"), torch("24.0.0", "3.10")] == ["==2.14.1"] * 2
    assert [torch("24.0.0", "3.11"), torch("25.1.0", "3.13")] == [f"=={versions.TRIED[-1]}"] * 2


def test_on_a_mac_nothing_comes_before_metal_that_linux_can_find() -> None:
    steps = _read(GITHUB / "workflows" / "tests.yml")["jobs"]["mac"]["steps"]
    runs = [step["run"] for step in steps if "run" in step]
    assert runs[0] == "make ready"
    assert not any("make check" in run for run in runs)


def test_a_release_is_built_and_tried_before_it_is_published_from_a_tag() -> None:
    workflow = _read(GITHUB / "workflows" / "release.yml")
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the key `on` as true
    assert workflow["jobs"]["publish"]["needs"] == "build"
    assert "secrets." not in (GITHUB / "workflows" / "release.yml").read_text(encoding="utf-8")


def test_each_night_pypi_is_asked_for_advisories_about_every_pinned_version() -> None:
    workflow = _read(GITHUB / "workflows" / "audit.yml")
    assert workflow[True]["schedule"]
    assert "constraints*.txt" in workflow[True]["pull_request"]["paths"]
    script = "\n".join(step.get("run", "") for step in workflow["jobs"]["audit"]["steps"])
    audits = [line for line in script.splitlines() if line.strip().startswith("pip-audit ")]
    assert len(audits) == 2
    assert all("--strict" in line and "--ignore-vuln" not in line for line in audits)
    assert "--requirement constraints.txt" in audits[0]
    assert "constraints-darwin.txt" in script


def made(target: str, folder: Path) -> list[str]:
    """Return the lines that `make TARGET` would run in a fresh clone."""
    constraints = "constraints-darwin.txt" if sys.platform == "darwin" else "constraints.txt"
    for name in ("Makefile", "pyproject.toml", constraints):
        (folder / name).write_bytes((CHECKOUT / name).read_bytes())
    # A make of its own: the flags of the one that runs the suite print directories, whatever the command line says.
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--dry-run", target]
    return subprocess.run(
        command, cwd=folder, env=alone, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_the_quickstart_installs_what_a_training_needs_and_the_suite_its_tools_on_top(tmp_path: Path) -> None:
    quickstart, ready = (
        [line.split("--constraint ")[1].split() for line in made(target, tmp_path) if "pip install" in line]
        for target in ("quickstart", "ready")
    )
    assert [words[-2:] for words in quickstart] == [["--editable", "."]]
    assert [words[-2:] for words in ready] == [["--editable", "."], ["--editable", "'.[dev]'"]]
    assert {words[0] for words in (*quickstart, *ready)} <= {"constraints.txt", "constraints-darwin.txt"}


def test_what_make_test_leaves_out_runs_each_night(tmp_path: Path) -> None:
    tests = [line for line in made("test", tmp_path) + made("part-others", tmp_path) if " -m pytest " in line]
    assert tests
    assert all('-m "not nightly"' in line for line in tests)
    (night,) = [line for line in made("nightly", tmp_path) if "TEST_SHARE=all" in line]
    assert night.endswith("CHOSEN=")
    workflow = _read(GITHUB / "workflows" / "nightly.yml")
    assert workflow[True]["schedule"]
    assert workflow["jobs"]["suite"]["steps"][-1]["run"] == "make nightly"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_asks_for_what_the_doctor_says(path: Path) -> None:
    form = _read(path)
    assert form["name"]
    assert form["description"]
    asked = [part["attributes"]["label"] for part in form["body"]]
    assert any(label.startswith("hf-mps doctor") and label.endswith("--json") for label in asked)
    assert len({part["id"] for part in form["body"]}) == len(asked)


def test_dependabot_looks_after_the_pinned_actions() -> None:
    ecosystems = [update["package-ecosystem"] for update in _read(GITHUB / "dependabot.yml")["updates"]]
    assert ecosystems == ["github-actions", "pip"]


def test_pre_commit_runs_the_tools_of_make_check_and_downloads_none() -> None:
    (repository,) = _read(CHECKOUT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    assert [hook["id"] for hook in repository["hooks"]] == ["ruff", "ruff-format", "mypy", "pages"]
    assert all(hook["entry"].startswith(".venv/bin/") for hook in repository["hooks"])


def test_the_citation_names_this_version() -> None:
    citation = _read(CHECKOUT / "CITATION.cff")
    assert citation["version"] == hf_mps.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)
