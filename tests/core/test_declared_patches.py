"""What is patched in other libraries is declared, and what is declared is patched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_mps.core.import_hooks import Catalogue
from hf_mps.core.registry import Registry
from hf_mps.layer import integrations
from hf_mps.layer.fused_step import parts
from hf_mps.layer.guards import catalogue

CHECKOUT = Path(__file__).resolve().parent.parent.parent
BY_THE_STREAM = ("non-finite", "gradient-norm", "loss-frozen", "stopped-gpu")
"""Sentinels that see torch's trainings through what the stream declares."""


WITHOUT = ("one-copy",)
"""Parts of a fused step that stand in something of ours, which patches."""


@pytest.mark.parametrize(
    "registry", [catalogue.registry(), parts.registry(), integrations.registry()], ids=["safeguards", "step", "modules"]
)
def test_the_catalogue_names_each_after_the_modules_that_it_declares(registry: Registry) -> None:
    for kind in registry.catalogues.values():
        for name in kind.names:
            declared = [each for each in registry.get(name).declared() if not each.late]
            modules = {module for each in declared for module in each.after}
            if name in WITHOUT:
                assert not modules
                continue
            assert modules | ({"torch"} if name in BY_THE_STREAM else set()) == _listed(kind, name), name


def _listed(kind: Catalogue, name: str) -> set[str]:
    return {module for module, names in kind.after.items() if name in names}


def test_each_declaration_says_who_and_where() -> None:
    declared = integrations.declared()
    assert {each.kind for each in declared} == {
        "device",
        "fallback",
        "guard",
        "sentinel",
        "step",
        "integration",
        "shim",
    }
    assert "torch.backends.mps:is_available" in {each.target for each in declared}
    assert len({(each.name, each.target) for each in declared}) == len(declared)
    for each in declared:
        assert each.after


@pytest.mark.slow
@pytest.mark.rotated("/")
def test_what_is_wrapped_is_what_is_declared() -> None:
    """After importing transformers, accelerate, Lightning, datasets and evaluate, on the simulated device."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.patched_libraries"],
        cwd=CHECKOUT,
        env={**os.environ, "HF_MPS_SIMULATE": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["declared"] == len(integrations.declared())
    assert (found["missing"], found["undeclared"], found["again"]) == ([], [], [])
