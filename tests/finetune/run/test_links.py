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
from hf_mps.finetune.run import links
from tests.distributed.launching import launch

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
        ({"bandwidth": 1.0}, {}, "link.bandwidth and link.latency belong together; next: hf-mps doctor --peers"),
        ({"compression": "bf16"}, {"fsdp": "full_shard"}, "link.compression is for copies of a whole model"),
        ({"local_steps": 2}, {"fsdp": "full_shard"}, "link.local_steps is for copies of a whole model"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(said: dict[str, Any], training: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        decide(training=training, **said)


def test_two_ranks_train_each_way(tmp_path: Path) -> None:
    ended = launch(2, WORKER, tmp_path, cwd=tmp_path, env={"HF_MPS": "0"})
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert all(sum(found[name]["apart"]) == 0 for name in ("fp16", "bf16", "powersgd"))
    # Rounded gradients train almost the same weights, and not quite: the hook was there. PowerSGD of rank 1 drops more.
    assert 0 < found["fp16"]["off"] < found["bf16"]["off"] < 1e-3
    assert found["bf16"]["off"] < found["powersgd"]["off"] < 0.5
    # Alike after steps 4, 8 and 12, and at 5 and 10, where checkpoints are; the weights stay where they lie.
    alike = [step for step, gap in enumerate(found["local"]["apart"], start=1) if gap == 0]
    assert alike == [4, 5, 8, 10, 12]
    assert found["local"]["places"] == 1
