"""The largest batch whose step fits a machine, found in few traces."""

from __future__ import annotations

from collections.abc import Callable

LARGEST_BATCH, TRACES = 4096, 8
"""Rows of the largest batch that is looked for, and traces that the search may take beside the first two."""


def largest(peak_of: Callable[[int], int], limit: int, first: int, most: int = LARGEST_BATCH) -> int:
    """The most rows of a batch whose peak is within `limit` bytes, 0 where not even one is; at most `most`.

    Peaks grow by the same bytes for each row over long stretches, so a line through two of them leads near the answer;
    at most TRACES more are made. The answer was traced, and is the largest or within a fiftieth of it.
    """
    if peak_of(1) > limit:
        return 0
    low, high = 1, most + 1  # what fits, and what does not
    guess = min(max(first, 2), most)
    for _ in range(TRACES):
        size = peak_of(guess)
        if size > limit:
            high = guess
            slope = (size - peak_of(low)) / (high - low)
        else:
            slope, low = (size - peak_of(low)) / (guess - low), guess
            if high <= most:
                slope = max(slope, (peak_of(high) - size) / (high - low))
        if high - low <= max(1, low // 50):
            break
        # Level where another moment than the batch's is the highest: then in large strides.
        reach = low + (limit - peak_of(low)) / slope if slope > 0 else 8 * low
        guess = min(max(int(reach), low + 1), high - 1)
    return low
