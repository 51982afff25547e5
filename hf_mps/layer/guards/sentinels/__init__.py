"""Signs of a wrong training that need no knowledge of what is wrong, a file each: what is looked at, when it speaks.

On by default where there is Metal. `hf_mps.guards.report()` lists them; `HF_MPS_SENTINELS=-name,-name` switches single
ones off.
"""

# First of all: torch arms the sentinels at the end of its import, which would find one of them half imported.
import torch  # noqa: F401
