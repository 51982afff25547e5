"""Numbers that lie on the device already: a tensor that is asked for again costs no launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.device.no_modes import no_modes

KEPT = 64
"""Numbers that are kept; the oldest goes first."""
_known: dict[tuple[Any, ...], Tensor] = {}
# From torch 2.15 on Metal has several streams, which do not wait for each other (torch.mps.Stream, PR 190375).
_current_stream: Any = getattr(torch._C, "_mps_getCurrentStream", None)


def place_of(device: torch.device) -> tuple[torch.device, int]:
    """The device and its current stream, 0 where it has one: what one stream computed may not be there for others."""
    several = _current_stream is not None and device.type == "mps"
    return device, _current_stream().stream_id if several else 0


def number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of no dimension with that value, for whoever does not write into it; should anybody, there is a new one.

    What was handed out stays as it is: only new callers are given the new one.
    """
    place = (value, dtype, *place_of(device))
    return kept(_known, place, lambda: torch.full((), value, dtype=dtype, device=device), KEPT)


def kept(known: dict[Any, Tensor], place: Any, make: Callable[[], Tensor], most: int) -> Tensor:
    """Return the tensor that `known` has for a place, made anew where it has none, or one that was written into.

    Of `most` places; the oldest goes first.
    """
    found = known.get(place)
    # A version above 0 says that somebody has written into it.
    if found is None or found._version:
        known.pop(place, None)
        while len(known) >= most:
            del known[next(iter(known))]
        with no_modes():
            found = known[place] = make()
    return found
