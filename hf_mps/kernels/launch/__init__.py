"""What each aten operator launches on Metal: a file a family, each rule with PyTorch's source file that decides it."""

from __future__ import annotations

from importlib import import_module

FAMILIES = (
    "activations",
    "amp",
    "arg_reductions",
    "attention",
    "binary",
    "cat",
    "comparison",
    "copy",
    "distance",
    "dropout",
    "embedding",
    "embedding_bag",
    "fill",
    "gamma",
    "gates",
    "gather_scatter",
    "grid_sampling",
    "group_norm",
    "histogram",
    "indexing",
    "linear_algebra",
    "matmul",
    "nonzero",
    "norms",
    "optimizers",
    "pooling",
    "quantized",
    "random",
    "ranges",
    "reductions",
    "sampling",
    "scan",
    "search",
    "selection",
    "shapes",
    "sort",
    "ternary",
    "triangular",
    "unary",
    "upsampling",
    "vector_norms",
)


def load() -> None:
    """Import every family, which declares its rules."""
    for family in FAMILIES:
        import_module(f"{__name__}.{family}")
