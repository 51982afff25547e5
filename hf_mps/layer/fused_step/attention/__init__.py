"""Attention whose memory grows with the length of the rows, not with its square: in blocks, forward and backward.

`blocks` cuts a call into pieces, `masks` says who sees whom in a piece, `blockwise` computes them, `interface` offers
the whole to transformers as one more attention implementation, and `choice` says when a training needs it.
"""

NAME = "blockwise"
"""What transformers knows it by: `attn_implementation="blockwise"`."""
