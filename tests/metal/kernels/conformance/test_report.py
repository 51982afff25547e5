"""scripts/conformance/report.py compares a release's kernels with the CPU and names what crashes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from hf_mps.layer import guards
from scripts.conformance import facts, report, run
from tests.metal.kernels.launch.conftest import running

UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


def test_a_kernel_that_crashes_is_named_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "WORKER", "tests.metal.kernels.conformance.crashing_worker")
    found = run.cases("2.13.0", tmp_path / "calls", run.Wanted())
    assert [one["outcome"] for one in found] == ["agrees", "crash", "agrees"]
    assert found[1]["detail"] == "signal 11 in mul_dense_float_float"
    assert found[1]["reproduction"] == "python scripts/conformance/report.py 2.13.0 --case mul/float32/dense/small/1"


def test_a_fact_ends_with_the_release_that_mended_it() -> None:
    case = {"rule": "linalg_cholesky_ex", "dtype": "float32", "layout": "dense", "detail": "result 1: 1 of 1 differ"}
    assert facts.known("2.13.0", case) is not None
    assert facts.known("2.14.1", case) is None


def test_a_fact_explains_no_larger_error_and_no_other_result() -> None:
    digamma = {"rule": "digamma", "dtype": "float32", "layout": "dense", "detail": "result 0: 1 of 2 differ"}
    assert facts.known("2.13.0", {**digamma, "error": 1e5}) is not None
    assert facts.known("2.13.0", {**digamma, "error": 1e8}) is None
    factor = {"rule": "linalg_cholesky_ex", "dtype": "float32", "layout": "dense"}
    assert facts.known("2.13.0", {**factor, "detail": "result 1: 1 of 1 differ"}) is not None
    assert facts.known("2.13.0", {**factor, "detail": "result 0: 1 of 1 differ"}) is None


@pytest.mark.parametrize(
    "fact", [each for each in facts.FACTS if each.example], ids=lambda each: f"{each.operator} {each.before}"
)
def test_an_example_shows_its_fault(fact: facts.Fact, release: str, capsys: pytest.CaptureFixture[str]) -> None:
    with running(release), guards.suspended(fact.guard) if fact.guard else nullcontext():
        exec(f"import torch\n{fact.example}", {})
    found, right = capsys.readouterr().out.splitlines()[-2:]
    assert found != right


@pytest.mark.nightly
@pytest.mark.slow
def test_a_family_is_compared_and_its_page_written(
    release: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, details = tmp_path / "page.md", tmp_path / "report.json"
    options = ["--operator", UNSCALE, "--operator", "gelu", "--page", str(page), "--json", str(details)]
    assert report.main([release, *options]) == 0
    found = json.loads(details.read_text())
    dense = {one["outcome"] for one in found["cases"][release] if f"{UNSCALE}/float16/dense" in one["name"]}
    assert dense == {"agrees"}
    family = found["releases"][release]["families"]["elementwise"]
    assert family["agrees"] == family["ran"] > 50
    text = page.read_text()
    assert f"| {release} |" in text
    tables = json.loads(page.with_suffix(".json").read_text())
    assert "elementwise" in {row[0] for row in tables[f"{release} by family"]["rows"]}
    assert f"{page} and {details} have the rest" in capsys.readouterr().out


def test_a_release_that_is_not_here_is_one_line(own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["2.13.0"]) == 2
    assert capsys.readouterr().err == "hf-mps: torch 2.13.0 is not fetched; allowed: nothing, as none is here\n"
