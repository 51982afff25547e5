"""Which sentinels there are, and after which module of a library each is installed. Imports nothing."""

from __future__ import annotations

# Module -> the sentinels that look at something in it, as for the guards. non-finite is first: the others then see
# numbers alone.
INSTALLED_AFTER: dict[str, tuple[str, ...]] = {
    "torch": ("non-finite", "weights-still", "gradient-norm", "loss-frozen"),
    "transformers.training_args": ("non-finite",),
    "transformers.trainer": ("non-finite",),
    "accelerate.accelerator": ("weights-still", "non-finite"),
}


def module(name: str) -> str:
    """The module of the sentinel `name`."""
    return f"hf_mps.guards.sentinels.{name.replace('-', '_')}"


NAMES: tuple[str, ...] = tuple(dict.fromkeys(name for names in INSTALLED_AFTER.values() for name in names))
