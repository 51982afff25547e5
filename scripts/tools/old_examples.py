"""Runs the example scripts of an older transformers release, unchanged, with command lines of its time.

python scripts/tools/old_examples.py FOLDER              each run_*.py below FOLDER (a release's examples/)
python scripts/tools/old_examples.py FOLDER --only run_glue run_qa --keep
python scripts/tools/old_examples.py FOLDER --stock      the same without hf_mps

Each script makes two steps on the simulated device (on the real one on a Mac) with tiny random models and made-up rows,
offline. The exit code is 1 where one fails for another reason than a package that is not installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import old_example_world as world

TRAINER = (
    "--do_train --do_eval --max_steps 2 --per_device_train_batch_size 2 --per_device_eval_batch_size 2 --eval_steps 2 "
    "--evaluation_strategy steps --logging_steps 1 --overwrite_output_dir --use_mps_device --report_to none"
)
LOOP = "--max_train_steps 2 --per_device_train_batch_size 2 --per_device_eval_batch_size 2"
IMAGES = "--train_dir images/train --validation_dir images/validation"
UNUSED = "--remove_unused_columns false"
SOUNDS = f"--dataset_name sounds --train_split_name train --eval_split_name validation {UNUSED}"
TEXT = "--train_file text.txt --validation_file text.txt"
PAIRS = "--train_file pairs.csv --validation_file pairs.csv"
WORDS = "--train_file words.json --validation_file words.json"
QUESTIONS = "--train_file questions.json --validation_file questions.json --max_seq_length 64 --doc_stride 16"
ENDINGS = "--train_file endings.json --validation_file endings.json"
SUMMARIES = "--train_file summaries.json --validation_file summaries.json --max_source_length 32 --max_target_length 16"
LANGUAGES = "--source_lang en --target_lang de --max_source_length 32 --max_target_length 16"
TRANSLATION = f"--train_file translation.json --validation_file translation.json {LANGUAGES}"
GENERATE = "--predict_with_generate --num_beams 1"
CAPTIONS = "--train_file captions.json --validation_file captions.json"

# Script -> its model and the words of its own; a script's name says which of TRAINER and LOOP it takes besides.
COMMANDS: dict[str, tuple[str, str]] = {
    "run_audio_classification": ("wav2vec2", f"{SOUNDS} --audio_column_name audio --label_column_name label"),
    "run_classification": ("bert", f"{PAIRS} --text_column_names sentence1,sentence2 --label_column_name label"),
    "run_clip": ("clip", f"{CAPTIONS} --image_column image_path --caption_column caption {UNUSED} --max_seq_length 16"),
    "run_clm": ("gpt2", f"{TEXT} --block_size 32"),
    "run_clm_no_trainer": ("gpt2", f"{TEXT} --block_size 32"),
    "run_fim": ("gpt2", f"{TEXT} --block_size 32"),
    "run_fim_no_trainer": ("gpt2", f"{TEXT} --block_size 32"),
    "run_generation": ("gpt2", "--model_type gpt2 --prompt The --length 4"),
    "run_generation_contrastive_search": ("gpt2", "--prompt The --penalty_alpha 0.6 --k 4 --length 4"),
    "run_glue": ("bert", f"{PAIRS} --max_seq_length 32"),
    "run_glue_no_trainer": ("bert", f"{PAIRS} --max_length 32"),
    "run_image_classification": ("vit", f"{IMAGES} {UNUSED}"),
    "run_image_classification_no_trainer": ("vit", IMAGES),
    "run_language_modeling": ("gpt2", "--train_data_file text.txt --eval_data_file text.txt --block_size 32"),
    "run_mae": ("vit_mae", f"--train_dir images/train {UNUSED} --label_names pixel_values"),
    "run_mim": ("vit", f"--train_dir images/train {UNUSED} --label_names bool_masked_pos --mask_patch_size 8"),
    "run_mim_no_trainer": ("vit", "--train_dir images/train --mask_patch_size 8"),
    "run_mlm": ("bert", f"{TEXT} --max_seq_length 32"),
    "run_mlm_no_trainer": ("bert", f"{TEXT} --max_seq_length 32"),
    "run_ner": ("bert", WORDS),
    "run_ner_no_trainer": ("bert", WORDS),
    "run_plm": ("xlnet", f"{TEXT} --max_seq_length 32"),
    "run_qa": ("bert", QUESTIONS),
    "run_qa_beam_search": ("xlnet", QUESTIONS),
    "run_qa_beam_search_no_trainer": ("xlnet", QUESTIONS),
    "run_qa_no_trainer": ("bert", QUESTIONS),
    "run_seq2seq_qa": ("t5", f"{QUESTIONS} {GENERATE}"),
    "run_speech_recognition_ctc": ("wav2vec2", f"{SOUNDS} --text_column_name text --train_split_name train"),
    "run_summarization": ("t5", f"{SUMMARIES} {GENERATE} --source_prefix summarize:"),
    "run_summarization_no_trainer": ("t5", f"{SUMMARIES} --source_prefix summarize:"),
    "run_swag": ("bert", ENDINGS),
    "run_swag_no_trainer": ("bert", ENDINGS),
    "run_translation": ("t5", f"{TRANSLATION} {GENERATE} --source_prefix translate:"),
    "run_translation_no_trainer": ("t5", f"{TRANSLATION} --source_prefix translate:"),
    "run_xnli": ("bert", "--language en --train_language en --max_seq_length 32"),
}


@dataclass(frozen=True)
class Outcome:
    """What became of one script: `works`, `fails`, `lacks` (a package) or `unknown` (no command line here)."""

    script: str
    state: str
    reason: str
    seconds: float


def command(script: Path, out: Path) -> list[str]:
    """The words after `python SCRIPT`. Raises KeyError for a script that COMMANDS does not have."""
    model, own = COMMANDS[script.stem]
    generation = script.stem.startswith("run_generation")
    both = "" if generation else LOOP if script.stem.endswith("_no_trainer") else TRAINER
    folder = [] if generation else ["--output_dir", str(out)]
    return ["--model_name_or_path", f"models/{model}", *folder, *both.split(), *own.split()]


def run(script: Path, work: Path, stock: bool) -> Outcome:
    """Run one script in `work`, which `world.make` has filled."""
    name = str(script.stem)
    if name not in COMMANDS:
        return Outcome(name, "unknown", "no command line for it in COMMANDS", 0.0)
    words = [sys.executable, str(script), *command(script, work / "out" / name)]
    began = time.perf_counter()
    try:
        done = subprocess.run(
            words, cwd=work, env=_environment(work, stock), capture_output=True, text=True, timeout=600
        )
    except subprocess.TimeoutExpired:
        return Outcome(name, "fails", "no end after 600 s", 600.0)
    (work / "out").mkdir(exist_ok=True)
    (work / "out" / f"{name}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    seconds = time.perf_counter() - began
    if done.returncode == 0:
        return Outcome(name, "works", "", seconds)
    reason = _reason(done.stderr)
    lacking = reason.startswith(("ModuleNotFoundError: No module named", "ImportError: To support"))
    return Outcome(name, "lacks" if lacking else "fails", reason, seconds)


def _environment(work: Path, stock: bool) -> dict[str, str]:
    own = {
        "HF_HOME": str(work / "home"),
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(work / "home" / "modules"),
        "NLTK_DATA": str(work / "nltk_data"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
        "WANDB_DISABLED": "true",
    }
    if stock:
        own |= {"HF_MPS": "0"}
    elif sys.platform != "darwin":
        own |= {"HF_MPS_SIMULATE": os.environ.get("HF_MPS_SIMULATE", "1")}
    return {**os.environ, **own}


def _reason(stderr: str) -> str:
    """The line of the error, without what programs print when they end."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0] or ": error: " in line]
    return (errors or lines or ["nothing on stderr"])[-1][:300]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a release's examples, or one of its folders")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these scripts alone")
    parser.add_argument("--stock", action="store_true", help="without hf_mps, on the CPU")
    parser.add_argument("--keep", action="store_true", help="keep the work folder with each script's output")
    asked = parser.parse_args(arguments)
    scripts = sorted(asked.folder.resolve().rglob("run_*.py"))
    scripts = [script for script in scripts if not asked.only or script.stem in asked.only]
    if not scripts:
        print(f"{asked.folder}: no run_*.py to run; next: a folder such as examples/pytorch", file=sys.stderr)
        return 2
    with _work_folder(asked.keep) as work:
        world.make(work)
        outcomes = []
        for script in scripts:
            outcomes.append(run(script, work, asked.stock))
            last = outcomes[-1]
            print(f"{last.state:8}{last.script:40}{last.seconds:6.1f} s  {last.reason}", flush=True)
    counted = {state: sum(each.state == state for each in outcomes) for state in ("works", "fails", "lacks", "unknown")}
    print(", ".join(f"{count} {state}" for state, count in counted.items()), f"of {len(outcomes)}")
    return 1 if counted["fails"] else 0


@contextmanager
def _work_folder(keep: bool) -> Iterator[Path]:
    work = Path(tempfile.mkdtemp(prefix="old-examples-"))
    if keep:
        print(f"work folder  {work}", flush=True)
    try:
        yield work
    finally:
        if not keep:
            shutil.rmtree(work)


if __name__ == "__main__":
    sys.exit(main())
