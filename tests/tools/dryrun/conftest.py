"""The simulated device, and what a library sets when it is first imported, which no single test is to answer for."""

from __future__ import annotations

import pytest

from hf_mps.finetune.recipe import catalogue

# The model and the step of glue/mrpc over other sentences: one of them, with a number for a label, stands for all.
ALIKE = {f"glue/{name}" for name in ("cola", "mnli", "qnli", "qqp", "rte", "sst2", "wnli")}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that asks for `each_recipe` the name of every recipe whose step is one of its own."""
    if "each_recipe" in metafunc.fixturenames:
        metafunc.parametrize("each_recipe", [entry.name for entry in catalogue.entries() if entry.name not in ALIKE])


@pytest.fixture(scope="session", autouse=True)
def _imported() -> None:
    import sklearn  # noqa: F401  sets KMP_ variables
    import torch  # noqa: F401  its autoload brings the device
