"""timm: a small ViT with timm's optimizer and scheduler, stepped as its train.py does."""

import sys

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler

torch.manual_seed(0)
model = timm.create_model(
    "vit_tiny_patch16_224", num_classes=4, img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=3
).to(sys.argv[1])
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
scheduler, losses = CosineLRScheduler(optimizer, t_initial=12), []
draws = torch.Generator().manual_seed(0)
images = torch.randn(8, 3, 32, 32, generator=draws).to(sys.argv[1])
labels = torch.randint(0, 4, (8,), generator=draws).to(sys.argv[1])
for step in range(12):
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step_update(step)
    losses.append(loss.item())
print("losses", losses)
