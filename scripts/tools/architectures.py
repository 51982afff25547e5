"""What `hf-mps plan` and `hf-mps audit` say of every architecture of transformers that a task of ours trains.

    python scripts/tools/architectures.py [NAME …]
    python scripts/tools/architectures.py --times times.json --jobs 8 [NAME …]

Writes docs/architectures.json and its summary, docs/architectures.md; with names, only the rows of these. Each
architecture is given as a folder with nothing but a small configuration, as a person may have one.

--times measures instead how long `plan` and `audit` take of every recipe and of TIMED architectures in the size that
their configurations have by default (or of the named ones), each in a process; a JSON file has seconds by the clock and
of the processor, the exit code, and the last line of what failed. It is written after each; --jobs measures so many at
once. At the end it prints a table of the processor's seconds, the slowest first.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hf_mps.finetune.recipe import catalogue
from hf_mps.finetune.smoke import processors

# The task that an architecture is looked at with: the first whose mapping in transformers has it, but for OTHERWISE.
# Models of sound are in those of texts as well, and come before them. No task of ours classifies sound: what such a
# model is answered stands in the table as well.
TASKS = {
    "masked-lm": "MODEL_FOR_MASKED_LM",
    "speech-seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "summarization": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "causal-lm": "MODEL_FOR_CAUSAL_LM",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION",
    "image-segmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION",
    "object-detection": "MODEL_FOR_OBJECT_DETECTION",
    "speech-recognition": "MODEL_FOR_CTC",
    "text-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION",
    "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION",
    "question-answering": "MODEL_FOR_QUESTION_ANSWERING",
    "multiple-choice": "MODEL_FOR_MULTIPLE_CHOICE",
    "image-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
}
ELSEWHERE = {"MODEL_FOR_AUDIO_CLASSIFICATION": "speech-recognition"}
OTHERWISE = {"segformer": "image-segmentation", **dict.fromkeys(processors.KINDS, "image-text")}
"""What a recipe of ours trains otherwise than the first mapping says."""
WITHOUT_LENGTH = (
    "image-classification",
    "image-segmentation",
    "object-detection",
    "speech-recognition",
    "speech-seq2seq",
)
ROWS, LENGTH = 2, 16
VERBS, RECIPE = ("plan", "audit"), "recipe"
TIMED, LIMIT = 60, 600
"""Architectures whose plan and audit are timed, and the seconds after which one is ended."""
WORDS = {"vocab_size": 1000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DOCS = Path(__file__).resolve().parents[2] / "docs"
DATA, PAGE = DOCS / "architectures.json", DOCS / "architectures.md"
HEAD = """# Architectures

<!-- Written by scripts/tools/architectures.py; change the code, not this file. -->

`hf-mps plan` and `hf-mps audit` were asked about {count} architectures of transformers {version} that a task of this
project trains; {works} are planned and audited. Each was given as a small configuration alone: no weights, no
tokenizer, no Mac. [architectures.json](architectures.json) has every architecture with the peak of a training step of
{rows} rows (of {length} tokens, 20 seconds of sound, or pictures of the size that the configuration names), the
operators without a Metal kernel, which the CPU runs, or the line that refuses it.
`python scripts/tools/architectures.py NAME` measures one anew; tests hold that the file still says what the verbs say.

An architecture is listed with one task. sentence-embeddings, sparse-embeddings and rerank train the encoders of
masked-lm too, and sft, distill, dpo, orpo, kto and grpo the decoders of causal-lm. The models of images and text
(image-text) are those whose processor this project can make without a download.
"""


class Row(NamedTuple):
    """An architecture by its `model_type`, the task, and what was said: peak and missing operators, or a line."""

    name: str
    task: str
    peak: str
    missing: str

    @property
    def works(self) -> bool:
        return not self.peak.startswith("exit")


def architectures() -> dict[str, str]:
    """Every model_type in transformers' mappings, with the task that it is looked at with."""
    from transformers.models.auto import modeling_auto as auto

    found: dict[str, str] = {}
    for task, mapping in [*TASKS.items(), *((task, mapping) for mapping, task in ELSEWHERE.items())]:
        for name in sorted(getattr(auto, f"{mapping}_MAPPING_NAMES")):
            if task != "image-text" or name in OTHERWISE:
                found.setdefault(name, OTHERWISE.get(name, task))
    return found


def row(name: str, task: str, folder: Path) -> Row:
    """Plan and audit the architecture from a configuration in `folder`, both in one step."""
    from hf_mps.core.errors import RunError, UserError
    from hf_mps.metal.operators.table import OperatorSupport
    from hf_mps.tools.dryrun.audit.record import audit_of
    from hf_mps.tools.dryrun.memory import plan
    from hf_mps.tools.dryrun.resolve import resolve_target

    try:
        shape = [f"training.per_device_train_batch_size={ROWS}", "training.gradient_accumulation_steps=1"]
        target = resolve_target(str(written(name, task, folder)), shape, task)
        length = None if task in WITHOUT_LENGTH else LENGTH
        estimate = plan.estimate(target, length=length, record=True)
    except (UserError, RunError) as error:
        return Row(name, task, f"exit {error.exit_code}", str(error).replace(f"{folder}/", ""))
    missing = [f"`{entry.operator}`" for entry in audit_of(name, estimate.recorded, OperatorSupport(), {}).findings]
    return Row(name, task, f"{estimate.bytes / 2**20:.1f} MiB", ", ".join(missing) or "none")


def written(name: str, task: str, folder: Path) -> Path:
    """A folder that holds a small configuration of the architecture, or its own where it cannot be made small."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    from hf_mps.core.errors import UserError
    from hf_mps.finetune import smoke, tasks

    place, kind = folder / name, getattr(transformers, tasks.find(task).auto_class)
    try:
        config, why = smoke.smallest(name, {}, WORDS, kind.from_config)
        if why is not None and "it still has" not in why:
            config = AutoConfig.for_model(name)
        config.save_pretrained(place)
    except (ValueError, TypeError, AttributeError, ImportError, StrictDataclassError) as error:
        raise UserError(f"transformers makes no default configuration of {name}: {type(error).__name__}") from error
    return place


def rows(names: dict[str, str]) -> Iterator[Row]:
    """The rows of some architectures, one after the other."""
    with quiet(), tempfile.TemporaryDirectory() as folder:
        for name, task in names.items():
            yield row(name, task, Path(folder))


@contextmanager
def quiet() -> Iterator[None]:
    """Let nothing but errors be said, and the garbage collector leave what the libraries keep for good alone."""
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    gc.freeze()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gc.unfreeze()
        transformers.logging.set_verbosity(level)


def table() -> dict[str, Row]:
    """The rows that docs/architectures.json has."""
    if not DATA.is_file():
        return {}
    return {name: Row(name, *cells) for name, cells in json.loads(DATA.read_text(encoding="utf-8"))["rows"].items()}


def data(found: dict[str, Row]) -> str:
    """The text of docs/architectures.json for these rows, a line each."""
    import transformers

    lines = (f"    {json.dumps(name)}: {json.dumps(found[name][1:], ensure_ascii=False)}" for name in sorted(found))
    head = f'  "transformers": "{transformers.__version__}",\n  "columns": ["task", "peak", "missing"],\n'
    return "{\n" + head + '  "rows": {\n' + ",\n".join(lines) + "\n  }\n}\n"


def page(found: dict[str, Row]) -> str:
    """The page for these rows: counts by task, and the names of those that are not planned or not wholly on Metal."""
    import transformers

    works = sum(one.works for one in found.values())
    head = HEAD.format(version=transformers.__version__, rows=ROWS, length=LENGTH, count=len(found), works=works)
    lines = [head, "| task | planned | not planned |", "| --- | ---: | --- |"]
    for task in dict.fromkeys((*TASKS, *(one.task for one in found.values()))):
        those = [one for one in found.values() if one.task == task]
        refused = sorted(one.name for one in those if not one.works)
        if those:
            lines.append(f"| {task} | {len(those) - len(refused)} | {', '.join(refused)} |")
    operators: dict[str, list[str]] = {}
    for one in found.values():
        if one.works and one.missing != "none":
            operators.setdefault(one.missing, []).append(one.name)
    lines += ["", "| operators without a Metal kernel | architectures |", "| --- | --- |"]
    lines += [f"| {names} | {', '.join(sorted(those))} |" for names, those in sorted(operators.items())]
    return "\n".join(lines) + "\n"


def times(names: dict[str, str], file: Path, jobs: int) -> None:
    """Write to `file` how long plan and audit of some architectures and recipes take, `jobs` of them at once."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(jobs) as pool:
        each = {}
        for name, task in names.items():
            target = [str(full_size(name, Path(folder))), "--task", task] if task != RECIPE else [name]
            for verb in VERBS:
                words = ["-m", "hf_mps", verb, *target, "--json"]
                each[pool.submit(timed, [sys.executable, *words])] = name, verb
        for done in as_completed(each):
            name, verb = each[done]
            found.setdefault(name, {"task": names[name]})[verb] = done.result()
            print(name, verb, done.result(), sep="  ", flush=True)
            file.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")
    seconds = {name: [each[verb]["processor"] for verb in VERBS] for name, each in found.items()}
    print(f"{'seconds of the processor':<44}{'plan':>7}{'audit':>7}")
    for name in sorted(seconds, key=lambda name: -max(seconds[name])):
        print(f"{name:<44}" + "".join(f"{one:>7.1f}" for one in seconds[name]))


def timed(command: list[str]) -> dict[str, Any]:
    """Run a command; its seconds, exit code (None where it took longer than LIMIT) and what it said last, if it failed.

    In a process that runs nothing else at the same time, which the processor's seconds are taken from.
    """
    before, start, code, told = _processor(), time.perf_counter(), None, f"ended after {LIMIT} s"
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        code, told = ran.returncode, (ran.stderr.strip().splitlines() or [""])[-1]
    except subprocess.TimeoutExpired:
        pass
    seconds = {"clock": time.perf_counter() - start, "processor": _processor() - before}
    rounded: dict[str, Any] = {name: round(value, 1) for name, value in seconds.items()}
    return {**rounded, "exit": code, **({"error": told} if code != 0 else {})}


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def full_size(name: str, folder: Path) -> Path:
    """Return a folder with the architecture's default configuration; without one the command says what is missing."""
    from transformers import AutoConfig

    place = folder / name
    place.mkdir()
    try:
        AutoConfig.for_model(name).save_pretrained(place)
    except Exception as error:  # whatever its class makes of having no arguments
        print(f"{name}: no default configuration: {type(error).__name__}", file=sys.stderr)
    return place


def main() -> int:
    """Write data and page: all rows, or those that were asked for; or the times."""
    from hf_mps.tools.dryrun import metal_device

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="a model_type, or with --times a recipe; default: see above"
    )
    parser.add_argument("--times", type=Path, metavar="JSON", help="measure how long plan and audit take")
    parser.add_argument("--jobs", type=int, default=1, help="with --times, how many at once; default 1")
    given = parser.parse_args()
    every = architectures()
    if given.times:
        every |= {entry.name: RECIPE for entry in catalogue.entries()}
    if unknown := [name for name in given.names if name not in every]:
        parser.error(f"{unknown[0]} is no architecture that a task trains" + " and no recipe" * bool(given.times))
    if given.times:
        # Spread over the alphabet, and so over families and tasks.
        kinds = list(architectures())
        some = given.names or [kinds[place * len(kinds) // TIMED] for place in range(TIMED)] + list(every)[len(kinds) :]
        times({name: every[name] for name in some}, given.times, given.jobs)
        return 0
    metal_device()
    asked = given.names or list(every)
    found = {name: one for name, one in table().items() if every.get(name) == one.task}
    for one in rows({name: every[name] for name in asked}):
        print(*one, sep="  ", flush=True)
        found[one.name] = one
        DATA.write_text(data(found), encoding="utf-8")
        PAGE.write_text(page(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
