"""Names that older scripts use and that newer libraries removed, a file for each subject.

A file says what replaced its names, tests whether the installed library still has them, and does nothing where it has.
"""

from __future__ import annotations

from hf_mps.core.import_hooks import Catalogue, of_files

REASON = "names and arguments of older scripts work, each with one line of notice"

_AFTER: dict[str, tuple[str, ...]] = {
    "accelerate.accelerator": ("accelerator",),
    "datasets": ("metrics",),
    "datasets.features.features": ("objects",),
    "datasets.load": ("auth_token", "dataset_task"),
    "evaluate": ("metrics",),
    "evaluate.loading": ("metrics",),
    "datasets.table": ("large_strings",),
    "huggingface_hub": ("names",),
    "transformers": ("names",),
    "transformers.configuration_utils": ("auth_token", "objects"),
    "transformers.data.data_collator": ("names",),
    "transformers.feature_extraction_utils": ("auth_token",),
    "transformers.file_utils": ("names",),
    "transformers.generation.configuration_utils": ("auth_token",),
    "transformers.generation.utils": ("objects",),
    "transformers.hf_argparser": ("training_arguments",),
    "transformers.image_processing_base": ("auth_token",),
    "transformers.integrations": ("names",),
    "transformers.integrations.integration_utils": ("objects",),
    "transformers.modeling_utils": ("auth_token", "objects"),
    "transformers.models.auto": ("names",),
    "transformers.models.auto.auto_factory": ("auth_token",),
    "transformers.models.auto.configuration_auto": ("auth_token",),
    "transformers.models.auto.feature_extraction_auto": ("auth_token", "feature_extractors"),
    "transformers.models.auto.image_processing_auto": ("auth_token",),
    "transformers.models.auto.modeling_auto": ("names",),
    "transformers.models.auto.processing_auto": ("auth_token",),
    "transformers.models.auto.tokenization_auto": ("auth_token",),
    "transformers.optimization": ("names",),
    "transformers.processing_utils": ("auth_token", "objects", "names"),
    "transformers.tokenization_utils_base": ("auth_token", "objects"),
    "transformers.trainer": ("trainer",),
    "transformers.trainer_pt_utils": ("names",),
    "transformers.trainer_seq2seq": ("trainer",),
    "transformers.trainer_utils": ("names",),
    "transformers.training_args": ("training_arguments",),
    "transformers.utils": ("names",),
    "transformers.utils.hub": ("names",),
}


SHIMS = Catalogue("shim", _AFTER, "hf_mps.layer.compat.{}".format, of_files("shim", safe=False))
