"""The guards can be listed, switched off one by one, and say in one line what they did."""

from __future__ import annotations

import warnings

import pytest
import torch

from hf_mps.core import settings
from hf_mps.core.errors import UserError
from hf_mps.layer import guards
from hf_mps.layer.guards import GuardNotice
from hf_mps.layer.guards.catalogue import GUARDS, SENTINELS
from hf_mps.layer.integrations import table
from tests.layer.guards import loops

NAMES = GUARDS.names


def test_every_guard_is_complete() -> None:
    for name in NAMES:
        guard = guards.get(name)
        assert guard.name == name
        for sentence in (guard.what, guard.issue, guard.until):
            assert sentence
            assert not sentence.endswith(".")
    assert {module for module in GUARDS.after if module != "torch"} == {
        module for module, rooms in table().items() if "guards" in rooms
    }


def test_the_report_has_each_guard_with_state_and_reason() -> None:
    import accelerate
    import transformers.trainer

    assert accelerate
    assert transformers
    report = guards.report()
    assert [each.name for each in report.guards] == list(NAMES)
    assert {each.state for each in report.guards} <= {"on", "needless", "acted", "waits"}
    assert len(str(report).splitlines()) == len(NAMES) + len(SENTINELS.names)


def test_one_that_acted_is_counted_and_a_cure_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", GuardNotice)
        copies = [torch.ones(2, device="mps").to("cpu", non_blocking=True) for _ in range(2)]
    assert len(copies) == 2
    state = next(each for each in guards.report().guards if each.name == "non-blocking")
    assert (state.state, state.acted) == ("acted", 2)
    assert "with non_blocking=True they would be read too early" in state.reason
    assert guards.acted() == [
        {"name": "non-blocking", "times": 2, "lines": [state.reason], "issue": guards.get("non-blocking").issue}
    ]


def float64_batch() -> list[torch.Tensor]:
    """One that an Accelerate loop moves: what a person has to know of."""
    rows = [torch.ones(2, dtype=torch.float64)]
    return list(loops.new_accelerator().prepare(torch.utils.data.DataLoader(rows, batch_size=None)))  # type: ignore[arg-type]


def test_what_a_person_has_to_know_is_said_once_at_their_own_line() -> None:
    with pytest.warns(GuardNotice, match="float64 became float32") as said:
        assert len([*float64_batch(), *float64_batch()]) == 2
    assert [each.filename for each in said] == [__file__]


def test_notices_can_be_filtered_by_their_category() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("ignore", GuardNotice)
        float64_batch()
    assert not said


def test_a_suspended_guard_does_nothing() -> None:
    with guards.suspended("checkpoint-rng"):
        assert not hasattr(torch.mps, "_initialized")
        assert next(each for each in guards.report().guards if each.name == "checkpoint-rng").state == "off by user"
    assert hasattr(torch.mps, "_initialized")


def test_a_name_that_is_no_guard_is_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_GUARDS", "-resume-rgn")
    with pytest.raises(UserError, match=r"resume-rgn is no guard; there are .*; did you mean 'resume-rng'"):
        settings.safeguards_off("guard", NAMES)
    monkeypatch.setenv("HF_MPS_GUARDS", "resume-rng")
    with pytest.raises(UserError, match="guards are on by themselves; -resume-rng switches one off"):
        settings.safeguards_off("guard", NAMES)


CODE = """
import torch, hf_mps.layer.guards
print([state.name for state in hf_mps.guards.report().guards if state.state == "off by user"])
print(hasattr(torch.mps, "_initialized"))
"""


@pytest.mark.rotated("/")
def test_the_variable_switches_single_guards_off(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python("-c", CODE, env={"HF_MPS_GUARDS": "-checkpoint-rng,-non-blocking"})
    assert done.stdout.splitlines() == ["['checkpoint-rng', 'non-blocking']", "False"], done.stderr


@pytest.mark.rotated("/")
def test_a_mistyped_guard_leaves_every_guard_on(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python("-c", CODE, env={"HF_MPS_GUARDS": "-checkpoint-rgn"})
    assert "did you mean 'checkpoint-rng'?; every guard stays on" in done.stderr
    assert done.stdout.splitlines() == ["[]", "True"]


@pytest.mark.rotated("/")
def test_nothing_is_guarded_where_there_is_no_metal(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python("-c", CODE, env={"HF_MPS_SIMULATE": None})
    assert done.stdout.splitlines() == ["[]", "False"], done.stderr


@pytest.mark.rotated("/")
@pytest.mark.parametrize("module", ["sentinels.stream", "numerics.products", "platform.batches"])
def test_a_file_of_theirs_that_is_imported_before_torch_leaves_all_armed(module: str, run_python) -> None:
    code = (
        f"import hf_mps.layer.guards.{module}, torch\n"
        "from hf_mps.layer.guards.catalogue import GUARDS, registry, SENTINELS\n"
        "print({name for each in (GUARDS, SENTINELS) for name in each.after['torch']}"
        " - {each.name for kind in ('guard', 'sentinel') for each in registry().made(kind) if not each.failure})"
    )
    done = run_python("-c", code)
    assert (done.stdout, done.stderr) == ("set()\n", "")
