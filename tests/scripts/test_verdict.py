"""scripts/tools/verdict.py: what it says of releases, without a release's kernels."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("llvmlite")

from scripts.conformance.facts import Fact
from scripts.tools import verdict

CASE = {"name": "digamma/float32/dense/large/0", "detail": "result 0: 3 of 40003 differ", "reproduction": "a program"}


def difference(operator: str, cases: dict[str, int]) -> dict[str, Any]:
    return {
        **{"operator": operator, "outcome": "differs", "cases": cases, "ran": {"2.14.1": 9, "2.15.0": 9}},
        **{"dtypes": ["float32"], "layouts": ["dense"], "fact": None},
        "smallest": dict.fromkeys(cases, CASE),
    }


@pytest.fixture
def page() -> str:
    one = {"kernels": 16024, "cases": 10, "outcomes": {"agrees": 8, "refused": 1}, "programs": {"i0": False}}
    launches = {name: {"launches": 2425, "classes": {"graph": 299}} for name in verdict.STEPS}
    found = {
        "releases": {
            "2.14.1": {**one, "launches": launches},
            "2.15.0": {**one, "launches": {}, "programs": {"i0": True}},
        },
        "differences": [
            difference("came", {"2.15.0": 1}),
            difference("stayed", {"2.14.1": 1, "2.15.0": 2}),
            difference("went", {"2.14.1": 1}),
        ],
        "changes": [
            {
                "before": "2.14.1",
                "after": "2.15.0",
                "added": 5,
                "changed": 4,
                "removed": 3,
                "same": 2,
                "changed and run": 1,
            }
        ],
        "moves": {"2.14.1 2.15.0": {"left graph": ("flip",)}},
    }
    return "\n".join(verdict.page(found, "the command"))


def test_what_is_new_and_wrong_comes_first_with_a_program(page: str) -> None:
    newest, _, oldest = page.partition("## 2.14.1")
    newest = newest.partition("## 2.15.0, after 2.14.1")[2]
    assert newest.index("`came`") < newest.index("**Still wrong:** `stayed`") < newest.index("**Agrees now:** `went`")
    assert "a program" in newest
    assert oldest.count("a program") == 2


def test_kernels_operators_programs_and_steps_are_told(page: str) -> None:
    assert "**Kernels:** 5 added, 4 changed, 3 removed, 2 same; 1 of the changed ones ran here." in page
    assert "**Operators that leave MPSGraph, and are no longer compiled for each shape:** `flip`." in page
    assert "`i0` right (was wrong)" in page
    assert "| BERT-base, glue/mrpc | 2,425 (299) | not known |" in page
    assert "| 2.14.1 | 16,024 | 9 | 8 (88.89 %) | 1 | 1 |" in page


@pytest.mark.process
@pytest.mark.parametrize(
    ("printed", "dtypes", "says"),
    [
        (("[1.0, float('nan')]", "[1.0, 2.0]"), (), None),
        (("[1.0, 2.0]", "[1.0, 2.0]"), (), True),
        (("2127.2397", "2127.0815"), ("float32",), False),
        (("18944.0", "18948.9"), ("float16",), True),
        (("float('inf')", "18948.9"), ("float16",), False),
    ],
)
def test_a_faults_program_is_judged_by_what_it_prints(
    printed: tuple[str, str], dtypes: tuple[str, ...], says: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "PREAMBLE", "")
    fact = Fact("i0", "words", dtypes=dtypes, example="\n".join(f"print({each})" for each in printed))
    assert verdict.right(fact, "") is says
