"""`pytest --known-failures FILE`: what differs from the file ends red. The suites run in a pytest of their own."""

from __future__ import annotations

import importlib.util

import pytest

pytest_plugins = ["pytester"]

SUITE = """
import unittest

import pytest


def test_passes():
    pass


@pytest.mark.parametrize("size", [1, 2], ids=["one size", "2#"])
def test_fails(size):
    raise NotImplementedError("no kernel")


@pytest.fixture
def broken():
    raise LookupError


def test_setup(broken):
    pass


def test_skipped():
    pytest.skip("not here")


class TestParts(unittest.TestCase):
    def test_parts(self):
        for part in range(3):
            with self.subTest(part=part):
                assert part != 1
"""
LISTED = """\
# what Metal lacks

NotImplementedError\ttest_theirs.py::test_fails[one size]
  NotImplementedError   test_theirs.py::test_fails[2#]
LookupError test_theirs.py::test_setup
AssertionError test_theirs.py::TestParts::test_parts
ValueError test_theirs.py::test_skipped
"""
XDIST = pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="pytest-xdist is not installed")
WAYS = [(), pytest.param(("-n2",), marks=[XDIST, pytest.mark.slow])]


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:cacheprovider -p no:randomly -W ignore")
    pytester.makepyfile(test_theirs=SUITE)
    return pytester


def run(suite: pytest.Pytester, listed: str, *options: str) -> pytest.RunResult:
    suite.path.joinpath("known.txt").write_text(listed, encoding="utf-8")
    return suite.runpytest("--known-failures=known.txt", *options)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_fails_as_listed_is_green(suite: pytest.Pytester, way: tuple[str, ...]) -> None:
    ended = run(suite, LISTED, *way)
    assert ended.ret == 0
    assert {name: ended.parseoutcomes().get(name) for name in ("passed", "skipped", "failed", "errors")} == {
        "passed": 1, "skipped": 1, "failed": None, "errors": None,
    }  # fmt: skip
    assert suite.runpytest().ret == 1


@pytest.mark.parametrize("way", WAYS)
def test_what_differs_from_the_list_ends_red(suite: pytest.Pytester, way: tuple[str, ...]) -> None:
    unlisted = run(suite, LISTED.replace("LookupError test_theirs.py::test_setup\n", ""), *way)
    assert unlisted.ret == 1
    assert "ERROR test_theirs.py::test_setup - LookupError" in unlisted.stdout.str()

    gone = run(suite, LISTED + "ValueError test_theirs.py::test_gone\nValueError test_gone.py::test\n", *way)
    assert gone.ret == 1
    assert "FAILED known.txt:8 names no test: test_theirs.py::test_gone; delete or rename it" in gone.stdout.str()
    assert "FAILED known.txt:9 names no test: test_gone.py::test; delete or rename it" in gone.stdout.str()

    listed = LISTED.replace("# what Metal lacks", "ValueError test_theirs.py::test_passes")
    listed = listed.replace("LookupError ", "Exception ").replace("AssertionError ", "KeyError ")
    other = run(suite, listed, *way)
    assert other.ret == 1
    assert (other.parseoutcomes()["failed"], other.parseoutcomes()["errors"]) == (2, 1)
    said = other.stdout.str()
    assert "passed, and known.txt:1 lists it with ValueError: delete that line" in said
    assert "known.txt:5 lists Exception, and LookupError was raised" in said
    assert "known.txt:6 lists KeyError, and AssertionError was raised" in said


@pytest.mark.parametrize("part", ["test_theirs.py::test_passes", "-k=passes"])
def test_a_part_of_the_suite_is_judged_by_its_own_lines(suite: pytest.Pytester, part: str) -> None:
    suite.makepyfile(test_other="def test_other(): raise KeyError")
    assert run(suite, LISTED + "KeyError test_other.py::test_other\n", part).ret == 0


def test_several_files_are_one_list(suite: pytest.Pytester) -> None:
    first, second = LISTED.split("LookupError")
    suite.path.joinpath("more.txt").write_text("LookupError" + second, encoding="utf-8")
    assert run(suite, first, "--known-failures=more.txt").ret == 0


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ("\n# a\nValueError\n", "line 3 is 'ValueError'; allowed: an exception's type and a test's id"),
        ("test_theirs.py::test_passes ValueError\n", "line 1 is 'test_theirs.py::test_passes ValueError'; allowed"),
        (LISTED + "KeyError test_theirs.py::test_setup\n", "known.txt:8 lists what known.txt:5 lists"),
    ],
)
def test_a_malformed_line_ends_in_one_line_with_its_number(suite: pytest.Pytester, listed: str, said: str) -> None:
    ended = run(suite, listed)
    assert ended.ret == pytest.ExitCode.USAGE_ERROR
    assert said in ended.stderr.str()
    assert "Traceback" not in ended.stderr.str()


def test_a_missing_file_names_the_command_that_writes_it(suite: pytest.Pytester) -> None:
    ended = suite.runpytest("--known-failures=no.txt")
    assert ended.ret == pytest.ExitCode.USAGE_ERROR
    assert (
        "--known-failures=no.txt: no such file; next: pytest --known-failures=no.txt --known-failures-update"
        in ended.stderr.str()
    )
    assert "needs one --known-failures=FILE" in suite.runpytest("--known-failures-update").stderr.str()


@pytest.mark.parametrize("way", WAYS)
def test_an_update_writes_what_a_run_then_agrees_with(suite: pytest.Pytester, way: tuple[str, ...]) -> None:
    suite.runpytest("--known-failures=known.txt", "--known-failures-update", *way)
    assert read(suite)[1:] == [
        "AssertionError\ttest_theirs.py::TestParts::test_parts",
        "NotImplementedError\ttest_theirs.py::test_fails[2#]",
        "NotImplementedError\ttest_theirs.py::test_fails[one size]",
        "LookupError\ttest_theirs.py::test_setup",
    ]
    assert suite.runpytest("--known-failures=known.txt", *way).ret == 0


def test_an_update_makes_the_folder_that_is_not_there(suite: pytest.Pytester) -> None:
    suite.runpytest("--known-failures=lists/known.txt", "--known-failures-update")
    assert suite.runpytest("--known-failures=lists/known.txt").ret == 0


def test_an_update_keeps_comments_and_the_lines_of_what_did_not_run(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_other="def test_other(): raise KeyError")
    other = "KeyError test_other.py::test_other"
    stale = "ValueError test_theirs.py::test_gone\nValueError test_theirs.py::test_passes\n"
    listed = LISTED.replace("LookupError", "KeyError") + stale + other + "\n"
    run(suite, listed, "--known-failures-update", "test_theirs.py")
    assert read(suite) == [
        "# what Metal lacks",
        "",
        "NotImplementedError\ttest_theirs.py::test_fails[one size]",
        "NotImplementedError\ttest_theirs.py::test_fails[2#]",
        "LookupError\ttest_theirs.py::test_setup",
        "AssertionError\ttest_theirs.py::TestParts::test_parts",
        "ValueError\ttest_theirs.py::test_skipped",
        "KeyError\ttest_other.py::test_other",
    ]


def read(suite: pytest.Pytester) -> list[str]:
    return suite.path.joinpath("known.txt").read_text(encoding="utf-8").splitlines()
