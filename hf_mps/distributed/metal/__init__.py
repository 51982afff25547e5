"""The torch.distributed backend `metal`: Gloo over the CPU's view of the memory that the CPU and Metal share."""
