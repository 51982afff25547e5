"""The training step itself: of fewer launches, where HF_MPS_FUSED_STEP=1 or a recipe's `fused_step` asks for it.

And of less memory: `attention` computes in blocks what a model's attention would hold whole.
"""
