"""Rows that are read, tokenised and put into batches as a run goes on, and never loaded whole.

From the files to the device, each stage a module, each with a small state that a checkpoint keeps:

    files    which files there are (patterns, URLs, hub data sets), the slices that can be read alone, who reads which;
             the rows of one slice, from any place in it, broken ones told apart
    endless  the endless rows of one reader: pass after pass, sources by weight, held-out rows left out, mixed
    batches  rows to examples to batches of one length, packed or in blocks
    loader   the readers of one process or worker, for PyTorch's DataLoader, and what Trainer iterates over: waiting
             time, counts, the state in a checkpoint

`datasets.IterableDataset` would read the same files. Its state forgets what is in its shuffle buffer, reads a shard
from its start to go on in its middle (iterable_dataset.py, `_iter_arrow`), and one broken line loses the block of lines
that it is in (packaged_modules/json/json.py). Here every stage can be made again from a place in a file and a number,
so that a run goes on with the very next batch.
"""
