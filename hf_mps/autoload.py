"""PyTorch's "torch.backends" entry point: called at the end of `import torch`, decides in microseconds."""


def start() -> None:
    """Switch the layer on where there is something to do."""
