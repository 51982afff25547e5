"""The links between the hosts of a run: which interface, how fast, and what a training step costs on them."""
