"""What the layer does to other people's libraries, each in a file of its own, applied when the library is imported.

Nothing here imports a library: `import_hooks.start` notes the modules below, and the file is loaded when its module
has been executed, or at once where it was imported before.
"""

from hf_mps.compat import SHIMS
from hf_mps.guards import catalogue as guards
from hf_mps.guards.sentinels import catalogue as sentinels

# Module of a library -> the files of this package that know its insides, applied in this order.
ROOMS: dict[str, tuple[str, ...]] = {
    "accelerate.state": ("accelerate",),
    "transformers.training_args": ("transformers",),
    "lightning.fabric.accelerators.mps": ("lightning",),
    "lightning.fabric.connector": ("lightning",),
    "lightning.pytorch.trainer.connectors.accelerator_connector": ("lightning",),
    "lightning_fabric.accelerators.mps": ("lightning",),
    "lightning_fabric.connector": ("lightning",),
    "pytorch_lightning.trainer.connectors.accelerator_connector": ("lightning",),
    "transformers.trainer": ("trainer_logs",),
    "accelerate.launchers": ("trainer_logs",),
    "torch._dynamo.variables.torch": ("compiler",),
}
for _room, _modules in (("guards", guards.INSTALLED_AFTER), ("sentinels", sentinels.INSTALLED_AFTER)):
    for _name in _modules:
        if _name != "torch":
            ROOMS[_name] = (*ROOMS.get(_name, ()), _room)
for _name in SHIMS:
    ROOMS[_name] = (*ROOMS.get(_name, ()), "shims")
