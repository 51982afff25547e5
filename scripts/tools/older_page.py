"""The text of docs/older-scripts.md, from the tables that the shims work with; scripts/tools/docs.py writes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from hf_mps.layer.compat import datasets, names, objects, removed_arguments
from hf_mps.metrics import as_evaluate

# What the examples of a release say that the libraries of today do not know; the flags of TrainingArguments besides.
RELEASES: Mapping[str, tuple[str, ...]] = {
    "4.15": (
        *("datasets.load_metric", "transformers.AdamW", "transformers.file_utils.get_full_repo_name"),
        *("transformers.file_utils.is_offline_mode", "huggingface_hub.Repository", "DistributedType.TPU"),
        *(
            "tokenizer.as_target_tokenizer",
            "processor.as_target_processor",
            "accelerator.use_fp16",
            "Trainer(tokenizer=)",
        ),
        *("config.tokenizer_class", "transformers.TransfoXLLMHeadModel", "generate(num_beams=None)", "use_auth_token="),
        *("transformers.AutoModelWithLMHead", "transformers.TextDataset", "transformers.is_torch_tpu_available"),
    ),
    "4.20": (
        *("datasets.load_metric", "transformers.utils.get_full_repo_name", "transformers.utils.send_example_telemetry"),
        *("huggingface_hub.Repository", "DistributedType.TPU", "tokenizer.as_target_tokenizer", "Trainer(tokenizer=)"),
        *("processor.as_target_processor", "accelerator.use_fp16", "config.tokenizer_class", "use_auth_token="),
        *("transformers.ViTFeatureExtractor", "AutoFeatureExtractor for images", "load_dataset(task=)"),
        *("transformers.TransfoXLLMHeadModel", "generate(num_beams=None)", "Accelerator(logging_dir=)"),
        *("transformers.AutoModelWithLMHead", "transformers.TextDataset", "transformers.is_torch_tpu_available"),
    ),
    "4.30": (
        *("is_torch_tpu_available(check_device=)", "transformers.utils.send_example_telemetry", "DistributedType.TPU"),
        *(
            "transformers.utils.get_full_repo_name",
            "huggingface_hub.Repository",
            "load_dataset(task=)",
            "use_auth_token=",
        ),
        *("Trainer(tokenizer=)", "accelerator.use_fp16", "config.tokenizer_class", "generate(num_beams=None)"),
        *("transformers.BloomTokenizerFast", "transformers.TransfoXLLMHeadModel"),
    ),
    "4.46": (
        *("transformers.utils.send_example_telemetry", "transformers.BloomTokenizerFast", "config.tokenizer_class"),
        *("generate(num_beams=None)", "config.decoder_start_token_id", 'features["objects"].feature'),
    ),
}

# What older scripts use and this layer does not bring back, and why.
NOT_COVERED: Mapping[str, str] = {
    "GlueDataset, SquadDataset, glue_processors and transformers.data.processors": "examples before 4.0 alone read "
    "files with them; run_glue.py and run_qa.py of 4.x read the same files through datasets",
    "TextDatasetForNextSentencePrediction, LineByLineWithSOPTextDataset, DataCollatorForSOP": "no example script of "
    "4.15 to 4.46 uses them",
    "the models that went (TransfoXL, MMBT, RetriBERT, …)": "their code is gone with transformers 5",
    "huggingface_hub.Repository and --push_to_hub through it": "it was a git clone; the name can be imported, and "
    "making one says what takes its place",
    "--push_to_hub_organization": "an error, which names hub_model_id",
    "TFAutoModel… and Flax…": "transformers 5 is PyTorch alone",
    "model.greedy_search, beam_search, sample and top_k_top_p_filtering": "generate takes their place; their arguments "
    "have no equal there",
    "model.prune_heads and the model classes' own moved parts": "code that builds on the inside of a model",
    "load_dataset of a data set that is a Python script": "datasets 4 runs none; the hub has most as Parquet now",
}


def lines() -> Iterator[str]:
    """The page, line by line, without its first heading."""
    yield "Scripts of transformers 4 run without a change, with command lines of their time. A name that the installed"
    yield "library has is always its own; each of these says so in one line where it is used."
    yield ""
    yield "`python scripts/tools/old_examples.py FOLDER` runs a release's example scripts offline, on tiny models and"
    yield "made-up rows, and says of each whether it works."
    yield from (
        "",
        "## By release",
        "",
        "What a release's example scripts say that the libraries of today do not know:",
        "",
    )
    yield from _table(("release", "names"), ((release, _code(names)) for release, names in RELEASES.items()))
    yield from ("", "## Flags and TrainingArguments", "")
    yield from ("What takes the place of a removed one:", "")
    yield from (f"- `{old.name}`: {old.instead}" for old in removed_arguments.REMOVED.values())
    yield ""
    for field, values in removed_arguments.VALUES.items():
        yield f"Values of `{field}`: {', '.join(f'`{old}` becomes `{new}`' for old, new in values.items())}."
    yield from ("", "## Names", "")
    yield from (f"- `{name}` of {modules}: {instead}" for name, modules, instead in _names())
    extractors = ", ".join(f"`{name}`" for name in names.FEATURE_EXTRACTORS)
    yield ""
    yield f"Feature extractors of images, each today's image processor with the `size` of their time: {extractors}."
    yield from ("", "## Arguments and attributes", "")
    yield from (f"- {said}: {happens}" for said, happens in _arguments())
    yield from ("", "## Metrics of load_metric", "")
    yield f"Computed with no network: {_code(as_evaluate.names())}. Others are asked of the hub."
    yield from ("", "## Not covered", "")
    yield from (f"- {what}: {why}" for what, why in NOT_COVERED.items())


def _names() -> Iterator[tuple[str, str, str]]:
    kept = [old for old in names.NAMES if old.name not in names.FEATURE_EXTRACTORS]
    for name, group in groupby(kept, key=lambda old: old.name):
        for old in group:
            said = old.instead or ("can be imported and not made" if "compat.names:" in old.thing else f"`{old.thing}`")
            yield name, _code(old.places), said.removesuffix(" takes its place").removesuffix(" take its place")


def _arguments() -> Iterator[tuple[str, str]]:
    yield "`use_auth_token=` of `from_pretrained` and `load_dataset`", "`token=` takes its place"
    for task, columns in datasets.TASKS.items():
        yield f"`load_dataset(task={task!r})`", f"the columns become {_code(columns.values())}"
    yield "`map` that makes numbers of a csv's labels", "they stay numbers where pandas 3 reads texts as large strings"
    yield '`dataset.features["objects"].feature` of a column of dictionaries', "the features of the single rows"
    for name in objects.COUNTS:
        yield f"`generate({name}=None)`", "the default stays"
    yield "`Trainer(tokenizer=)`, `trainer.tokenizer`", "`processing_class`"
    yield (
        "`compute_loss`, `training_step` and `log` overridden as they were",
        "called without the arguments that came later",
    )
    yield "`Accelerator(logging_dir=)`, `accelerator.use_fp16`", "`project_dir`, `mixed_precision`"
    yield "`DistributedType.TPU`", "`DistributedType.XLA`"
    yield (
        _code(f"tokenizer.{name}" for name in objects.METHODS),
        "the tokenizer itself, with `text_target=` for targets",
    )
    yield "`tokenizer.batch_decode` of predictions padded with -100", "read as the padding token"
    yield "`processor.as_target_processor`", "the processor is its tokenizer for a while"
    yield "`model.freeze_feature_extractor`", "`freeze_feature_encoder`"
    yield "`AutoFeatureExtractor.from_pretrained` of an image model", "`AutoImageProcessor`"
    yield _code(f"config.{name}" for name in names.CONFIG), "an unset one reads as in 4.46"


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"| {' | '.join('---' for _ in heads)} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"
