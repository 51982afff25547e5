"""The loss of language models without their logits: `chunked` computes it, `deferred_head` gives it to a model."""
