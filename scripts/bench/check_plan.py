"""How near the planned memory peak comes to the one that the simulated device measures, for models and settings.

    HF_MPS_SIMULATE=1 python scripts/bench/check_plan.py [--within 0.01]
    HF_MPS_SIMULATE=1 python scripts/bench/check_plan.py --layers [NAME …]

Each row plans a step from fake tensors, then takes the same steps with random weights and asks the device for its peak.
Exit code 1 where one is further off than `--within`.

--layers compares the plan that follows a few layers of a model with the one that follows all, of each architecture (or
the named ones) whose default size has layers of several kinds, or several lists of them: two rows of 16 tokens, whose
gradients outweigh the activations. An architecture that cannot be planned so is left out.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from hf_mps.finetune.recipe.overrides import of_values
from hf_mps.tools.dryrun.memory import fit

DECODER = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 704}
DECODER |= {"vocab_size": 16000}
SIZES: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024},
    "distilbert": {"dim": 256, "n_layers": 4, "n_heads": 4, "hidden_dim": 1024},
    "llama": {**DECODER, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 16000},
    # Weights that outweigh what a short batch makes of them.
    "bert-wide": {
        "model_type": "bert",
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 60000,
    },
    "gpt2-wide": {"model_type": "gpt2", "n_embd": 256, "n_layer": 2, "n_head": 4, "vocab_size": 60000},
    "llama-wide": {
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 704,
        "vocab_size": 60000,
    },
    "mixtral": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "num_local_experts": 4,
        "vocab_size": 4000,
    },
    "qwen2_5_vl": {
        "text_config": {
            **DECODER,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
        },
        "vision_config": {
            "depth": 4,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 4,
            "out_hidden_size": 256,
            "fullatt_block_indexes": [3],
        },
    },
    "idefics3": {
        "text_config": {**DECODER, "model_type": "llama", "pad_token_id": 0},
        "vision_config": {
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 256,
            "image_size": 128,
            "patch_size": 16,
        },
        "scale_factor": 4,
    },
    # Enough layers that a plan traces a few of each kind.
    "gpt2-deep": {"model_type": "gpt2", "n_embd": 256, "n_layer": 14, "n_head": 4, "vocab_size": 4000},
    "gemma3-deep": {
        **DECODER,
        "model_type": "gemma3_text",
        "num_hidden_layers": 20,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "sliding_window": 64,
        "vocab_size": 4000,
    },
    "zamba-deep": {
        **DECODER,
        "model_type": "zamba",
        "num_hidden_layers": 22,
        "num_key_value_heads": 4,
        "n_mamba_heads": 2,
        "vocab_size": 4000,
    },
    "t5": {"d_model": 256, "num_layers": 3, "num_heads": 4, "d_ff": 1024, "d_kv": 64, "decoder_start_token_id": 0},
}
CLASSIFY = ("text-classification", "columns: {text: sentence1, text_pair: sentence2}")
CONTINUE = ("causal-lm", "columns: {text: text}")
FILL = ("masked-lm", "columns: {text: text}")
SEE = ("image-text", "columns: {image: image, question: question, answer: answer}")
SUMMARIZE = ("summarization", "columns: {source: document, target: summary}")


class Pair(NamedTuple):
    """A model, its task (with the columns of its data), the rows and tokens of a batch, and the overrides.

    `within` is what is allowed of this one, where that is more than of the others.
    """

    model: str
    task: tuple[str, str]
    rows: int
    length: int | None
    overrides: tuple[str, ...] = ()
    within: float = 0.0


CHECKPOINTING, BF16 = (override.word for override in of_values(fit.CHECKPOINTING | fit.BF16).values())
LORA = "lora={r: 8}"
NF4, INT8 = "quantization=nf4", "quantization=int8"
BLOCKS = "attention=blockwise"
PAIRS = (
    Pair("bert", CLASSIFY, 16, 128),
    Pair("bert", CLASSIFY, 64, 64),
    Pair("bert", CLASSIFY, 16, 128, (CHECKPOINTING,)),
    Pair("bert", CLASSIFY, 16, 128, (BF16,)),
    Pair("distilbert", CLASSIFY, 8, 256, ("training.optim=adafactor",)),
    Pair("llama", CONTINUE, 4, 256),
    Pair("llama", CONTINUE, 4, 256, (CHECKPOINTING,)),
    Pair("llama", CONTINUE, 4, 256, (LORA,)),
    Pair("llama", CONTINUE, 4, 256, (LORA, CHECKPOINTING)),
    Pair("llama", CONTINUE, 4, 256, (LORA, BF16)),
    Pair("llama", CONTINUE, 4, 256, (LORA, NF4)),
    Pair("llama", CONTINUE, 4, 256, (LORA, NF4, CHECKPOINTING, "weights=bfloat16")),
    Pair("llama", CONTINUE, 4, 256, (LORA, INT8)),
    Pair("llama-wide", CONTINUE, 1, 16, (LORA, NF4)),
    Pair("bert", CLASSIFY, 2, 512, (BLOCKS,)),
    Pair("llama", CONTINUE, 2, 512, (BLOCKS, CHECKPOINTING)),
    Pair("llama", CONTINUE, 2, 512, (BLOCKS, BF16)),
    Pair("t5", SUMMARIZE, 2, 256, (BLOCKS,)),
    Pair("gpt2", CONTINUE, 8, 128),
    Pair("gpt2", CONTINUE, 2, 128, ("training.gradient_accumulation_steps=4",)),
    Pair("t5", SUMMARIZE, 4, 128),
    Pair("mixtral", CONTINUE, 4, 128),
    Pair("qwen2_5_vl", SEE, 4, 256),
    Pair("qwen2_5_vl", SEE, 4, 256, (LORA, CHECKPOINTING)),
    Pair("idefics3", SEE, 4, 256, (LORA,)),
    Pair("bert-wide", CLASSIFY, 1, 16),
    Pair("bert-wide", FILL, 1, 32, ("training.max_grad_norm=0",)),
    Pair("bert-wide", CLASSIFY, 1, 16, ("training.gradient_accumulation_steps=4",)),
    Pair("gpt2-wide", CONTINUE, 1, 16),
    Pair("gpt2-wide", CONTINUE, 1, 16, ("training.max_grad_norm=0",)),
    Pair("gpt2-wide", CONTINUE, 1, 16, ("training.optim=adamw_torch",)),
    Pair("gpt2-wide", CONTINUE, 1, 16, ("training.optim=sgd",)),
    Pair("gpt2-wide", CONTINUE, 1, 16, ("training.optim=adafactor",)),
    Pair("gpt2-wide", CONTINUE, 1, 16, ("optimizations=false",)),
    Pair("llama-wide", CONTINUE, 1, 16),
    Pair("llama-wide", CONTINUE, 1, 16, (BF16,)),
    Pair("llama-wide", CONTINUE, 1, 16, (LORA,)),
    Pair("llama-wide", CONTINUE, 1, 16, (LORA, "training.optim=adamw_torch")),
    *(
        Pair(name, CONTINUE, rows, length, settings, within)
        # Zamba's plans are up to 2 % above, in a trace of all its layers too.
        for name, within in (("gpt2-deep", 0.0), ("gemma3-deep", 0.0), ("zamba-deep", 0.02))
        for rows, length, settings in ((1, 16, ()), (4, 128, (CHECKPOINTING,)), (2, 64, (LORA,)))
    ),
)


def main() -> int:
    """Print the table and return the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--within", type=float, default=0.01)
    arguments.add_argument("--layers", nargs="*", metavar="NAME")
    asked = arguments.parse_args()
    if asked.layers is not None:
        return by_layers(asked.layers, asked.within)
    import measured_on

    from hf_mps.layer import guards
    from hf_mps.tools.dryrun import metal_device

    device = metal_device()
    guards.get("large-k").verdict()  # its trial takes 83 MB, once in a process: no part of a step
    print(measured_on.line())
    warnings.simplefilter("ignore")
    worst, beyond = 0.0, 0
    print(f"{'model':<11} {'task':<20} {'rows':>4} {'tokens':>6} {'planned':>9} {'measured':>9} {'off':>6}  settings")
    with tempfile.TemporaryDirectory() as folder:
        for pair in PAIRS:
            planned, measured = both(pair, Path(folder), device)
            off = planned / measured - 1
            worst = max(worst, abs(off))
            beyond += abs(off) > max(asked.within, pair.within)
            settings = " ".join(pair.overrides).replace("training.", "")
            print(
                f"{pair.model:<11} {pair.task[0]:<20} {pair.rows:>4} {pair.length or '':>6} {planned / 2**20:>5.0f} MiB"
                f" {measured / 2**20:>5.0f} MiB {off:>+6.2%}  {settings}",
                flush=True,
            )
    print(f"\n{len(PAIRS)} pairs, the furthest {worst:.2%} off; {beyond} further off than allowed")
    return int(beyond > 0)


def by_layers(names: Sequence[str], within: float) -> int:
    """Print each architecture's peak by a few layers and by all of them, and return the exit code."""
    import torch
    import transformers

    from hf_mps.core.errors import RunError, UserError
    from hf_mps.finetune import tasks
    from hf_mps.tools.dryrun import layers, metal_device
    from hf_mps.tools.dryrun.memory import plan
    from hf_mps.tools.dryrun.resolve import resolve_target

    metal_device()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
    import architectures

    cut, found = layers.cut, list[float]()
    shape = ["training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=1"]
    print(f"{'architecture':<24} {'few layers':>14} {'all':>14} {'off':>7}")
    for name, row in architectures.table().items():
        if not row.works or (names and name not in names):
            continue
        with tempfile.TemporaryDirectory() as folder, architectures.quiet():
            try:
                config = transformers.AutoConfig.for_model(name)
                with torch.device("meta"):
                    model = getattr(transformers, tasks.find(row.task).auto_class).from_config(config)
                few = cut(model)
                if few is None or (len(few.more) < 2 and len(few.base) < 2 and len(next(iter(few.base.values()))) < 4):
                    continue
                config.save_pretrained(folder)
                target = resolve_target(folder, shape, row.task)
                length = None if row.task in architectures.WITHOUT_LENGTH else architectures.LENGTH
                planned = plan.estimate(target, length=length).bytes
                with patch.object(layers, "cut", lambda *_: None):
                    whole = plan.estimate(target, length=length).bytes
            except (UserError, RunError, ValueError, TypeError):  # of a default configuration that is none
                continue
        found.append(planned / whole - 1)
        print(f"{name:<24} {planned / 2**20:>10.0f} MiB {whole / 2**20:>10.0f} MiB {found[-1]:>+7.2%}", flush=True)
    near = sum(abs(off) < 0.0001 for off in found)
    print(f"\n{len(found)} architectures, {near} within 0.01%, the furthest {max(found, key=abs, default=0):+.2%} off")
    return int(max(map(abs, found), default=0) > within)


def both(pair: Pair, folder: Path, device: Any) -> tuple[int, int]:
    """The planned and the measured peak of a pair, in bytes."""
    import torch

    from hf_mps.metal import simulator
    from hf_mps.tools.dryrun import prepare
    from hf_mps.tools.dryrun.memory import trace
    from hf_mps.tools.dryrun.resolve import resolve_target

    target = resolve_target(str(recipe(pair, folder)), pair.overrides)
    with prepare.weightless(target) as parts:
        planned = trace.Tracer(parts, device, pair.length)(pair.rows).bytes
    gc.collect()
    before = torch.mps.current_allocated_memory()
    with prepare.weightless(target, "cpu") as parts:
        step = prepare.step(parts, device, fake=False, **shape(parts, pair))
        simulator.reset_peak_memory()
        step.run(trace.STEPS)
    measured = simulator.peak_memory() - before
    del parts, step
    gc.collect()
    return planned, measured


def shape(parts: Any, pair: Pair) -> dict[str, Any]:
    """The rows of the pair's batch, and how wide they are."""
    from hf_mps.tools.dryrun import batch

    return {"rows": pair.rows, "wide": batch.width(parts.recipe, parts.prepared, pair.length)}


def recipe(pair: Pair, folder: Path) -> Path:
    """A recipe file for the pair's task, with a folder that holds the model's configuration."""
    from transformers import AutoConfig

    AutoConfig.for_model(**{"model_type": pair.model, **SIZES[pair.model]}).save_pretrained(folder / pair.model)
    task, columns = pair.task
    length = f"max_length: {pair.length}\n" if pair.length else ""
    (folder / "rows.json").write_text("{}\n", encoding="utf-8")
    path = folder / "pair.yaml"
    path.write_text(
        f"task: {task}\nmodel: {pair.model}\n{length}data:\n  files: {{train: rows.json, validation: rows.json}}\n"
        f"  {columns}\ntraining:\n  per_device_train_batch_size: {pair.rows}\n",
        encoding="utf-8",
    )
    return path


if __name__ == "__main__":
    sys.exit(main())
