"""Numbers that lie on the device already: a tensor that is asked for again costs no launch."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_mps.device.no_modes import no_modes

KEPT = 64
"""Numbers that are kept; the oldest goes first."""
_known: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}


def number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of no dimension with that value, for whoever does not write into it; should anybody, there is a new one.

    What was handed out stays as it is: only new callers are given the new one.
    """
    place = (value, dtype, device)
    found = _known.get(place)
    if found is None or found._version:
        _known.pop(place, None)
        while len(_known) >= KEPT:
            del _known[next(iter(_known))]
        with no_modes():
            found = _known[place] = torch.full((), value, dtype=dtype, device=device)
    return found
