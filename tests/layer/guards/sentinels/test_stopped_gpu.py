"""A GPU that macOS stops is told, ends a recipe's run, and leaves nothing of its step in a checkpoint."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_mps.core.errors import RunError
from hf_mps.layer import guards
from hf_mps.layer.guards import SentinelNotice
from hf_mps.layer.guards.sentinels import stopped_gpu
from hf_mps.layer.guards.sentinels.numbers import refuse
from hf_mps.metal import simulator
from hf_mps.metal.simulator import strictness
from tests.hazards import device
from tests.layer.guards import loops

pytestmark = pytest.mark.skipif(stopped_gpu._raises(), reason="this torch raises an error for it")
LINE = "command buffer exited with error status"


STEPS = 50


def trained(steps: int = STEPS) -> list[float]:
    """The weights after a plain loop that looks at one loss."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 1, device="mps")
    rows = torch.randn(8, 4, device="mps")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss = (layer(rows) - 1).square().mean()
        loss.backward()
        optimizer.step()
        if step == STEPS // 2:
            loss.item()
    return [float(value) for value in layer.weight.detach().cpu().flatten()]


def test_work_that_macos_ends_changes_a_training_and_nobody_says_so(
    capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    with guards.suspended(kind="sentinel"):
        whole = trained()
        with strictness.stopping_gpu(1):
            assert trained() != whole
    assert LINE in capfd.readouterr().err, "Metal's own line is on stderr"
    assert not [each for each in recwarn if issubclass(each.category, SentinelNotice)]


@pytest.fixture
def tried() -> None:
    """What guards try on the device, and wait for, is over."""
    trained(8)


# The first is another sentinel's, after the third step; the others are the stream's, of the loss and of the weights.
@pytest.mark.parametrize("waits", [2, 3, 4, 5])
def test_a_script_is_told_once_and_goes_on(waits: int, tried: None) -> None:
    with strictness.stopping_gpu(waits), pytest.warns(SentinelNotice) as said:
        trained()
    first, *others = [str(each.message) for each in said if issubclass(each.category, SentinelNotice)]
    assert "macOS aborted GPU work, and PyTorch continued with unwritten results" in first
    assert "`caffeinate -is`" in first
    assert not [line for line in others if "macOS" in line], "once; what follows from it other sentinels may see"


def test_a_training_that_nothing_ends_is_as_it_was_without_it(tried: None) -> None:
    def counted() -> tuple[list[float], int, int]:
        with simulator.counted() as counts:
            weights = trained()
        return weights, counts.waits, counts.launches

    with guards.suspended("stopped-gpu"):
        plain, waits, launches = counted()
    weights, waits_too, launches_too = counted()
    assert (weights, waits_too) == (plain, waits), "no step waits for it"
    assert 0 < launches_too - launches <= 2 * STEPS + 8
    assert guards.found() == []


def test_no_checkpoint_holds_a_step_that_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_SENTINELS", "stop")
    settings = {"max_steps": 8, "logging_steps": 500, "save_strategy": "steps", "save_steps": 2}

    def kept(name: str) -> dict[str, bytes]:
        with suppress(RunError):
            loops.trainer(tmp_path / name, **settings).train()
        folders = sorted((tmp_path / name).glob("checkpoint-*"))
        return {each.name: (each / "model.safetensors").read_bytes() for each in folders}

    whole = kept("whole")
    with strictness.stopping_gpu(4), guards.suspended("stopped-gpu", "non-finite"):
        assert {name for name, weights in kept("without").items() if weights != whole[name]}
    with strictness.stopping_gpu(4):
        found = kept("with")
    assert 0 < len(found) < len(whole)
    assert all(weights == whole[name] for name, weights in found.items())
    (said,) = guards.found()
    assert "and PyTorch continued with unwritten results (seen at optimizer step" in said["lines"][0]


def test_an_evaluation_whose_work_is_lost_gives_no_figures(tmp_path: Path) -> None:
    run, rows = loops.trainer(tmp_path), loops.rows()
    whole = run.evaluate(rows)["eval_loss"]
    with strictness.stopping_gpu(1), guards.suspended("stopped-gpu"):
        assert run.evaluate(rows)["eval_loss"] != whole
    with (
        strictness.stopping_gpu(1),
        stopped_gpu.STOPPED_GPU.stopping("less of it"),
        pytest.raises(RunError, match=r"macOS aborted GPU work.*seen in an evaluation\); next: less of it"),
    ):
        run.evaluate(rows)
    assert run.evaluate(rows)["eval_loss"] == whole


def test_a_loss_that_is_nan_for_that_reason_is_said_to_be(tmp_path: Path) -> None:
    run = loops.trainer(tmp_path, max_steps=4)
    run.create_optimizer_and_scheduler(num_training_steps=4)
    run.model.zero_grad()
    batch = {name: value.to("mps") for name, value in next(iter(run.get_train_dataloader())).items()}
    run.model(**batch).loss.backward()  # guards try the device at their first product, and wait for it
    run.optimizer.step()
    with strictness.stopping_gpu(1), stopped_gpu.STOPPED_GPU.stopping("less of it"):
        run.model(**batch).loss.backward()
        with pytest.raises(RunError, match=r"macOS aborted GPU work.*; next: less of it"):
            refuse(run.args, run.state, {"loss": float("nan")}, "a lower rate", run.optimizer)


def test_from_2_15_on_it_has_nothing_to_do() -> None:
    with device.mac(torch="2.15.0"):
        (state,) = [each for each in guards.report().sentinels if each.name == "stopped-gpu"]
        assert (state.state, state.reason) == ("needless", "this torch raises an error for it")
        with simulator.counted() as counts:
            trained(8)
    with guards.suspended("stopped-gpu"), simulator.counted() as without:
        trained(8)
    assert counts.launches == without.launches


def test_a_block_that_ends_before_its_wait_leaves_no_count_behind(capfd: pytest.CaptureFixture[str]) -> None:
    with strictness.stopping_gpu(1000), guards.suspended(kind="sentinel"):
        torch.ones(4, device="mps").sum().item()
    with strictness.on("queued-work", "stopped-gpu"), guards.suspended(kind="sentinel"):
        torch.ones(4, device="mps").sum().item()
    assert LINE in capfd.readouterr().err, "the fault alone begins at the first wait"
