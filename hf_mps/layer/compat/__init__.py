"""Names that older scripts use and that newer libraries removed, a file for each subject.

A file says what replaced its names, tests whether the installed library still has them, and does nothing where it has.
"""

from __future__ import annotations

from functools import partial

from hf_mps.core.import_hooks import Catalogue, of_file

REASON = "names and arguments of older scripts work, each with one line of notice"

# Each file and the modules that it patches, in the order of the files where several patch one function.
_FILES = {
    "accelerator": "accelerate.accelerator",
    "metrics": "datasets evaluate evaluate.loading",
    "auth_token": (
        "datasets.load transformers.configuration_utils transformers.feature_extraction_utils "
        "transformers.generation.configuration_utils transformers.image_processing_base transformers.modeling_utils "
        "transformers.models.auto.auto_factory transformers.models.auto.configuration_auto "
        "transformers.models.auto.feature_extraction_auto transformers.models.auto.image_processing_auto "
        "transformers.models.auto.processing_auto transformers.models.auto.tokenization_auto "
        "transformers.processing_utils transformers.tokenization_utils_base"
    ),
    "objects": (
        "datasets.features.features transformers.configuration_utils transformers.generation.utils "
        "transformers.integrations.integration_utils transformers.modeling_utils transformers.processing_utils "
        "transformers.tokenization_utils_base"
    ),
    "names": (
        "huggingface_hub transformers transformers.data.data_collator transformers.file_utils "
        "transformers.integrations transformers.models.auto transformers.models.auto.modeling_auto "
        "transformers.optimization transformers.processing_utils transformers.trainer_pt_utils "
        "transformers.trainer_utils transformers.utils transformers.utils.hub"
    ),
    "datasets": "datasets.load datasets.table",
    "feature_extractors": "transformers.models.auto.feature_extraction_auto",
    "trainer": "transformers.trainer transformers.trainer_seq2seq",
    "training_arguments": "transformers.hf_argparser transformers.training_args",
}
_MODULES = sorted({module for modules in _FILES.values() for module in modules.split()})
_AFTER = {module: " ".join(file for file, ms in _FILES.items() if module in ms.split()) for module in _MODULES}

SHIMS = Catalogue("shim", _AFTER, "hf_mps.layer.compat.{}".format, partial(of_file, kind="shim", safe=False))
