"""Functions and classes that went, as the example scripts of transformers 4 import them, and what replaced each.

Data alone: nothing here imports a library. Source: the names that the examples of transformers 4.15.0, 4.20.1, 4.30.2
and 4.46.3 import and that 5.23, huggingface_hub 2.4 and accelerate 1.15 lack.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Old:
    """A name that `places` (modules) had. `thing` is "module:name"; `instead` is the notice, none where it is empty.

    `called` says that the notice comes when the name is called, not when it is imported.
    """

    name: str
    places: tuple[str, ...]
    thing: str
    instead: str = ""
    called: bool = False


_TOP = "transformers"
_UTILS = ("transformers.utils", "transformers.file_utils")
_OURS = "hf_mps.layer.compat.stand_ins"
_TPU = ("transformers.trainer_pt_utils", "transformers.trainer_utils", "transformers.integrations")


def _moved(thing: str, *places: str, called: bool = False, name: str = "") -> Old:
    module, _, new = thing.partition(":")
    return Old(name or new, places, thing, f"{module}.{new} takes its place", called)


def _auto(name: str, thing: str, instead: str) -> Old:
    return Old(name, (_TOP, "transformers.models.auto", "transformers.models.auto.modeling_auto"), thing, instead)


FEATURE_EXTRACTORS = {"ViTFeatureExtractor": "ViTImageProcessor"}
"""Feature extractors of images that became image processors (4.25)."""

NAMES: tuple[Old, ...] = (
    Old("Repository", ("huggingface_hub",), f"{_OURS}:Repository"),
    Old(
        "is_torch_tpu_available",
        (_TOP, "transformers.file_utils", *_TPU),
        f"{_OURS}:is_torch_tpu_available",
        "is_torch_xla_available takes its place",
        called=True,
    ),
    Old(
        "send_example_telemetry",
        (*_UTILS, "transformers.utils.hub"),
        f"{_OURS}:nothing",
        "does nothing, examples report no use",
        called=True,
    ),
    _moved("huggingface_hub:get_full_repo_name", *_UTILS, "transformers.utils.hub", called=True),
    _moved("huggingface_hub:is_offline_mode", *_UTILS, called=True),
    _auto(
        "AutoModelWithLMHead",
        "hf_mps.layer.compat.lm_head:AutoModelWithLMHead",
        "AutoModelForCausalLM, AutoModelForMaskedLM and AutoModelForSeq2SeqLM take its place",
    ),
    _auto(
        "MODEL_WITH_LM_HEAD_MAPPING",
        "hf_mps.layer.compat.lm_head:MODEL_WITH_LM_HEAD_MAPPING",
        "the mappings of the three AutoModelFor…LM take its place",
    ),
    *(
        Old(
            name,
            (_TOP,),
            f"hf_mps.layer.compat.text_datasets:{name}",
            "datasets.load_dataset takes its place",
        )
        for name in ("TextDataset", "LineByLineTextDataset", "LineByLineWithRefDataset")
    ),
    Old(
        "DataCollatorForWholeWordMask",
        (_TOP, "transformers.data.data_collator"),
        "hf_mps.layer.compat.text_datasets:DataCollatorForWholeWordMask",
        "DataCollatorForLanguageModeling(whole_word_mask=True) takes its place",
    ),
    _moved("transformers:PreTrainedTokenizerFast", _TOP, name="BloomTokenizerFast"),
    *(Old(name, (_TOP,), f"{_OURS}:{name}") for name in ("TransfoXLLMHeadModel", "TransfoXLTokenizer")),
    *(
        Old(
            name, (_TOP,), f"hf_mps.layer.compat.feature_extractors:{name}", f"transformers.{processor} takes its place"
        )
        for name, processor in FEATURE_EXTRACTORS.items()
    ),
)

# Attributes of a configuration that it no longer has of itself -> what an unset one read as (transformers 4.46).
CONFIG: dict[str, object] = {
    "bos_token_id": None,
    "decoder_start_token_id": None,
    "do_sample": False,
    "early_stopping": False,
    "finetuning_task": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "prefix": None,
    "repetition_penalty": 1.0,
    "sep_token_id": None,
    "task_specific_params": None,
    "temperature": 1.0,
    "tokenizer_class": None,
    "top_k": 50,
    "top_p": 1.0,
    "torchscript": False,
    "use_bfloat16": False,
}
