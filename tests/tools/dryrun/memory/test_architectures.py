"""Every architecture of docs/architectures.json is planned and audited as it says: in a run some, each night all."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_mps.tools.dryrun import metal_device
from scripts.tools import architectures
from tests import share

EACH = 24
"""One architecture in so many is looked at in a run: all take minutes."""
TABLE = architectures.table()
# What no share may miss: mixtures of experts, and those that once could not be planned.
ALWAYS = ("mixtral", "gpt_oss", "gemma2", "deberta-v2", "resnet", "led", "wav2vec2", "detr")
# A step of these is traced for up to a minute and a half: hundreds of experts, or a configuration that stays large.
LARGE = {name for name, row in TABLE.items() if row.works and float(row.peak.split()[0]) > 200} | {"zamba", "zamba2"}
SMALL = TABLE.keys() - (set() if share.is_whole() else LARGE)
CHECKED = sorted({*ALWAYS, *(name for name in SMALL if share.has(name, EACH))})


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    metal_device()
    with architectures.quiet():
        yield
    gc.collect()


def test_the_page_has_architectures_of_the_installed_transformers_and_most_are_planned() -> None:
    assert set(TABLE) <= set(architectures.architectures())
    assert set(ALWAYS) <= set(TABLE)
    assert sum(row.works for row in TABLE.values()) >= 120
    assert architectures.DATA.read_text(encoding="utf-8") == architectures.data(TABLE)
    assert architectures.PAGE.read_text(encoding="utf-8") == architectures.page(TABLE)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED)
def test_an_architecture_is_as_the_page_says(name: str, tmp_path: Path) -> None:
    said = TABLE[name]
    assert architectures.row(name, said.task, tmp_path) == said
