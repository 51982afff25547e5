"""What makes libraries follow the one switch, a file each, and the table of everything that is patched in libraries.

Nothing here imports a library: `start` notes the modules, and what patches one is loaded when it has been executed, or
at once where it was imported before. `declared()` lists every patch of the whole layer, whoever it belongs to.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from hf_mps.core import import_hooks
from hf_mps.core.import_hooks import Catalogue, of_file
from hf_mps.core.registry import registry_of
from hf_mps.layer import compat
from hf_mps.layer.fused_step import parts
from hf_mps.layer.guards import catalogue

if TYPE_CHECKING:
    from hf_mps.core.patching import Declaration, Patcher

INTEGRATIONS = Catalogue(
    "integration",
    {
        "accelerate.state": "accelerate",
        "transformers.training_args": "transformers",
        "lightning.fabric.accelerators.mps": "lightning",
        "lightning.fabric.connector": "lightning",
        "lightning.pytorch.trainer.connectors.accelerator_connector": "lightning",
        "lightning_fabric.accelerators.mps": "lightning",
        "lightning_fabric.connector": "lightning",
        "pytorch_lightning.trainer.connectors.accelerator_connector": "lightning",
        "lightning.fabric.strategies.ddp": "lightning",
        "lightning_fabric.strategies.ddp": "lightning",
        "lightning.pytorch.strategies.ddp": "lightning",
        "pytorch_lightning.strategies.ddp": "lightning",
        "transformers.modeling_utils": "attention hub_kernels",
        "transformers.trainer": "trainer_logs",
        "accelerate.launchers": "trainer_logs",
        "torch._dynamo.variables.torch": "compiler",
        "bitsandbytes._ops": "compiler",
    },
    "hf_mps.layer.integrations.{}".format,
    partial(of_file, kind="integration", safe=True),
)
PATCHERS = {"guards": catalogue.GUARDS, "sentinels": catalogue.SENTINELS, "step": parts.PARTS, "shims": compat.SHIMS}
"""What else patches libraries, in this order after the integrations."""


registry = registry_of(INTEGRATIONS, compat.SHIMS, started=True)
"""Returns all integrations and shims of this process."""


def table() -> dict[str, tuple[str, ...]]:
    """Module of a library -> the integrations and the PATCHERS that patch it, in their order."""
    found = dict(INTEGRATIONS.after)
    for kind, patchers in PATCHERS.items():
        for module in patchers.after:
            if module != "torch":  # patched when the layer is switched on
                found[module] = (*found.get(module, ()), kind)
    return found


def start(names: Collection[str] = ()) -> None:
    """Watch for the modules of the table, or for `names` of them alone, and patch those imported already."""
    import_hooks.start({name: who for name, who in table().items() if not names or name in names}, _arm)


def _arm(module: ModuleType, who: str) -> None:
    """Arm what one integration, or one of PATCHERS, declares for a module."""
    if who not in PATCHERS:
        registry().get(who).install(module)
        return
    owner = registry() if who == "shims" else parts.registry() if who == "step" else catalogue.registry()
    owner.install(PATCHERS[who].kind, module)


def reason(who: str) -> str:
    """Return why an integration, or the shims, are on, in a sentence."""
    return compat.REASON if who == "shims" else str(registry().get(who).home.REASON)


def declared() -> list[Declaration]:
    """Return every patch that the layer declares, each with its target, what is done there, why, and until when.

    Those of torch's own answers about Metal, of the fallback, of guards, sentinels, steps, integrations and shims:
    docs/patches.md is made of it. Imports torch and no other library.
    """
    return [declaration for patcher in patchers() for declaration in patcher.declared()]


def patchers() -> list[Patcher]:
    """Whoever patches a library, in the order of `declared`."""
    from hf_mps.metal.device import availability
    from hf_mps.metal.fallback import registration

    registries = (catalogue.registry(), parts.registry(), registry())
    return [availability.patcher(), registration.PATCHER, *(each for one in registries for each in one.patchers())]


def say_if_metal_fails() -> None:
    """Tell once why a Metal device that PyTorch offers is not taken: the run would only seem slow otherwise."""
    import torch

    from hf_mps.core import notices
    from hf_mps.metal.device.choice import metal

    verdict = metal()
    if not verdict.value and torch.mps.device_count() > 0:
        notices.print_notice(f"Metal is not used: {verdict.reason}")
