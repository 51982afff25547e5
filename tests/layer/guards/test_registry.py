"""The guards can be listed, switched off one by one, and say in one line what they did."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
import transformers.trainer

from hf_mps.core import settings
from hf_mps.core.errors import UserError
from hf_mps.core.releases import torch_release
from hf_mps.layer import guards
from hf_mps.layer.guards import GuardNotice
from hf_mps.layer.guards.catalogue import GUARDS, SENTINELS
from hf_mps.layer.integrations import table
from tests.layer.guards import loops

NAMES = GUARDS.names
KINDS = {"guard": (GUARDS, ("what", "issue", "until")), "sentinel": (SENTINELS, ("what", "why"))}


@pytest.mark.parametrize("kind", KINDS)
def test_every_one_is_complete(kind: str) -> None:
    catalogue, sentences = KINDS[kind]
    for name in catalogue.names:
        found = guards.get(name)
        assert found.name == name
        for sentence in (getattr(found, each) for each in sentences):
            assert sentence
            assert not sentence.endswith(".")
    assert {module for module in catalogue.after if module != "torch"} == {
        module for module, rooms in table().items() if f"{kind}s" in rooms
    }


def test_the_report_has_each_with_state_and_reason() -> None:
    import accelerate

    assert accelerate
    assert transformers
    report = guards.report()
    assert [each.name for each in report.guards] == list(NAMES)
    assert {each.state for each in report.guards} <= {"on", "needless", "acted", "waits"}
    assert [each.name for each in report.sentinels] == list(SENTINELS.names)
    assert {each.state for each in report.sentinels} <= {"on", "needless"}  # torch 2.15 sees to stopped-gpu itself
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


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("guard", "-resume-rgn", r"resume-rgn is no guard; there are .*; did you mean 'resume-rng'"),
        ("guard", "resume-rng", "guards are on by themselves; -resume-rng switches one off"),
        ("sentinel", "-loss-frozn", r"loss-frozn is no sentinel; there are .*; did you mean 'loss-frozen'"),
        ("sentinel", "stopp", r"stopp is no sentinel; .*; stop is the one word .*; did you mean 'stop'"),
        ("sentinel", "loss-frozen", "sentinels are on by themselves; -loss-frozen switches one off"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest(
    kind: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"HF_MPS_{kind.upper()}S", value)
    with pytest.raises(UserError, match=said):
        settings.safeguards_off(kind, KINDS[kind][0].names)


CODE = """
import torch, hf_mps.layer.guards
report = hf_mps.guards.report()
print([state.name for state in (*report.guards, *report.sentinels) if state.state == "off by user"])
print(hasattr(torch.mps, "_initialized"), hasattr(torch.Tensor.backward, "hf_mps_patches"))
"""


@pytest.mark.parametrize(
    ("off", "sentinels", "patched"),
    [(["checkpoint-rng", "non-blocking"], ["gradient-norm", "loss-frozen"], True), ([], list(SENTINELS.names), False)],
    ids=["some", "all sentinels"],
)
def test_the_variables_switch_single_ones_off(off: list[str], sentinels: list[str], patched: bool, run_python) -> None:
    env = {"HF_MPS_GUARDS": off, "HF_MPS_SENTINELS": sentinels}
    said = {name: ", ".join(f"-{each}" for each in reversed(names)) for name, names in env.items()}
    done = run_python("-c", CODE, env=said)
    known = [name for name in sentinels if name != "stopped-gpu" or torch_release() < (2, 15)]  # needless since
    assert done.stdout.splitlines() == [f"{[*off, *known]}", f"{not off} {patched}"], done.stderr


def test_a_mistyped_name_leaves_every_one_on(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python("-c", CODE, env={"HF_MPS_GUARDS": "-checkpoint-rgn", "HF_MPS_SENTINELS": "-loss-frozn"})
    assert "did you mean 'checkpoint-rng'?; every guard stays on" in done.stderr
    assert "did you mean 'loss-frozen'?; every sentinel stays on" in done.stderr
    assert done.stdout.splitlines() == ["[]", "True True"]


def test_nothing_is_guarded_where_there_is_no_metal(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python("-c", CODE, env={"HF_MPS_SIMULATE": None})
    assert done.stdout.splitlines()[0] == "[]", done.stderr
    assert done.stdout.splitlines()[1].startswith("False"), done.stderr


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


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has its own device")
def test_the_report_switches_the_layer_on_where_nothing_has_yet(run_python) -> None:
    done = run_python("-c", "import hf_mps; print(hf_mps.guards.report())")
    assert done.returncode == 0, done.stderr
    states = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()}
    assert states["checkpoint-rng"] == "on"
    assert states["resume-rng"] == "waits"
