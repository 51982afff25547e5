"""TransformerLens: a small GPT-2 of random weights under its bridge, trained with a hook on a residual stream."""

import sys
import tempfile

import torch
from tiny import bert
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    tokenizer = AutoTokenizer.from_pretrained(bert(folder))
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=32, n_embd=32, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    bridge = TransformerBridge.boot_transformers(folder, device=sys.argv[1], tokenizer=tokenizer)
bridge.train()
optimizer = torch.optim.AdamW(bridge.parameters(), lr=1e-3)
tokens = torch.randint(5, len(tokenizer), (8, 16), generator=torch.Generator().manual_seed(0)).to(sys.argv[1])
shapes, losses = [], []
bridge.add_hook("blocks.1.hook_out", lambda values, hook: shapes.append(values.shape))
for _ in range(12):
    loss = bridge(tokens, return_type="loss")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert shapes == [(8, 16, 32)] * 12, shapes
print("losses", losses)
