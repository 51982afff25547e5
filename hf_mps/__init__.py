"""hf_mps: Hugging Face training on a Mac's GPU, correct, fast and effortless.

Importing this package must not import torch: PyTorch's own start-up loads `hf_mps.autoload` from here.
"""

__version__ = "0.1.0"

# Modules that `import hf_mps` alone reaches, imported when they are first named.
_REACHABLE = {
    "activate": "hf_mps.layer.activation.activate",
    "device": "hf_mps.metal.device",
    "fallback": "hf_mps.metal.fallback",
    "guards": "hf_mps.layer.guards",
}


def __getattr__(name: str) -> object:
    if name not in _REACHABLE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return import_module(_REACHABLE[name])
