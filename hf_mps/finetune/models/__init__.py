"""Checkpoints, adapters, and what families of models share in training, evaluation and answers."""
