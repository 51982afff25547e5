"""Tokenizers trained on the spot, of each kind that the architectures use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_mps.finetune.smoke.families import Words

VOCABULARY = 400
# `model_max_length`: the encoders' own; a decoder's is left to its positions.
LONGEST: dict[str, int] = {"wordpiece": 512, "sentence": 1024, "pieces": 512, "bytes": 32768, "chat": 32768}
# Qwen's and SmolLM's chat format (ChatML): github.com/openai/openai-python/blob/release-v0.28.0/chatml.md
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Each kind's special tokens by their roles, in the order of their ids.
SPECIAL: dict[str, dict[str, str]] = {
    "wordpiece": {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "sentence": {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"},
    "bytes": {"eos": "<|endoftext|>"},
    "chat": {"pad": "<|endoftext|>", "bos": "<|im_start|>", "eos": "<|im_end|>"},
    "pieces": {"pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"},
}
# What a Unigram trainer leaves between the scores of two rare letters, and how near is a multiple of it.
BETWEEN, NEAR = 1e-4, 1e-6
SAMPLE = "The quick brown fox jumps over the lazy dog, 0123456789 times; isn't that so? (Yes!)"


def train(kind: Words, texts: Sequence[str], *, parts: bool) -> Any:
    """Return a transformers tokenizer with at most VOCABULARY tokens, learned from `texts`.

    With `parts` it tells the model which of two texts each token belongs to (token_type_ids).
    """
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    roles = SPECIAL[kind]
    special = list(roles.values())
    tokenizer = _word_pieces(special, texts) if kind == "wordpiece" else _trained(kind, special, texts)
    if (templates := _templates(kind)) is not None:
        single, pair = templates
        special_ids = [(word, tokenizer.token_to_id(word)) for word in special]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special_ids)
    elif kind in ("bytes", "chat"):
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    names = ["input_ids", "attention_mask"]
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=LONGEST[kind],
        model_input_names=[*names, "token_type_ids"] if parts else names,
        **{f"{role}_token": word for role, word in roles.items()},
    )
    if kind == "chat":
        wrapped.chat_template = CHATML
    return wrapped


def _word_pieces(special: list[str], texts: Sequence[str]) -> Any:
    """Return BERT's kind of tokenizer, the same in every process: each piece may begin a word or go on with one.

    Its own trainer numbers the pieces that go on with a word as a hash table has them, and learns others each time
    (huggingface/tokenizers, models/bpe/trainer.rs, tokenize_words).
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    normalizer, before = normalizers.BertNormalizer(lowercase=False), pre_tokenizers.BertPreTokenizer()
    learned = Tokenizer(models.BPE())
    learned.normalizer, learned.pre_tokenizer = normalizer, before
    half = (VOCABULARY - len(special)) // 2
    learned.train_from_iterator([*texts, SAMPLE], trainers.BpeTrainer(vocab_size=half, show_progress=False))
    numbers = learned.get_vocab()
    pieces = sorted(numbers, key=numbers.__getitem__)
    words = [*special, *pieces, *(f"##{piece}" for piece in pieces)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizer, before, decoders.WordPiece()
    tokenizer.add_special_tokens(special)
    return tokenizer


def _trained(kind: Words, special: list[str], texts: Sequence[str]) -> Any:
    """Return a tokenizer of bytes or of sentencepiece's pieces; `special` are its special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    said: dict[str, Any] = {"vocab_size": VOCABULARY, "special_tokens": special, "show_progress": False}
    trainer: Any
    if kind == "pieces":
        tokenizer, trainer = Tokenizer(models.Unigram()), trainers.UnigramTrainer(unk_token="<unk>", **said)
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer, trainer = Tokenizer(models.BPE()), trainers.BpeTrainer(initial_alphabet=alphabet, **said)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([*texts, SAMPLE], trainer)
    if kind == "pieces":
        tokenizer.model = models.Unigram(_in_order(tokenizer, special), unk_id=special.index("<unk>"))
    return tokenizer


def _in_order(tokenizer: Any, special: list[str]) -> list[tuple[str, float]]:
    """Return a Unigram model's pieces with their scores, the same in every process.

    Its trainer adds scores up in another order each time, and gives rare letters, in the order of a hash table, the
    least score of all and BETWEEN more each (huggingface/tokenizers, models/unigram/trainer.rs, finalize).
    """
    found = {word: score for word, score in json.loads(tokenizer.to_str())["model"]["vocab"] if word not in special}
    least = min(found.values())
    steps = {word: (score - least) / BETWEEN for word, score in found.items() if len(word) == 1}
    rare = sorted(word for word, step in steps.items() if abs(step - round(step)) < NEAR)
    found |= {word: least + BETWEEN * number for number, word in enumerate(rare)}
    scores = {word: round(score, 6) for word, score in found.items()}
    known = sorted(scores, key=lambda word: (-scores[word], word))
    return [(word, 0.0) for word in special] + [(word, scores[word]) for word in known]


def letters(texts: Sequence[str], folder: Path) -> dict[str, Any]:
    """Write the processor of a wav2vec2 checkpoint, a token a letter; return what the configuration says of it."""
    from transformers import Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2Processor

    alphabet = sorted({letter for text in [*texts, SAMPLE] for letter in text.upper() if letter.isalpha()})
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", "|", *alphabet, "'"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    tokenizer = Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
    Wav2Vec2Processor(Wav2Vec2FeatureExtractor(), tokenizer).save_pretrained(folder)
    return {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}


def spoken(texts: Sequence[str], folder: Path) -> dict[str, Any]:
    """Write the processor of a Whisper checkpoint with every language's token; return what the configuration says."""
    from transformers import WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizer
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    ours = json.loads(_trained("bytes", [], texts).to_str())["model"]
    end = "<|endoftext|>"
    tokenizer = WhisperTokenizer(
        vocab=ours["vocab"] | {end: len(ours["vocab"])}, merges=[tuple(pair) for pair in ours["merges"]], pad_token=end
    )
    names = ["startoftranscript", *LANGUAGES, "translate", "transcribe", "startoflm", "startofprev", "nospeech"]
    tokenizer.add_special_tokens({"extra_special_tokens": [f"<|{name}|>" for name in (*names, "notimestamps")]})
    WhisperProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)
    start = tokenizer.convert_tokens_to_ids("<|startoftranscript|>")
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
    unsaid = {"suppress_tokens": None, "begin_suppress_tokens": None}
    return {"vocab_size": len(tokenizer), "decoder_start_token_id": start, **ids, **unsaid}


def _templates(kind: Words) -> tuple[str, str] | None:
    """Return the templates with special tokens around one text and around a pair."""
    return {
        "wordpiece": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
        "sentence": ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
        "pieces": ("$A </s>", "$A </s> $B </s>"),
    }.get(kind)
