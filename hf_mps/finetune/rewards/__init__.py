"""Rewards: what scores a model's completions while it learns from them, `builtin` ones and installed functions."""
