"""The simulated device, and what a library sets when it is first imported, which no single test is to answer for."""

from __future__ import annotations

import pytest

from hf_mps.finetune.recipe import catalogue
from tests import share

# The model and the step of glue/mrpc over other sentences: one of them, with a number for a label, stands for all.
ALIKE = {f"glue/{name}" for name in ("cola", "mnli", "qnli", "qqp", "rte", "sst2", "wnli")}

SHARES = 20


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that asks for `each_recipe` the name of every recipe whose step is one of its own.

    A commit tries one in so many of them, each night all.
    """
    if "each_recipe" in metafunc.fixturenames:
        names = [entry.name for entry in catalogue.entries() if entry.name not in ALIKE]
        chosen = share.number()
        kept = names if chosen is None else names[chosen % SHARES :: SHARES]
        metafunc.parametrize("each_recipe", share.nightly_but(kept, names))


@pytest.fixture(scope="session", autouse=True)
def _imported() -> None:
    import sklearn  # noqa: F401  sets KMP_ variables
    import torch  # noqa: F401  its autoload brings the device
