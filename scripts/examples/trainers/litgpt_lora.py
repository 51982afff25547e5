"""LitGPT: its LoRA GPT under Lightning's Fabric, as its finetuning loop steps."""

import sys

import torch
from lightning import Fabric
from litgpt.lora import GPT, Config, mark_only_lora_as_trainable
from litgpt.utils import chunked_cross_entropy

fabric = Fabric(accelerator=sys.argv[1], devices=1)
fabric.seed_everything(0, verbose=False)
config = Config(
    n_layer=2, n_head=4, n_embd=32, block_size=32, vocab_size=64, padded_vocab_size=64, lora_r=4, lora_alpha=8,
    lora_query=True, lora_value=True, lora_dropout=0.0,
)  # fmt: skip
model = GPT(config)
mark_only_lora_as_trainable(model)
model, draws, losses = fabric.setup_module(model), torch.Generator().manual_seed(0), []
optimizer = fabric.setup_optimizers(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
tokens = fabric.to_device(torch.randint(0, 64, (8, 32), generator=draws))
for _ in range(12):
    logits = model(tokens, lm_head_chunk_size=128)
    logits[-1] = logits[-1][..., :-1, :]
    loss = chunked_cross_entropy(logits, tokens[..., 1:])
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print("losses", losses)
