"""The recipe runner: `python -m hf_mps.finetune RECIPE [key=value …]`. Importing this package must not import torch."""
