"""A smoke run: `hf-mps finetune RECIPE --smoke` runs a recipe end to end in less than a minute, without network.

Task, columns, options and the run's files are the recipe's own. The model is a tiny one of the same architecture with
random weights: of its configuration's sizes as many are made small as fit together. The tokenizer is trained on the
spot, and the task makes up the rows.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.text import summary
from hf_mps.finetune import tasks
from hf_mps.finetune.models import checkpoint
from hf_mps.finetune.models.checkpoint import model_type
from hf_mps.finetune.recipe.overrides import OF_A_SOURCE
from hf_mps.finetune.recipe.resolve import ResolvedRecipe
from hf_mps.finetune.recipe.schema import SOURCES, Recipe
from hf_mps.finetune.run.logging import errors_only, no_bars
from hf_mps.finetune.smoke import processors

SHOWS = "--smoke shows that everything runs, on made-up rows: no score counts"
STEPS = 6
BATCH = 4
# Made-up rows are short: a block of more than LONGEST tokens would be mostly padding, or need very many rows.
LONGEST, SHORT, SHORT_TARGET = 512, 128, 32
TEACHER = "teacher"
"""The key of a second model, which is tiny too, and of the folder that has it."""
SIDE = 128
"""Pixels of an image's sides where a recipe says them (`image_size`)."""
# The settings of a few steps; the command line overrides them.
TRAINING = {
    "max_steps": STEPS,
    "per_device_train_batch_size": BATCH,
    "per_device_eval_batch_size": BATCH,
    "logging_steps": 1,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "report_to": "none",
}
# The plan's choices that TRAINING makes, with the field that determines each.
SETTLED = {
    "batch": "per_device_train_batch_size",
    "steps": "max_steps",
    "evaluation": "eval_strategy",
    "checkpoints": "save_strategy",
}
# Keys of a long run that would exclude or outlast max_steps.
DROPPED = ("num_train_epochs", "eval_steps", "eval_delay", "save_steps", "warmup_steps", "resume_from_checkpoint")


KEPT = ".smoke"
"""The folder of a kept run's tiny model and rows in its own: hidden, so that nothing sends it to the hub."""


@contextmanager
def smoke_recipe(whole: ResolvedRecipe, *, weights: bool = True) -> Iterator[ResolvedRecipe]:
    """The recipe of a smoke run of `whole`, with its model and rows in a folder that lasts as long as the context.

    Without `weights` that folder holds the tiny model's tokenizer or processor alone, for a model from elsewhere.
    Raises UserError where no tiny model of the architecture can be made.
    """
    import datasets

    task = tasks.find(whole.recipe.task)
    family = family_of(whole.recipe)
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="hf-mps-smoke-")))
        # A smoke run leaves nothing in the user's cache.
        held.enter_context(patch.object(datasets.config, "HF_DATASETS_CACHE", folder / "cache"))
        rows = task.smoke_rows(whole.recipe, folder)
        said = list(texts(rows["train"]))
        with no_bars(), errors_only():
            if weights:
                if not task.smoke_model(whole.recipe, folder / "model"):
                    write(family, folder / "model", said, whole.recipe.seed)
                if hasattr(whole.recipe, TEACHER):
                    write(family, folder / TEACHER, said, whole.recipe.seed + 1)
            else:
                processor(family, folder / "model", said)
        files = {}
        for split, lines in rows.items():
            files[split] = str(folder / f"{split}.jsonl")
            written = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in lines)
            Path(files[split]).write_text(written, encoding="utf-8")
        recipe = type(whole.recipe).model_validate(_values(whole, files, folder))
        smoke = Choice(f"a tiny {family.name}", "; ".join(filter(None, (family.reason, SHOWS))))
        yield dataclasses.replace(whole, recipe=recipe, smoke=smoke)


def family_of(recipe: Recipe) -> processors.Family:
    """Return the family of the recipe's model, or the usual one of its task where nothing here tells the architecture.

    Raises UserError for a folder or a package without a checkpoint.
    """
    task = tasks.find(recipe.task)
    usual, reads = task.family
    config = checkpoint.resolve(recipe.model).stored_config()
    known = model_type(recipe.model, recipe.model_type, config)
    name, reason = known or usual, ""
    if not known:
        unknown = f"nothing here tells the architecture of {recipe.model} (model_type=NAME does)"
        reason = f"{unknown}: {usual} is usual for {recipe.task}"
    words = processors.WORDS.get(name, task.words) if reads == "text" else ""
    return processors.Family(name, reads, words, config if config.get("model_type") == name else {}, reason)


def explain(small: ResolvedRecipe, choices: dict[str, Choice[Any]]) -> None:
    """Give --smoke as the reason of each choice that the smoke run made, and neither recipe nor command line."""
    for name, key in SETTLED.items():
        if name in choices and f"training.{key}" not in small.changed:
            choices[name] = Choice(choices[name].value, "--smoke, which takes a few short steps")
    if not files_stay(small):
        choices["output"] = Choice(choices["output"].value, "--smoke: gone after the run")


def files_stay(small: ResolvedRecipe) -> bool:
    """Whether the run's files stay: those in an `output_dir` that the recipe or the command line names."""
    return Path(small.recipe.output_dir or "") != Path(small.recipe.model).with_name("run")


def keep(small: ResolvedRecipe) -> None:
    """Copy the model and the rows of a smoke run into the folder where its files stay: the verbs read them there."""
    made, run = Path(small.recipe.model).parent, Path(str(small.recipe.output_dir)).expanduser()
    shutil.copytree(made, run / KEPT, ignore=shutil.ignore_patterns("cache"), dirs_exist_ok=True)
    for file in run.rglob("adapter_config.json"):  # peft finds the base model by it
        whole = file.read_text(encoding="utf-8").replace(str(made), str((run / KEPT).resolve()))
        file.write_text(whole, encoding="utf-8")


def texts(value: Any) -> Iterator[str]:
    """Yield every text inside rows, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from texts(list(value.values()))
    elif isinstance(value, Sequence):
        for item in value:
            yield from texts(item)


def _values(whole: ResolvedRecipe, files: dict[str, str], folder: Path) -> dict[str, Any]:
    """Return the recipe's keys with the smoke run's model, files and training in place of its own."""
    values = whole.recipe.model_dump(exclude_none=True, exclude_defaults=True)
    values |= {key: getattr(whole.recipe, key) for key in whole.recipe.TYPED_ALONE}  # which no dump has
    data = {key: value for key, value in values["data"].items() if key not in SOURCES}
    for key in (*(key for keys in SOURCES.values() for key in keys), *(set(OF_A_SOURCE) - {"labels"})):
        data.pop(key, None)
    said = values.get("training", {})
    training = {key: value for key, value in said.items() if key not in DROPPED} | TRAINING
    training |= tasks.find(whole.recipe.task).smoke_arguments
    training["gradient_accumulation_steps"] = min(2, said.get("gradient_accumulation_steps", 1))
    for key in whole.changed:
        section, _, name = key.partition(".")
        if section == "training" and name in said:
            training[name] = said[name]
    if values.get("max_length", 0) > LONGEST and "max_length" not in whole.changed:
        values["max_length"] = SHORT
    if hasattr(whole.recipe, "max_target_length") and "max_target_length" not in values:
        values["max_target_length"] = SHORT_TARGET  # a model that has learned nothing generates as many
    if hasattr(whole.recipe, "image_size") and "image_size" not in whole.changed:
        values["image_size"] = SIDE
    if hasattr(getattr(whole.recipe, "generate", None), "num_inference_steps"):
        values["generate"] = {"num_inference_steps": BATCH, **values.get("generate", {})}
    if TEACHER in values:
        values[TEACHER] = str(folder / TEACHER)
    values.pop("expect", None)
    values.setdefault("output_dir", str(folder / "run"))
    return values | {"model": str(folder / "model"), "data": data | {"files": files}, "training": training}


# The sizes are data: sizes.yaml says why they are as they are.
SIZES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("sizes.yaml").read_text(encoding="utf-8"))
DEPTHS, HEADS, WIDTHS = (
    {name: size for size, names in SIZES[kind].items() for name in names} for kind in ("depths", "heads", "widths")
)
# Pictures of several stages are halved at each: these leave something for the last one.
STAGES, STAGED = ("depths", "hidden_sizes"), {"image_size": 2 * processors.IMAGE, "patch_size": 4}
# Parameters of a model that is still made with numbers: a gigabyte of weights, gradients and moments.
MOST = 60_000_000


def smallest(
    name: str, checkpoint_config: Mapping[str, Any], token_ids: Mapping[str, Any], make: Callable[[Any], Any]
) -> tuple[Any, str | None]:
    """Return the configuration of a tiny `name` and None, or the last one tried and why it does not work.

    `checkpoint_config` is a checkpoint's configuration (empty: the architecture's defaults), `token_ids` what the
    tokenizer determines; `make` builds a model from a configuration. The first configuration wins whose model can be
    built and takes one short input on the device meta. Raises UserError where the installed transformers lacks the
    architecture.
    """
    problem: str | None = "no combination of small sizes that was tried fits together"
    config = None
    for config in candidates(name, checkpoint_config, token_ids):
        problem = problem_with(config, make)
        if problem is None:
            break
    return config, problem


def candidates(name: str, checkpoint_config: Mapping[str, Any], token_ids: Mapping[str, Any]) -> Iterator[Any]:
    """Yield configurations of architecture `name`, smallest first, without those that its own class refuses."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        defaults = AutoConfig.for_model(name).to_dict()
    except ValueError as error:
        raise UserError(f"--smoke: the installed transformers has no architecture '{name}'") from error
    for sizes in (DEPTHS | HEADS | WIDTHS, DEPTHS | WIDTHS, DEPTHS):
        small = _small(defaults, checkpoint_config, sizes)
        for key, value in SIZES["own"].get(name, {}).items():  # what this architecture alone needs
            small[key] = small[key] | value if _is_config(small.get(key)) else value
        known = {key: value for key, value in token_ids.items() if key in defaults or key == "decoder_start_token_id"}
        try:
            yield AutoConfig.for_model(name, **_with_words(small, defaults, token_ids) | known)
        except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError):
            continue


def problem_with(config: Any, make: Callable[[Any], Any]) -> str | None:
    """Return why no model can be made of `config`, or None; it is built on meta and given one short input.

    A forward pass that reads values fails on meta and says nothing about the configuration.
    """
    import torch

    from hf_mps.finetune.smoke.fake import FakeScalars, needs_numbers

    try:
        with torch.device("meta"):
            model = make(config).eval()
        count = sum(parameter.numel() for parameter in model.parameters())
        if count > MOST:
            return f"with few layers it still has {count / 1e6:,.0f} M parameters"
        with torch.no_grad(), FakeScalars():
            model(**inputs(model))
    except Exception as error:
        if not needs_numbers(error):
            return summary(error)
    return None


def inputs(model: Any) -> dict[str, Any]:
    """Return one short row of what `model` reads, on the device meta."""
    import torch

    config, name = model.config, model.main_input_name
    with torch.device("meta"):
        if name == "pixel_values":
            main_input = torch.zeros(1, getattr(config, "num_channels", 3), *processors.picture(config))
        elif name == "input_features" and hasattr(config, "max_source_positions"):  # Whisper takes no other length
            main_input = torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions)
        elif name in ("input_values", "input_features"):
            width: Any = getattr(config, "num_mel_bins", None) or getattr(config, "feat_extract_input_dim", 80)
            main_input = torch.zeros(1, 4000) if name == "input_values" else torch.zeros(1, 64, width)
        else:
            main_input = torch.zeros(1, 8, dtype=torch.long)
        batch = {name: main_input}
        if config.is_encoder_decoder:
            batch["decoder_input_ids"] = torch.zeros(1, 8, dtype=torch.long)
    return batch


def _small(defaults: Mapping[str, Any], stored: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with `sizes` in place of its own, also in the configurations inside it."""
    left_out = (*SIZES["derived"], "architectures", "dtype", "model_type")
    small = {key: value for key, value in stored.items() if key not in left_out and not _is_config(value)}
    for key, value in defaults.items():
        if _is_config(value):
            inner = _small(value, stored.get(key) or {}, sizes)
            small[key] = {"model_type": value["model_type"], **{k: v for k, v in inner.items() if v is not None}}
        elif key in sizes and value is not None:
            current = stored.get(key, value)
            small[key] = [sizes[key]] * len(current) if isinstance(current, (list, tuple)) else sizes[key]
    if any(isinstance(defaults.get(key), (list, tuple)) for key in STAGES):
        small |= {key: size for key, size in STAGED.items() if isinstance(small.get(key), int) and key in sizes}
    return small


def _with_words(small: Mapping[str, Any], defaults: Mapping[str, Any], token_ids: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the tokenizer's ids in the part of it that has a vocabulary (a text tower)."""
    known = {
        key: {name: one for name, one in token_ids.items() if name in defaults[key]}
        for key, value in small.items()
        if _is_config(value) and "vocab_size" in defaults.get(key, {})
    }
    return {key: {**value, **known[key]} if key in known else value for key, value in small.items()}


def _is_config(value: Any) -> bool:
    """Whether a value is the configuration of a part, such as the image or the text tower."""
    return isinstance(value, dict) and "model_type" in value


SPECIAL = ("pad", "bos", "eos", "sep", "cls", "mask", "unk")
# The image processor of each kind of input, as the architectures that are usual for it have it.
PICTURES = {
    "image": "ViTImageProcessor",
    "image and mask": "SegformerImageProcessor",
    "image and boxes": "YolosImageProcessor",
}
PARTS = ("bert", "electra")  # their tokenizers tell the model which of two texts a token belongs to


def write(family: processors.Family, folder: Path, texts: Sequence[str], seed: int) -> None:
    """Write a tiny `family` into `folder`: model, configuration and tokenizer (or processor).

    The tokenizer learns its words from `texts`. Raises UserError for an architecture that the installed transformers
    lacks, and where its configuration cannot be made tiny.
    """
    import torch
    from transformers import set_seed

    config, problem = smallest(family.name, family.config, processor(family, folder, texts, 2), _of_config)
    if problem is not None:
        raise UserError(f"--smoke: no tiny {family.name} can be made of its configuration: {problem}")
    if family.reads in PICTURES:
        image_processor(folder, processors.picture(config), PICTURES[family.reads])
    if family.reads == "image and text":
        processors.seeing_images(folder, config)
    set_seed(seed)
    with torch.device("cpu"):
        model = _of_config(config)
    model.save_pretrained(folder)


def processor(family: processors.Family, folder: Path, texts: Sequence[str], seconds: int = 30) -> dict[str, Any]:
    """Write a tiny `family`'s tokenizer (or processor) into `folder`; return what the configuration says of it.

    A Whisper takes so many `seconds` of sound: one of two trains in a tenth of the time.
    """
    folder.mkdir(parents=True)
    if family.reads in PICTURES:
        image_processor(folder, (processors.IMAGE, processors.IMAGE), PICTURES[family.reads])
        return {}
    if family.reads == "image and text":
        return processors.seeing(family, folder, texts)
    if family.reads == "sound":
        whisper = family.name == "whisper"
        return processors.spoken(texts, folder, seconds) if whisper else processors.letters(texts, folder)
    tokenizer = processors.train(family.words, texts, parts=family.name in PARTS)
    tokenizer.save_pretrained(folder)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id", None) for name in SPECIAL}
    ids: dict[str, Any] = {key: value for key, value in special.items() if value is not None}
    ids["vocab_size"] = len(tokenizer)
    ids["decoder_start_token_id"] = ids.get("bos_token_id", ids.get("pad_token_id"))
    ids["forced_eos_token_id"] = ids.get("eos_token_id")
    # None replaces ids among the architecture's defaults that this vocabulary does not have.
    return ids | {key: None for key in ("bos_token_id", "pad_token_id") if key not in ids}


def tiny_copy(model: Any) -> Any:
    """Return a tiny model of the class of `model`, on the CPU with random weights, for trials that need values.

    None where its configuration cannot be made tiny.
    """
    import torch

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    config, problem = smallest(inner.config.model_type, inner.config.to_dict(), {}, type(inner))
    if problem is not None:
        return None
    with torch.device("cpu"):
        return type(inner)(config)


def _of_config(config: Any) -> Any:
    """Return a model of the class that loads the architecture's hub checkpoints, with the head of their pretraining."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    kinds = {
        "AutoModelForSpeechSeq2Seq": config.model_type in auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        "AutoModelForSeq2SeqLM": config.is_encoder_decoder
        and config.model_type in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForMaskedLM": config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "AutoModelForCausalLM": config.model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForObjectDetection": config.model_type in auto.MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES,
        "AutoModelForImageTextToText": config.model_type in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    return getattr(transformers, next((name for name, fits in kinds.items() if fits), "AutoModel")).from_config(config)


def image_processor(folder: Path, size: tuple[int, int], kind: str | None = None) -> None:
    """Write the preprocessor_config.json of an image processor, for images of `size` (height, width).

    `kind` is its class; None is that of the file which is there.
    """
    file = folder / "preprocessor_config.json"
    settings = {
        "image_processor_type": kind or json.loads(file.read_text(encoding="utf-8"))["image_processor_type"],
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "size": dict(zip(("height", "width"), size, strict=True)),
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 2,
        "rescale_factor": 1 / 255,
    }
    file.write_text(json.dumps(settings), encoding="utf-8")
