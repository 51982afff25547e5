"""One of several processes: trains plainly under DDP, then with recorded steps, and writes both down.

    torchrun --nproc_per_node 2 -m tests.finetune.cuda_graphs.several FOLDER cpu|cuda CASE…

On the CPU a stand-in takes the place of CUDA's graphs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

from hf_mps.finetune.run import record
from tests.finetune.cuda_graphs.recorders import Rerun, captured, history, trainer, weights

CASES: dict[str, dict[str, Any]] = {
    "a batch a step": {},
    "accumulation with a remainder": {"gradient_accumulation_steps": 2},
    "an optimizer that takes no rate from the device": {"optim": "sgd"},
    "a head beside the step": {},
}


class HeadBeside(BertForSequenceClassification):  # type: ignore[misc]
    """A model with a layer that no batch reaches."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.beside = torch.nn.Linear(3, 3)


def made(case: str) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    # Without dropout: the ranks' random states are not what this is about.
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 32}
    kind = HeadBeside if case == "a head beside the step" else BertForSequenceClassification
    return kind(BertConfig(**sizes, intermediate_size=64))


def kept(parameter: torch.Tensor) -> bool:
    """Whether somebody keeps the node by which the parameter gets its gradient, and the stream that it was made on."""
    node(parameter).metadata["seen"] = True
    return "seen" in node(parameter).metadata


def node(parameter: torch.Tensor) -> Any:
    made = parameter.view_as(parameter).grad_fn
    return made.next_functions[0][0]


def main() -> None:
    folder, cuda = Path(sys.argv[1]), sys.argv[2] == "cuda"
    if cuda:
        from scripts.bench import bench_ranks

        bench_ranks.share_gpu()
    said: dict[str, Any] = {}
    for case in sys.argv[3:]:
        settings = CASES[case] | {"ddp_find_unused_parameters": True, "cuda": cuda}
        plain = trainer(folder / "plain", made(case), **settings)
        plain.train()
        ours = trainer(folder / "ours", made(case), **settings)
        account = captured(ours, recorder=None if cuda else Rerun())
        ours.train()
        weight = next(ours.model.parameters())
        nodes = [kept(weight)]
        mine, theirs = weights(ours), weights(plain)
        apart = max(float((mine[name] - theirs[name]).abs().max()) for name in mine)
        said[case] = {
            "plain": history(plain),
            "ours": history(ours),
            "apart": apart,
            "sum": sum(float(each.double().sum()) for each in mine.values()),
            "replayed": account.replayed,
            "eager": dict(account.eager),
        }
        account.close()
        said[case]["nodes"] = [*nodes, kept(weight)]
        said[case]["waited"] = [record.waited(each, 0) for each in (plain, ours)]
    (folder / f"rank{plain.args.process_index}.json").write_text(json.dumps(said), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
