"""Fused steps in loops that are not transformers' Trainer: Lightning's, and two processes of DDP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

COMMON = """
import json, sys
import torch
from transformers import BertConfig, BertForSequenceClassification
from hf_mps.core.choice import Choice
from hf_mps.layer.fused_step import switch

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
STEPS = 6

def model():
    torch.manual_seed(0)
    nothing = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=12, **SHAPE, **nothing))

def rows(seed):
    return torch.randint(3, 64, (STEPS * 4, 12), generator=torch.Generator().manual_seed(seed))

def both(train):
    found = [train()]
    with switch.running(Choice("on", "a test"), "mps"):
        found.append(train())
    return found
"""

DDP = """
import torch.distributed as dist
import torch.multiprocessing

def train(rank):
    inner = model().to("mps")
    parallel = torch.nn.parallel.DistributedDataParallel(inner, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-3, fused=True)
    losses = []
    for batch in rows(rank).split(4):
        loss = parallel(input_ids=batch.to("mps"), labels=batch[:, 0].to("mps") % 2).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(inner.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), norm.item()]
    return losses

def process(rank, place):
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    found = both(lambda: train(rank))
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(found))

if __name__ == "__main__":
    torch.multiprocessing.spawn(process, (sys.argv[1],), nprocs=2)
"""

LIGHTNING = """
import lightning.pytorch

class Module(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.losses = model(), []

    def training_step(self, batch, number):
        loss = self.model(input_ids=batch, labels=batch[:, 0] % 2).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)

def train():
    module = Module()
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.pytorch.Trainer(
        accelerator="mps", devices=1, max_steps=STEPS, gradient_clip_val=0.2, **dict.fromkeys(off, False)
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows(0), batch_size=4))
    return [float(loss) for loss in module.losses]

print(json.dumps(both(train)))
"""


def losses(run_python: Any, folder: Path, script: str, *arguments: str) -> tuple[list[float], list[float]]:
    """What a loop printed of its steps: as they are, and fused."""
    file = folder / "loop.py"
    file.write_text(COMMON + script)
    done = run_python(file, *arguments, env={"HF_MPS_SIMULATE": "1"})
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr
    stock, fused = json.loads(done.stdout.splitlines()[-1])
    return stock, fused


@pytest.mark.nightly
@pytest.mark.slow
def test_two_processes_of_ddp_learn_alike(run_python: Any, tmp_path: Path) -> None:
    stock, fused = losses(run_python, tmp_path, DDP, str(tmp_path / "meeting"))
    assert len(stock) == 12
    assert fused == pytest.approx(stock, rel=1e-5)


def test_lightnings_trainer_learns_alike(run_python: Any, tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    stock, fused = losses(run_python, tmp_path, LIGHTNING)
    assert len(stock) == 6
    assert fused == pytest.approx(stock, rel=1e-5)
