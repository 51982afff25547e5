"""The doctor on versions: what does not fit together, and the known problems of exactly these releases and chips."""

from __future__ import annotations

from importlib import metadata

import pytest
from inline_snapshot import snapshot

from hf_mps.metal.device.faults import FAULTS
from hf_mps.tools.doctor import versions
from hf_mps.tools.doctor.findings import Finding
from tests import CHECKOUT
from tests.tools.doctor.conftest import Having


def named(found: list[Finding], name: str) -> Finding:
    return next(each for each in found if each.name == name)


@pytest.mark.parametrize(
    ("package", "version", "says"),
    [
        (
            "transformers",
            "5.2.0",
            "transformers 5.2.0 can run code that a model's config.json names, when it loads the ",
        ),
        ("lightning", "2.6.3", "lightning 2.6.3 steals credentials: it was published with a stolen token (GHSA-"),
        ("lightning", "2.6.4", None),
    ],
)
def test_a_release_with_a_security_advisory_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str, says: str | None
) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == package else real(name))
    found = [each for each in versions.examine() if each.name == "advisory"]
    assert [each.says[: len(says or "")] for each in found] == ([] if says is None else [says])
    assert [each.next for each in found] == ([] if says is None else [f"pip install --upgrade {package}"])


def test_sources_that_are_not_installed_are_told_of_and_the_rest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    found = versions.examine()
    first = named(found, "hf-mps")
    assert (first.state, first.next) == ("note", f"pip install -e {CHECKOUT}")
    assert named(found, "tokenizers").state == "ok"


def test_versions_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "evaluate":
            raise metadata.PackageNotFoundError(name)
        return {"transformers": "4.57.1"}.get(name, real(name))

    monkeypatch.setattr(metadata, "version", version)
    found = versions.examine()
    assert named(found, "transformers").says == snapshot("4.57.1; hf_mps needs >=5.3")
    assert named(found, "transformers").next == snapshot("pip install --upgrade 'transformers>=5.3'")
    assert (named(found, "evaluate").says, named(found, "evaluate").state) == ("not installed", "problem")


@pytest.mark.parametrize(
    ("torch_version", "chip", "macos", "some", "none"),
    [
        ("2.13.0+cpu", "Apple M1", "26.1", {"193487", "188438", "189960", "127676"}, {"131736", "197114"}),
        ("2.13.0", "Apple M4", "14.7", {"131736", "190064", "193385"}, {"193487", "188438", "104832"}),
        ("2.14.1", "Apple M2", "26.2.1", {"197114", "195163", "187109"}, {"190064", "193487", "197715"}),
        ("2.15.0", "Apple M5", "26.4", {"127676", "182815", "187109"}, {"189960", "197114", "193571", "180201"}),
    ],
)
def test_known_problems_are_those_of_exactly_these_versions(
    torch_version: str, chip: str, macos: str, some: set[str], none: set[str], having: Having
) -> None:
    having(torch_version, chip, macos)
    known = [each for each in versions.examine() if each.name == "known problem" and "torch " in each.says]
    links = {each.next for each in known}
    listed = [fault for fault in FAULTS.values() if fault.package == "torch" and fault.listed]
    assert links == {fault.issue for fault in listed if fault.concerns(chip, macos, torch_version)}
    assert len(known) == len(links), "each issue once"
    numbers = {link.rpartition("/")[2] for link in links}
    assert some <= numbers
    assert not none & numbers


def test_a_machine_that_is_no_mac_has_none_of_metals_problems(having: Having) -> None:
    having("2.13.0", "AMD EPYC", None)
    assert not [each for each in versions.examine() if "torch 2.13.0: " in each.says]


@pytest.mark.parametrize(
    ("torch_version", "state", "says"),
    [
        ("2.13.0+cpu", "ok", "2.13.0+cpu, which was tried with hf_mps"),
        ("2.15.0", "ok", "2.15.0, which was tried with hf_mps"),
        ("2.12.1", "problem", "torch 2.12.1 is older than 2.13: wrong results are known"),
        ("2.14.0", "ok", "2.14.0; tried are 2.13.0, 2.14.1, 2.15.0"),
        ("2.15.1", "ok", "2.15.1; tried are 2.13.0, 2.14.1, 2.15.0"),
        ("2.16.0", "note", "2.16.0: hf_mps was not tried with this release; tried are 2.13.0, 2.14.1, 2.15.0"),
    ],
)
def test_the_doctor_says_which_releases_were_tried(torch_version: str, state: str, says: str, having: Having) -> None:
    having(torch_version, "Apple M4", "26.1")
    found = named(versions.examine(), "torch")
    assert (found.state, found.says) == (state, says)
    assert (found.next == "pip install -U torch") is (state == "problem")


@pytest.mark.parametrize(
    ("torch_version", "chip", "recommended"),
    [
        ("2.13.0", "Apple M1 Max", True),
        ("2.13.0+cpu", "Apple M2 Pro (simulated)", True),
        ("2.14.0", "Apple M1", False),
        ("2.13.0", "Apple M3", False),
    ],
)
def test_owners_of_the_first_two_generations_are_told_of_the_release_that_needs_no_cure(
    torch_version: str, chip: str, recommended: bool, having: Having
) -> None:
    having(torch_version, chip, "15.6")
    found = [each for each in versions.examine() if each.name == "newer torch"]
    assert [each.next for each in found] == ["pip install --upgrade 'torch>=2.14'"] * recommended
    assert all("#193487" in each.says and "#188438" in each.says for each in found)
