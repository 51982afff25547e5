"""Guards against what trainings meet on this platform: memory, loaders, batches, settings, CUDA's words."""

# First of all: torch arms these guards at the end of its import, which would find one of them half imported.
import torch  # noqa: F401
