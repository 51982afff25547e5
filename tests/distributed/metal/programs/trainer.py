"""A script as people write them, which knows of no host, no device and not of hf_mps: Trainer on made-up rows."""

import json
import os
import sys

from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

set_seed(1)
small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
model = BertForSequenceClassification(BertConfig(vocab_size=64, **small, **still))
rows = [{"input_ids": [(i * 7 + j) % 64 for j in range(12)], "labels": i % 2} for i in range(64)]
arguments = TrainingArguments(
    sys.argv[1],
    per_device_train_batch_size=16 // int(os.environ.get("WORLD_SIZE", "1")),
    max_steps=5,
    logging_steps=1,
    learning_rate=1e-3,
    eval_strategy="steps",
    eval_steps=5,
    report_to=[],
    disable_tqdm=True,
    # With it transformers 5 multiplies the mean of this model's loss by the number of processes (Trainer.compute_loss).
    average_tokens_across_devices=False,
)
trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:13])
trainer.train()
scores = trainer.predict(rows[:13]).predictions
if trainer.is_world_process_zero():
    log = trainer.state.log_history
    losses = [entry["loss"] for entry in log if "loss" in entry]
    norms = [entry["grad_norm"] for entry in log if "grad_norm" in entry]
    seen = {"device": arguments.device.type, "mode": arguments.parallel_mode.value, "scores": scores.tolist()}
    print(json.dumps({**seen, "losses": losses, "norms": norms}))
