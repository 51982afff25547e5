"""What a tiny model reads by: its family, and the tokenizer or processor that is trained on the spot."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from hf_mps.core.errors import UserError
from hf_mps.finetune.tasks import Input, Words

# Names and formats are data: processors.yaml says whose they are.
FACTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
WORDS: dict[str, Words] = {name: kind for kind, names in FACTS["words"].items() for name in names}
TOKENIZERS: dict[Words, dict[str, Any]] = FACTS["tokenizers"]


@dataclass(frozen=True)
class Family:
    """An architecture by transformers' `model_type`, what its model reads, and how its tokenizer makes words.

    `config` is the configuration of a checkpoint that is here, empty where the architecture's defaults have to do.
    `reason` says why it is this one where the model's own architecture is not known.
    """

    name: str
    reads: Input
    words: Words
    config: dict[str, Any]
    reason: str = ""


# ---- texts and sound ----

VOCABULARY = 400
SAMPLE = "The quick brown fox jumps over the lazy dog, 0123456789 times; isn't that so? (Yes!)"


def train(kind: Words, texts: Sequence[str], *, parts: bool) -> Any:
    """Return a transformers tokenizer with at most VOCABULARY tokens, learned from `texts`.

    With `parts` it tells the model which of two texts each token belongs to (token_type_ids).
    """
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    facts, roles = TOKENIZERS[kind], TOKENIZERS[kind]["special"]
    special = list(roles.values())
    tokenizer = {"wordpiece": _word_pieces, "pieces": _sentence_pieces}.get(kind, _bytes)(special, texts)
    if "single" in facts:
        ids = [(word, tokenizer.token_to_id(word)) for word in special]
        shapes = {name: facts[name] for name in ("single", "pair")}
        tokenizer.post_processor = processors.TemplateProcessing(**shapes, special_tokens=ids)
    elif kind in ("bytes", "chat"):
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if parts else [])]
    said = {"model_max_length": facts["longest"], **{f"{role}_token": word for role, word in roles.items()}}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names, **said)
    if kind == "chat":
        wrapped.chat_template = FACTS["chat"]["chatml"]
    return wrapped


def _learned(size: int, normalizer: Any, before: Any, texts: Sequence[str]) -> list[str]:
    """Return at most `size` letters and pieces of words by byte-pair merges, the same in every process."""
    from tokenizers import Tokenizer, models, trainers

    # WordPiece's own trainer numbers pieces as a hash table has them (huggingface/tokenizers, models/bpe/trainer.rs,
    # tokenize_words), and Unigram's adds up scores in another order each time (models/unigram/trainer.rs, finalize).
    learned = Tokenizer(models.BPE())
    learned.normalizer, learned.pre_tokenizer = normalizer, before
    learned.train_from_iterator([*texts, SAMPLE], trainers.BpeTrainer(vocab_size=size, show_progress=False))
    numbers = learned.get_vocab()
    return sorted(numbers, key=numbers.__getitem__)


def _word_pieces(special: list[str], texts: Sequence[str]) -> Any:
    """Return BERT's kind of tokenizer: each piece may begin a word or go on with one."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    normalizer, before = normalizers.BertNormalizer(lowercase=False), pre_tokenizers.BertPreTokenizer()
    pieces = _learned((VOCABULARY - len(special)) // 2, normalizer, before, texts)
    words = [*special, *pieces, *(f"##{piece}" for piece in pieces)]
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizer, before, decoders.WordPiece()
    tokenizer.add_special_tokens(special)
    return tokenizer


def _sentence_pieces(special: list[str], texts: Sequence[str]) -> Any:
    """Return sentencepiece's kind of tokenizer: of a word's cuts into pieces it takes the one of the fewest."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    before = pre_tokenizers.Metaspace()
    pieces = _learned(VOCABULARY - len(special), None, before, texts)
    scores = [*((word, 0.0) for word in special), *((piece, -1.0) for piece in pieces)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=special.index("<unk>")))
    tokenizer.pre_tokenizer, tokenizer.decoder = before, decoders.Metaspace()
    tokenizer.add_special_tokens(special)
    return tokenizer


def _bytes(special: list[str], texts: Sequence[str]) -> Any:
    """Return GPT-2's kind of tokenizer, of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    said: dict[str, Any] = {"vocab_size": VOCABULARY, "special_tokens": special, "show_progress": False}
    trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **said)
    tokenizer.train_from_iterator([*texts, SAMPLE], trainer)
    return tokenizer


def letters(texts: Sequence[str], folder: Path) -> dict[str, Any]:
    """Write the processor of a wav2vec2 checkpoint, a token a letter; return what the configuration says of it."""
    from transformers import Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2Processor

    alphabet = sorted({letter for text in [*texts, SAMPLE] for letter in text.upper() if letter.isalpha()})
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", "|", *alphabet, "'"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    tokenizer = Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
    Wav2Vec2Processor(Wav2Vec2FeatureExtractor(), tokenizer).save_pretrained(folder)
    return {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}


def spoken(texts: Sequence[str], folder: Path, seconds: int) -> dict[str, Any]:
    """Write the processor of a Whisper that takes so many seconds, with every language's token; return what the
    configuration says of it.
    """
    from transformers import WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizer
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    ours = json.loads(_bytes([], texts).to_str())["model"]
    end = "<|endoftext|>"
    tokenizer = WhisperTokenizer(
        vocab=ours["vocab"] | {end: len(ours["vocab"])}, merges=[tuple(pair) for pair in ours["merges"]], pad_token=end
    )
    names = ["startoftranscript", *LANGUAGES, "translate", "transcribe", "startoflm", "startofprev", "nospeech"]
    tokenizer.add_special_tokens({"extra_special_tokens": [f"<|{name}|>" for name in (*names, "notimestamps")]})
    WhisperProcessor(WhisperFeatureExtractor(chunk_length=seconds), tokenizer).save_pretrained(folder)
    start = tokenizer.convert_tokens_to_ids("<|startoftranscript|>")
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
    said = {"suppress_tokens": None, "begin_suppress_tokens": None, "max_source_positions": 50 * seconds}
    return {"vocab_size": len(tokenizer), "decoder_start_token_id": start, **ids, **said}


# ---- images and texts ----

Files = tuple[dict[str, Any], dict[str, Any]]
"""The contents of preprocessor_config.json and of processor_config.json."""

IMAGE = 32
"""Pixels of a side of an image, where a configuration names no size."""
# Squares along an image's longer side, as in SmolVLM-256M's checkpoint.
ACROSS = 4
# Pixels of an image's area at least and at most, as the checkpoints of Qwen2-VL, Qwen2.5-VL and Qwen3-VL have it.
AREA = {"shortest_edge": 3136, "longest_edge": 12_845_056}
QWEN3_AREA = {"shortest_edge": 65_536, "longest_edge": 16_777_216}


def picture(config: Any, default: int = IMAGE) -> tuple[int, int]:
    """Return the height and width in pixels that a configuration names, or `default` where it names none."""
    vision = getattr(config, "vision_config", None)
    size = getattr(config, "image_size", None) or getattr(vision, "image_size", None) or default
    return (int(size), int(size)) if isinstance(size, (int, float)) else (int(size[0]), int(size[1]))


def _in_squares(config: Any) -> Files:
    """Idefics3's and SmolVLM's: a small whole image and squares of it, of the size that the image tower takes."""
    side = picture(config)[0]
    patches = side // int(config.vision_config.patch_size)
    reads = {"size": {"longest_edge": ACROSS * side}, "max_image_size": {"longest_edge": side}}
    return {**reads, "do_image_splitting": True}, {"image_seq_len": (patches // int(config.scale_factor)) ** 2}


def _in_patches(area: dict[str, int], config: Any) -> Files:
    """Qwen-VL's: as many patches as an image has, which is made to have so many pixels."""
    vision = config.vision_config
    reads = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size, "size": area}
    return {**reads, "temporal_patch_size": vision.temporal_patch_size}, {}


def _whole(config: Any) -> Files:
    """LLaVA 1.5's: the middle of an image, in the size that its tower takes, which adds one token."""
    side = picture(config)[0]
    reads = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}, "do_center_crop": True}
    chosen = config.vision_feature_select_strategy
    says = {"patch_size": config.vision_config.patch_size, "vision_feature_select_strategy": chosen}
    return reads, {**says, "num_additional_image_tokens": 1}


@dataclass(frozen=True)
class Kind:
    """How an architecture's processor is made; `marks` are its special tokens by the configuration's keys of them."""

    processor: str
    image_processor: str
    template: str
    files: Callable[[Any], Files]
    marks: Mapping[str, str]
    end: str = "<|im_end|>"
    others: Sequence[str] = ()


# Idefics3's processor writes the place of each square that an image is read in, up to 6 x 6.
SQUARES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
FILES: dict[str, Callable[[Any], Files]] = {
    "idefics3": _in_squares,
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), partial(_in_patches, AREA)),
    "qwen3_vl": partial(_in_patches, QWEN3_AREA),
    "llava": _whole,
}
KINDS = {
    name: Kind(**(facts | {"template": FACTS["chat"][facts["template"]], "files": FILES[name]}))
    for name, facts in FACTS["images"].items()
}
"""Architecture -> how its processor is made: those that the task's recipes name."""


def seeing(family: Family, folder: Path, texts: Sequence[str]) -> dict[str, Any]:
    """Write the processor into `folder`, without its image processor's sizes; return what the configuration says of it.

    Raises UserError for an architecture of another kind.
    """
    if family.name not in KINDS:
        told = f"--smoke: no tiny {family.name} of images and text can be made; allowed: {', '.join(KINDS)}"
        raise UserError(f"{told}; next: model_type=NAME of one of them for a try of the recipe")
    kind = KINDS[family.name]
    tokenizer = train("chat", texts, parts=False)
    squares = SQUARES if kind.files is _in_squares else ()
    tokenizer.add_special_tokens({"additional_special_tokens": [*kind.marks.values(), *kind.others, *squares]})
    tokenizer.eos_token = kind.end
    tokenizer.chat_template = kind.template
    tokenizer.save_pretrained(folder)
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    marks = {key: tokenizer.convert_tokens_to_ids(mark) for key, mark in kind.marks.items()}
    return {**ids, **marks, "vocab_size": len(tokenizer)}


def seeing_images(folder: Path, config: Any) -> None:
    """Write how a model of `config` reads images."""
    kind = KINDS[config.model_type]
    reads, says = kind.files(config)
    reads = {"image_processor_type": kind.image_processor, **reads}
    for name, values in (("preprocessor_config.json", reads), ("processor_config.json", says)):
        (folder / name).write_text(json.dumps({**values, "processor_class": kind.processor}), encoding="utf-8")
