"""`hf-mps doctor --torch RELEASE`: what another release would change, from lists and wheels that were read before."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hf_mps.cli.main import main
from hf_mps.core.releases import torch_release
from hf_mps.metal.device.faults import FAULTS
from hf_mps.metal.operators.table import table
from hf_mps.tools.doctor import versions
from hf_mps.tools.doctor.findings import Finding
from tests.tools.doctor.conftest import Having


def section(then: str, name: str) -> dict[str, Finding]:
    found = versions.sections(versions.compared(then))
    return {finding.name: finding for finding in found.get(name, [])}


def test_an_upgrade_takes_faults_away_and_brings_others(having: Having) -> None:
    having("2.13.0")
    gone, come = section("2.14.1", "gone with 2.14.1"), section("2.14.1", "new with 2.14.1")
    assert {"large-k", "lstm-dropout", "huge-embedding", "linear-bias"} <= gone.keys()
    assert "(pytorch#193487)" in gone["large-k"].says
    assert come.keys() == {"index-range"}
    assert come["index-range"].next == "https://github.com/pytorch/pytorch/pull/187109"
    assert "checkpoint-rng" in section("2.14.1", "on both")["known faults"].says


def test_a_downgrade_brings_them_back(having: Having) -> None:
    having("2.14.1")
    come = section("2.13.0", "new with 2.13.0")
    assert "cured here by lstm-dropout" in come["lstm-dropout"].says
    assert come["lstm-dropout"].next.endswith("/issues/190056")
    assert section("2.13.0", "operators")["lost"].says.startswith("lose their kernel and run on the CPU: ")


def test_it_is_this_chip_that_counts_and_where_there_is_none_each_fault_names_its_macs(having: Having) -> None:
    having("2.13.0", chip="Apple M4")
    assert "large-k" not in section("2.14.1", "gone with 2.14.1")
    having("2.13.0", macos=None)
    assert "(on Apple M1, Apple M2)" in section("2.14.1", "gone with 2.14.1")["large-k"].says


def test_nothing_is_told_twice_and_no_known_fault_is_left_out(having: Having) -> None:
    having("2.13.0", macos=None)
    told = [(each["says"], each["link"]) for each in versions.compared("2.15.0").faults]
    listed = [fault for fault in FAULTS.values() if fault.package == "torch" and fault.listed]
    concerned = {
        fault.issue
        for fault in listed
        for release in ("2.13.0", "2.15.0")
        if replace(fault, macos="").concerns(next(iter(fault.chips), ""), None, release)
    }
    assert concerned <= {link for _, link in told}
    assert len(told) == len(set(told))


def test_operators_that_get_a_kernel_had_none_in_the_dispatcher(having: Having) -> None:
    having("2.13.0")
    found = versions.compared("2.14.1").operators
    assert {"_ctc_loss", "linalg_eigh", "poisson", "matrix_exp"} <= set(found["kernel"])
    assert {"embedding", "index_select", "median", "mish", "nan_to_num"} <= set(found["left graph"])
    assert found["absent"] == ("cholesky", "qr")
    if torch_release() < (2, 14):
        assert not {f"aten::{name}" for name in found["kernel"]} & table().native


def test_a_release_whose_launches_are_not_known_has_its_faults_and_the_next_command(having: Having) -> None:
    having("2.13.0")
    found = section("2.14.0", "operators")["operators"]
    assert found.state == "note"
    assert found.next == "in a checkout of hf_mps, python scripts/tools/launch_classes.py WHEEL"
    assert "lstm-dropout" in section("2.14.0", "gone with 2.14.0")


@pytest.mark.parametrize(
    ("then", "state", "words"),
    [
        ("2.14.1", "ok", "which was tried with hf_mps"),
        ("2.15.0", "problem", "it needs macOS 15.0 or newer, this is 14.5"),
        ("2.12.1", "problem", "torch 2.12.1 is older than 2.13: wrong results are known"),
        ("2.14.0", "ok", "tried are"),
    ],
)
def test_it_says_whether_this_machine_can_have_the_release(then: str, state: str, words: str, having: Having) -> None:
    having("2.13.0", macos="14.5")
    found = section(then, "release")["torch"]
    assert found.state == state
    assert words in found.says


def test_the_verb_prints_lines_or_json_and_refuses_what_is_no_release(
    having: Having, capsys: pytest.CaptureFixture[str]
) -> None:
    having("2.13.0")
    assert main(["doctor", "--torch", "2.14.1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["upgrade"]
    assert found["then"] == "2.14.1"
    assert {"says", "link", "guard", "now", "then"} == found["faults"][0].keys()
    assert len(found["operators"]["left graph"]) > versions.NAMED
    assert main(["doctor", "--torch", "newest"]) == 2
    assert "'newest' is no release of PyTorch; allowed: a version" in capsys.readouterr().err
    assert main(["doctor", "--torch", "2.14.1", "--trials"]) == 2
    assert "give one of them" in capsys.readouterr().err
