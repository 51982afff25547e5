"""The Metal wing: what a device can do, its operators and faults, the simulated device, kernels, the pytest plugin.

It imports `hf_mps.core` and nothing above, so that a library's tests can have it without the rest.
"""
