"""Every architecture of docs/architectures.md is still planned and audited as it says: here a fixed share of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.tools import architectures

# All of them take minutes; `python scripts/tools/architectures.py` looks at each, and writes the page.
EACH = 12
TABLE = architectures.table()
# What no share may miss: mixtures of experts, and those that once could not be planned.
ALWAYS = ("mixtral", "gpt_oss", "gemma2", "deberta-v2", "resnet", "led", "wav2vec2", "detr")
CHECKED = sorted({*ALWAYS, *sorted(TABLE)[::EACH]})


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    from hf_mps.tools.dryrun import metal_device

    metal_device()
    with architectures.quiet():
        yield
    gc.collect()


def test_the_page_has_architectures_of_the_installed_transformers_and_most_are_planned() -> None:
    assert set(TABLE) <= set(architectures.architectures())
    assert set(ALWAYS) <= set(TABLE)
    planned = [row for row in TABLE.values() if not row.peak.startswith("exit")]
    assert len(planned) >= 120
    assert architectures.PAGE.read_text(encoding="utf-8") == architectures.page(TABLE)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED)
def test_an_architecture_is_as_the_page_says(name: str, tmp_path: Path) -> None:
    said = TABLE[name]
    assert architectures.row(name, said.task, tmp_path) == said
