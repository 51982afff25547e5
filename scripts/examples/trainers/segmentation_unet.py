"""segmentation-models-pytorch: a Unet on ResNet-18 with its Dice loss."""

import sys

import segmentation_models_pytorch as smp
import torch

torch.manual_seed(0)
model = smp.Unet("resnet18", encoder_weights=None, classes=1).to(sys.argv[1])
dice, losses = smp.losses.DiceLoss("binary"), []
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
images = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0)).to(sys.argv[1])
masks = (images.mean(1, keepdim=True) > 0).float()
for _ in range(8):
    loss = dice(model(images), masks)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print("losses", losses)
