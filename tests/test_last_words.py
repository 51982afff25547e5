"""What `make test` says at its end of a part that failed."""

from __future__ import annotations

from pathlib import Path

from tests import CHECKOUT

CONFTEST = """
from tests import last_words

def pytest_configure(config):
    last_words.keep(config)
"""
TESTS = """
import os

def test_right(): pass
def test_wrong(): assert 1 == 2, "two lines:\\nof which one is told"
def test_last():
    assert "TEST_LAST_WORDS" not in os.environ
    os._exit(3)
"""


def test_it_names_what_failed_and_the_test_in_which_the_process_ended(run_python, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    env = {"TEST_LAST_WORDS": str(tmp_path / "words"), "PYTHONPATH": str(CHECKOUT), "HF_MPS": "0"}
    ended = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hf_mps", "test_it.py", env=env)
    assert ended.returncode == 3
    (words,) = (tmp_path / "words").iterdir()
    first, last = words.read_text().splitlines()
    assert first == "failed: test_it.py::test_wrong: AssertionError: two lines:"
    assert last == "did not end: test_it.py::test_last"
