"""The loss of language models without their logits: `chunked` computes it, `heads` hands it to a model."""
