"""Texts on their way to batches: tokens, lengths, packing, windows, and which tokens belong to what."""
