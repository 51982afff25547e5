"""The doctor on versions: what does not fit together, and the known problems of exactly these releases and chips."""

from __future__ import annotations

from importlib import metadata

import pytest

from hf_mps.device import machine
from hf_mps.doctor import versions
from hf_mps.doctor.finding import Finding


def named(found: list[Finding], name: str) -> Finding:
    return next(each for each in found if each.name == name)


def test_versions_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "evaluate":
            raise metadata.PackageNotFoundError(name)
        return {"transformers": "4.57.1"}.get(name, real(name))

    monkeypatch.setattr(metadata, "version", version)
    found = versions.examine()
    assert named(found, "transformers").says == "4.57.1; hf_mps needs >=5"
    assert named(found, "transformers").next == "pip install --upgrade 'transformers>=5'"
    assert (named(found, "evaluate").says, named(found, "evaluate").state) == ("not installed", "problem")


SILENT = ("144824", "189563")
ATTENTION = ("195910", "181133", "176767")


@pytest.mark.parametrize(
    ("torch_version", "chip", "macos", "links"),
    [
        ("2.8.0", "Apple M4", "15.6", ["161640", "186360", "191976", *ATTENTION, "174861", "156707", *SILENT]),
        ("2.11.0", "Apple M5 Max", "15.6", ["186360", "191976", *ATTENTION, "180776", "181936", *SILENT]),
        ("2.12.1", "Apple M2 Pro", "15.6", ["186360", "191976", "193487", "195910", *SILENT, "189495"]),
        ("2.13.0", "Apple M4", "26.1", [*SILENT, "189495", "14380"]),
        ("2.13.0", "Apple M1", "26.1", ["193487", *SILENT, "188438", "189495", "14380"]),
        ("2.14.0", "Apple M2", "26.1", ["197715"]),
        ("2.14.1", "Apple M2", "26.1", []),
    ],
)
def test_known_problems_are_those_of_exactly_these_versions(
    torch_version: str, chip: str, macos: str, links: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = machine.Machine("Darwin", "arm64", chip, 16 * 2**30, macos=macos)
    monkeypatch.setattr(machine, "_pretended", here)
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: torch_version if name == "torch" else real(name))
    known = [each for each in versions.examine() if each.name == "known problem" and "torch " in each.says]
    assert [each.next.rpartition("/")[2] for each in known] == links
