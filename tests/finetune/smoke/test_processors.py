"""The tokenizers of tiny models: learned from a run's own rows, and the same ones whenever they are learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_mps.finetune.smoke import processors

# Words that occur once, and letters that occur once: what a trainer that counts in a hash table ties over.
TEXTS = [
    f"the {word} of {other}: {letter}" for word, other, letter in zip("abcdefgh", "stuvwxyz", "&%$#@!?*", strict=True)
]
LEARN = f"""
import json
from hf_mps.finetune.smoke import processors
kinds = {{kind: processors.train(kind, {TEXTS!r}, parts=False) for kind in processors.TOKENIZERS}}
print(json.dumps({{kind: json.loads(each.backend_tokenizer.to_str()) for kind, each in kinds.items()}}, sort_keys=True))
"""


def test_every_process_learns_the_same_ones(run_python: Any) -> None:
    said = [run_python("-c", LEARN, env={"HF_MPS": "0"}).stdout for _ in range(2)]
    assert said[0].startswith("{")
    assert said[0] == said[1]


@pytest.mark.parametrize("kind", processors.TOKENIZERS)
def test_words_that_were_seen_come_back_and_others_are_known_by_their_letters(kind: Any, tmp_path: Path) -> None:
    tokenizer = processors.train(kind, ["a cat sat on the mat", "the cats sat"], parts=False)
    assert len(tokenizer) <= processors.VOCABULARY
    for text in ("the cat sat on a mat", "that comet"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id is None or tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True).strip() == text
    assert len(tokenizer.tokenize("the cat sat")) < len("the cat sat")
