"""What the verbs audit, plan and parity look at: a recipe or a model with a task, as a training step.

`find` reads the user's words, `prepare` makes model and rows of them (in real size without weights, or with weights on
a device), `step` lets transformers' Trainer take its steps over them, `places` says which module is at work.
"""
