"""What the layer does to other people's libraries, each in a file of its own, applied when the library is imported.

Nothing here imports a library: `watch.start` notes the modules below, and the file is loaded when its module has been
executed, or at once where it was imported before.
"""

# Module of a library -> the file of this package that knows its insides.
ROOMS = {
    "accelerate.state": "accelerate",
    "transformers.training_args": "transformers",
    "lightning.fabric.accelerators.mps": "lightning",
    "lightning.fabric.connector": "lightning",
    "lightning.pytorch.trainer.connectors.accelerator_connector": "lightning",
    "lightning_fabric.accelerators.mps": "lightning",
    "lightning_fabric.connector": "lightning",
    "pytorch_lightning.trainer.connectors.accelerator_connector": "lightning",
}
