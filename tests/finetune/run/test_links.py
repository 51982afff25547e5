"""A recipe's `link` section: choices with reasons, combinations that are refused, and each way trained by two ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_mps.core.errors import UserError
from hf_mps.distributed.world import World
from hf_mps.finetune.recipe.schema import LinkSection
from hf_mps.finetune.run import links, shares
from tests.distributed.agents import Agent

WORKER = Path(__file__).with_name("over_links.py")
TWO = World(0, 2, 0, 1)
ALONE = World()


def decide(world: World = TWO, training: dict[str, Any] | None = None, **said: Any) -> dict[str, str]:
    model = torch.nn.Linear(384, 1536)
    return {name: str(one) for name, one in links.decide(LinkSection(**said), training or {}, model, world).items()}


def test_a_recipe_that_says_nothing_of_links_decides_nothing() -> None:
    assert decide() == decide(ALONE) == {}


def test_choices_have_their_reasons() -> None:
    assert decide(compression="bf16") == {
        "compression": "bf16 (gradients are sent as bfloat16, half of the bytes, and rounded to 8 bits)"
    }
    assert decide(ALONE, local_steps=8)["local_steps"].startswith(
        "8 (no other process takes part, so nothing is sent; "
    )


def test_a_link_that_is_given_is_weighed_for_the_ranks_there_are_or_might_be() -> None:
    here = decide(bandwidth=0.95, latency=0.4)
    assert here["link"] == "0.95 Gbit/s, 0.4 ms (the recipe says so)"
    assert here["sent by 2 ranks"] == (
        "2.26 MiB in 21.5 ms (gradients as they are; link.compression=bf16 1.13 MiB in 11.6 ms, link.compression="
        "powersgd 0.0132 MiB in 4.92 ms, link.local_steps=8 0.282 MiB in 2.69 ms; nothing is waited for where a step "
        "computes for 32.3 ms, with bf16 17.3 ms)"
    )
    assert [name for name in decide(ALONE, bandwidth=1.0, latency=1) if "sent" in name] == [
        "sent by 2 ranks",
        "sent by 4 ranks",
    ]


@pytest.mark.parametrize(
    ("said", "training", "words"),
    [
        ({"compression": "fp16", "local_steps": 2}, {}, "local steps send weights whole and no gradients"),
        ({"batches": "measured", "local_steps": 2}, {}, "link.batches deals the rows of a common step"),
        ({"bandwidth": 1.0}, {}, "link.bandwidth and link.latency belong together; next: hf-mps doctor --peers"),
        ({"compression": "bf16"}, {"fsdp": "full_shard"}, "link.compression is for copies of a whole model"),
        ({"local_steps": 2}, {"fsdp": "full_shard"}, "link.local_steps is for copies of a whole model"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(said: dict[str, Any], training: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        decide(training=training, **said)


def test_rows_are_dealt_by_speed_and_everybody_gets_one() -> None:
    assert shares.dealt(32, [100.0, 100.0]) == [16, 16]
    assert shares.dealt(32, [300.0, 100.0]) == [24, 8]
    assert shares.dealt(10, [1.0, 1.0, 1.0]) == [4, 3, 3]
    assert shares.dealt(8, [1000.0, 1.0]) == [7, 1]
    assert all(sum(shares.dealt(32, [1.0, speed, 7.0])) == 32 for speed in (0.01, 0.5, 3.3, 900.0))


def test_an_epoch_in_shares_holds_every_row_once_and_fills_its_last_step() -> None:
    made = list(shares.Shares(range(20), [5, 3], drop_last=False))
    assert [len(one) for one in made] == [5, 3] * 3
    assert [row for one in made for row in one] == [*range(20), 0, 1, 2, 3]
    assert len(shares.Shares(range(20), [5, 3], drop_last=False)) == 6
    assert len(list(shares.Shares(range(20), [5, 3], drop_last=True))) == 4


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, agent: Agent) -> dict[str, dict[str, Any]]:
    """Each way, trained by two ranks."""
    folder = tmp_path_factory.mktemp("links")
    ended = agent.launch(2, WORKER, folder, cwd=folder)
    assert ended.codes == [0, 0], ended.err
    return dict(json.loads(ended.out[0].splitlines()[-1]))


def test_compressed_gradients_train_almost_the_same_weights_on_all_ranks(found: dict[str, Any]) -> None:
    ways = ("plain", "fp16", "bf16", "powersgd")
    assert all(sum(found[name]["apart"]) == 0 for name in ways)
    off = [found[name]["off"] for name in ways]
    assert off[0] < 1e-6 < off[1] < off[2] < 1e-3  # rounded to 11 and to 8 bits: the hook was there
    assert off[2] < off[3] < 0.1  # PowerSGD of rank 1 drops more


def test_local_steps_are_averaged_on_time_and_before_a_checkpoint(found: dict[str, Any]) -> None:
    alike = [step for step, gap in enumerate(found["local"]["apart"], start=1) if gap == 0]
    assert alike == [4, 5, 8, 10, 12]  # and at 5 and 10, where checkpoints are
    assert found["local"]["places"] == 1  # the weights stay where they lie


@pytest.mark.parametrize("way", ["powersgd", "local"])
def test_a_run_that_goes_on_from_a_checkpoint_ends_as_one_that_was_never_stopped(
    way: str, found: dict[str, Any]
) -> None:
    assert found[f"{way} resumed"]["weights"] == found[way]["weights"]


def test_the_loss_of_unequal_batches_is_the_mean_over_all_of_their_labels(found: dict[str, Any]) -> None:
    assert found["shares"]["off"] < 1e-6
    assert found["shares of tokens"]["off"] < 1e-6


def test_measured_shares_are_kept_for_a_run_that_goes_on(found: dict[str, Any]) -> None:
    sizes = found["measured"]["sizes"]
    assert sum(sizes) == 8
    assert min(sizes) >= 1
    assert found["measured"]["stored"] == sizes
    assert found["measured"]["off"] < 1e-6
