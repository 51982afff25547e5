"""Tokenizers trained on the spot, of the kinds that the architectures have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_mps.finetune.smoke.families import Words

VOCABULARY = 400
# What a tokenizer cuts to where it is not told: that of the encoders; a decoder's is left to its positions.
LONGEST: dict[str, int] = {"wordpiece": 512, "sentence": 1024, "pieces": 512, "bytes": 32768, "chat": 32768}
# Qwen's and SmolLM's format of a conversation (ChatML): github.com/openai/openai-python/blob/release-v0.28.0/chatml.md
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Each kind's special words by their roles, in the order of their numbers.
SPECIAL: dict[str, dict[str, str]] = {
    "wordpiece": {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "sentence": {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"},
    "bytes": {"eos": "<|endoftext|>"},
    "chat": {"pad": "<|endoftext|>", "bos": "<|im_start|>", "eos": "<|im_end|>"},
    "pieces": {"pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"},
}
SAMPLE = "The quick brown fox jumps over the lazy dog, 0123456789 times; isn't that so? (Yes!)"


def train(kind: Words, texts: Sequence[str], *, parts: bool) -> Any:
    """A tokenizer of transformers with at most VOCABULARY words, learned from `texts`.

    With `parts` it tells the model which of two texts each word is of (token_type_ids).
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    roles = SPECIAL[kind]
    special = list(roles.values())
    makers: dict[str, tuple[Any, Any, Any, Any]] = {
        "wordpiece": (
            Tokenizer(models.WordPiece(unk_token="[UNK]")),
            trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False),
            pre_tokenizers.BertPreTokenizer(),
            decoders.WordPiece(),
        ),
        "pieces": (
            Tokenizer(models.Unigram()),
            trainers.UnigramTrainer(
                vocab_size=VOCABULARY, special_tokens=special, unk_token="<unk>", show_progress=False
            ),
            pre_tokenizers.Metaspace(),
            decoders.Metaspace(),
        ),
    }
    in_bytes = (
        Tokenizer(models.BPE()),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    words, trainer, before, after = makers.get(kind, in_bytes)
    words.pre_tokenizer, words.decoder = before, after
    if kind == "wordpiece":
        words.normalizer = normalizers.BertNormalizer(lowercase=False)
    words.train_from_iterator([*texts, SAMPLE], trainer)
    if (around := _around(kind)) is not None:
        single, pair = around
        numbers = [(word, words.token_to_id(word)) for word in special]
        words.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=numbers)
    elif kind in ("bytes", "chat"):
        words.post_processor = processors.ByteLevel(trim_offsets=False)
    names = ["input_ids", "attention_mask"]
    made = PreTrainedTokenizerFast(
        tokenizer_object=words,
        model_max_length=LONGEST[kind],
        model_input_names=[*names, "token_type_ids"] if parts else names,
        **{f"{role}_token": word for role, word in roles.items()},
    )
    if kind == "chat":
        made.chat_template = CHATML
    return made


def letters(texts: Sequence[str], folder: Path) -> dict[str, Any]:
    """Write the processor of a wav2vec2 checkpoint, one word a letter, and return what its configuration says."""
    import json

    from transformers import Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2Processor

    alphabet = sorted({letter for text in [*texts, SAMPLE] for letter in text.upper() if letter.isalpha()})
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", "|", *alphabet, "'"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    tokenizer = Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
    Wav2Vec2Processor(Wav2Vec2FeatureExtractor(), tokenizer).save_pretrained(folder)
    return {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}


def _around(kind: Words) -> tuple[str, str] | None:
    """The special words around one text and around a pair, with the number of each part."""
    return {
        "wordpiece": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
        "sentence": ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
        "pieces": ("$A </s>", "$A </s> $B </s>"),
    }.get(kind)
