"""Configurations of hub models in their real size, for machines that cannot reach the hub. Numbers, no weights."""

from __future__ import annotations

from typing import Any

from hf_mps.choice import Choice
from hf_mps.errors import UserError
from hf_mps.finetune import checkpoint
from hf_mps.finetune.recipe import Recipe
from hf_mps.finetune.smoke import families

# What a model's own config.json says otherwise than the defaults of its family's class in transformers.
SIZES: dict[str, dict[str, Any]] = {
    "google-bert/bert-base-cased": {"vocab_size": 28996},
    "google-bert/bert-base-uncased": {},
    "distilbert/distilbert-base-uncased": {},
    "distilbert/distilgpt2": {"n_layer": 6},
    "openai-community/gpt2": {},
    "google-t5/t5-small": {},
    "facebook/wav2vec2-base": {},
    "google/vit-base-patch16-224-in21k": {},
    "meta-llama/Llama-2-7b-hf": {},
}


def config(recipe: Recipe) -> tuple[Any, Choice[str]]:
    """The configuration of the recipe's model in its real size, and where it comes from. Imports transformers.

    Raises UserError where the model cannot be had and nothing tells which architecture it is.
    """
    from transformers import AutoConfig

    said = recipe.model
    try:
        found = checkpoint.resolve(said).config()
        return found, Choice(said, f"{type(found).__name__} of the model itself, without its weights")
    except UserError:
        if checkpoint.resolve(said).local:
            raise
    family = families.find(recipe)
    made = AutoConfig.for_model(family.name, **SIZES.get(said, {}))
    size = "in this model's size" if said in SIZES else "in the size that transformers gives it by default"
    return made, Choice(said, f"the hub is out of reach: {type(made).__name__} {size}, without weights")
