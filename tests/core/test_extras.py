"""A hint to install something works wherever hf_mps itself came from."""

from __future__ import annotations

import re
import shlex
from importlib import metadata

import pytest

from hf_mps.core import extras
from tests import CHECKOUT

RECIPES = CHECKOUT / "recipes"


def test_a_hint_names_packages_and_never_hf_mps_itself() -> None:
    assert extras.install("lora") == "pip install 'peft>=0.15'"
    # An extra that names another one brings what both need.
    assert extras.install("preference") == "pip install 'peft>=0.15' 'trl>=1.16'"
    for extra in metadata.metadata("hf-mps").get_all("Provides-Extra") or []:
        assert "hf-mps" not in extras.install(extra)


def test_an_unknown_extra_is_an_error_of_ours() -> None:
    with pytest.raises(ValueError, match="no extra nope"):
        extras.install("nope")


def test_sources_that_are_not_installed_are_installed_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", not_installed)
    assert extras.install("lora") == shlex.join(["pip", "install", "-e", f"{CHECKOUT}[lora]"])


def not_installed(name: str) -> list[str]:
    raise metadata.PackageNotFoundError(name)


def test_what_recipes_say_to_install_is_what_an_extra_brings() -> None:
    brought = {
        re.split(r"[<>=!~]", need)[0]
        for extra in ("audio", "diffusion", "embeddings", "generation", "lora", "preference", "quantized")
        for need in shlex.split(extras.install(extra))[2:]
    }
    said = set()
    for file in RECIPES.rglob("*.yaml"):
        for words in re.findall(r"pip install ([^,\n]*)", file.read_text(encoding="utf-8")):
            said |= {re.split(r"[<>=!~]", word)[0] for word in shlex.split(words)}
    assert said == brought
