"""The suite: a folder for each room of hf_mps, with helpers beside the tests that use them."""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
