"""Functions, classes and modules that moved or went, as older scripts import them, and what takes the place of each.

Data alone: nothing here imports a library. Source: the public names of transformers 4.15.0, 4.20.1, 4.30.2 and 4.46.3,
of huggingface_hub 0.12 and of accelerate 0.20, compared with 5.23, 2.4 and 1.15.
"""

from __future__ import annotations

import re
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
_CHECKS = (_TOP, *_UTILS, "transformers.utils.import_utils")
_OURS = "hf_mps.compat.stand_ins"
_TPU = ("transformers.trainer_pt_utils", "transformers.trainer_utils", "transformers.integrations")


def _never(*names: str) -> list[Old]:
    return [Old(name, _CHECKS, f"{_OURS}:never", "is False, there is only PyTorch", called=True) for name in names]


def _always(*names: str) -> list[Old]:
    return [Old(name, _CHECKS, f"{_OURS}:always", "is True in every PyTorch of today", called=True) for name in names]


def _moved(thing: str, *places: str, called: bool = False, name: str = "") -> Old:
    module, _, new = thing.partition(":")
    return Old(name or new, places, thing, f"{module}.{new} takes its place", called)


def _auto(name: str, thing: str, instead: str) -> Old:
    return Old(name, (_TOP, "transformers.models.auto", "transformers.models.auto.modeling_auto"), thing, instead)


# Image models whose feature extractor became an image processor (4.25), and the name of today's where it differs.
_IMAGE_MODELS = (
    *("Beit", "CLIP", "ChineseCLIP", "ConditionalDetr", "ConvNext", "DPT", "DeformableDetr", "DeiT", "Detr", "Donut"),
    *("Flava", "GLPN", "ImageGPT", "LayoutLMv2", "LayoutLMv3", "Levit", "MaskFormer", "MobileNetV1", "MobileNetV2"),
    *("MobileViT", "OwlViT", "Perceiver", "PoolFormer", "Segformer", "ViT", "VideoMAE", "Vilt", "Yolos"),
)
FEATURE_EXTRACTORS = {f"{model}FeatureExtractor": f"{model}ImageProcessor" for model in _IMAGE_MODELS}

NAMES: tuple[Old, ...] = (
    Old("Repository", ("huggingface_hub",), f"{_OURS}:Repository"),
    Old("HfFolder", ("huggingface_hub",), f"{_OURS}:HfFolder", "get_token, login and logout take its place"),
    Old(
        "cached_download",
        ("huggingface_hub",),
        f"{_OURS}:cached_download",
        "huggingface_hub.hf_hub_download takes its place",
        called=True,
    ),
    *_never("is_tf_available", "is_flax_available", "is_tf2onnx_available", "is_keras_nlp_available"),
    *_never("is_tensorflow_text_available", "is_tensorflow_probability_available", "is_keras2onnx_available"),
    *_never("is_ipex_available"),
    *_always(
        "is_safetensors_available", "is_torch_fx_available", "is_torchdynamo_available", "is_torch_sdpa_available"
    ),
    *_always("is_torch_compile_available", "is_torch_bf16_cpu_available"),
    _moved("transformers.utils:is_torch_bf16_gpu_available", *_CHECKS, called=True, name="is_torch_bf16_available"),
    _moved("transformers.utils:is_soundfile_available", *_CHECKS, called=True, name="is_soundfile_availble"),
    Old(
        "is_torch_tpu_available",
        (_TOP, "transformers.file_utils", *_TPU),
        f"{_OURS}:is_torch_tpu_available",
        "is_torch_xla_available takes its place",
        called=True,
    ),
    Old("EvaluationStrategy", ("transformers.trainer_utils",), "transformers.trainer_utils:IntervalStrategy"),
    Old(
        "send_example_telemetry",
        (*_UTILS, "transformers.utils.hub"),
        f"{_OURS}:nothing",
        "does nothing, examples report no use",
        called=True,
    ),
    _moved("huggingface_hub:get_full_repo_name", *_UTILS, "transformers.utils.hub", called=True),
    _moved("huggingface_hub:is_offline_mode", *_UTILS, called=True),
    _moved("functools:cached_property", *_UTILS, "transformers.utils.generic"),
    *(
        _moved("huggingface_hub.constants:HF_HUB_CACHE", *_UTILS, "transformers.utils.hub", name=name)
        for name in ("TRANSFORMERS_CACHE", "PYTORCH_TRANSFORMERS_CACHE", "PYTORCH_PRETRAINED_BERT_CACHE")
    ),
    *(
        _moved(f"transformers.pytorch_utils:{name}", "transformers.modeling_utils")
        for name in ("Conv1D", "apply_chunking_to_forward", "prune_linear_layer")
    ),
    _moved("transformers.utils:ModelOutput", "transformers.modeling_utils"),
    _moved("transformers:PretrainedConfig", "transformers.modeling_utils"),
    *(
        _moved(f"transformers.tokenization_utils_base:{name}", "transformers.tokenization_utils")
        for name in ("BatchEncoding", "PaddingStrategy", "PreTrainedTokenizerBase", "TensorType", "TruncationStrategy")
    ),
    Old(
        "set_caching_enabled",
        ("datasets",),
        f"{_OURS}:set_caching_enabled",
        "enable_caching and disable_caching take its place",
        called=True,
    ),
    Old(
        "is_deepspeed_zero3_enabled",
        ("transformers.trainer",),
        "transformers.integrations:is_deepspeed_zero3_enabled",
    ),
    _auto(
        "AutoModelForVision2Seq",
        "transformers:AutoModelForImageTextToText",
        "transformers.AutoModelForImageTextToText takes its place",
    ),
    _auto(
        "MODEL_FOR_VISION_2_SEQ_MAPPING",
        "transformers:MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING takes its place",
    ),
    _auto(
        "AutoModelWithLMHead",
        "hf_mps.compat.lm_head:AutoModelWithLMHead",
        "AutoModelForCausalLM, AutoModelForMaskedLM and AutoModelForSeq2SeqLM take its place",
    ),
    _auto(
        "MODEL_WITH_LM_HEAD_MAPPING",
        "hf_mps.compat.lm_head:MODEL_WITH_LM_HEAD_MAPPING",
        "the mappings of the three AutoModelFor…LM take its place",
    ),
    *(
        Old(
            name,
            (_TOP,),
            f"hf_mps.compat.text_datasets:{name}",
            "datasets.load_dataset takes its place",
        )
        for name in ("TextDataset", "LineByLineTextDataset", "LineByLineWithRefDataset")
    ),
    Old(
        "DataCollatorForWholeWordMask",
        (_TOP, "transformers.data.data_collator"),
        "hf_mps.compat.text_datasets:DataCollatorForWholeWordMask",
        "DataCollatorForLanguageModeling(whole_word_mask=True) takes its place",
    ),
    _moved(
        "transformers:PreTrainedTokenizerBase",
        _TOP,
        "transformers.tokenization_utils_base",
        name="SpecialTokensMixin",
    ),
    _moved("transformers:PreTrainedTokenizerFast", _TOP, name="BloomTokenizerFast"),
    _moved("transformers:T5Tokenizer", _TOP, name="MT5Tokenizer"),
    _moved("transformers:T5TokenizerFast", _TOP, name="MT5TokenizerFast"),
    *(
        Old(name, (_TOP,), f"{_OURS}:{name}")
        for name in ("TransfoXLConfig", "TransfoXLLMHeadModel", "TransfoXLModel", "TransfoXLTokenizer")
    ),
    *(
        Old(name, (_TOP,), f"hf_mps.compat.feature_extractors:{name}", f"transformers.{processor} takes its place")
        for name, processor in FEATURE_EXTRACTORS.items()
    ),
)

# Modules that are gone -> the module that has their names today.
MODULES: dict[str, str] = {
    "transformers.deepspeed": "transformers.integrations.deepspeed",
    "transformers.generation_beam_search": "transformers.generation",
    "transformers.generation_logits_process": "transformers.generation.logits_process",
    "transformers.generation_stopping_criteria": "transformers.generation.stopping_criteria",
    "transformers.generation_utils": "transformers.generation.utils",
    "transformers.data.datasets": "hf_mps.compat.text_datasets",
    "transformers.data.datasets.language_modeling": "hf_mps.compat.text_datasets",
}

# The same by their form: the flat names of transformers 3, the fast tokenizers' files and the feature extractors'.
_FORMS = (
    (r"transformers\.(modeling|tokenization|configuration)_([a-z0-9_]+?)(_fast)?", r"transformers.models.\2.\1_\2"),
    (r"transformers\.models\.([a-z0-9_]+)\.tokenization_\1_fast", r"transformers.models.\1.tokenization_\1"),
    (r"transformers\.models\.([a-z0-9_]+)\.feature_extraction_\1", r"transformers.models.\1.image_processing_\1"),
)


def module_of_today(gone: str) -> str | None:
    """The module that has the names of the module `gone` today; None for a name that was never transformers'."""
    if gone in MODULES:
        return MODULES[gone]
    for form, today in _FORMS:
        if re.fullmatch(form, gone):
            return re.sub(f"^{form}$", today, gone)
    return None


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
