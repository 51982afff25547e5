"""diffusers: the steps of its train_text_to_image_lora.py on a UNet of random weights, under Accelerate."""

import sys

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.training_utils import cast_training_params
from peft import LoraConfig

torch.manual_seed(0)
accelerator = Accelerator(cpu=sys.argv[1] == "cpu")
unet = UNet2DConditionModel(
    sample_size=8, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    norm_num_groups=8,
)  # fmt: skip
unet.requires_grad_(False)
unet.add_adapter(
    LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=["to_k", "to_q", "to_v", "to_out.0"])
)
unet.to(accelerator.device)
cast_training_params(unet, dtype=torch.float32)
optimizer = torch.optim.AdamW([each for each in unet.parameters() if each.requires_grad], lr=1e-2)
unet, optimizer = accelerator.prepare(unet, optimizer)
scheduler, draws, losses = DDPMScheduler(), torch.Generator().manual_seed(0), []
latents, texts = (torch.randn(shape, generator=draws).to(accelerator.device) for shape in ((8, 4, 8, 8), (8, 6, 32)))
for _ in range(12):
    noise = torch.randn(latents.shape, generator=draws).to(accelerator.device)
    steps = torch.randint(0, scheduler.config.num_train_timesteps, (8,), generator=draws).to(accelerator.device)
    predicted = unet(scheduler.add_noise(latents, noise, steps), steps, texts).sample
    loss = torch.nn.functional.mse_loss(predicted.float(), noise.float())
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print("losses", losses)
