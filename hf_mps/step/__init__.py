"""A training step of fewer launches, for scripts that ask (HF_MPS_FUSED_STEP=1) and for recipes (`fused_step`)."""
