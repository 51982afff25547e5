"""Arguments of older transformers in the words of the installed one: what was removed, and what takes its place.

Pure functions over strings and dictionaries: nothing here imports transformers or torch. `shims` brings them to
HfArgumentParser and TrainingArguments, `finetune.arguments` to recipes.
"""
