"""Sorting by digits: a pass for each of 4 or 8 bits, which counts, adds up and scatters."""

from __future__ import annotations

import math

import torch

from hf_mps.kernels.dtypes import metal
from hf_mps.kernels.launch.sort_work import Work
from hf_mps.kernels.values import i32, u8


def by_digits(work: Work) -> None:
    """Sort rows of elements of 4 bytes or less, the last pass into the output where a row lies side by side in it."""
    element = work.given.element_size()
    bits = 4 if element == 1 else 8
    narrow = element == 2 and work.rows >= 32
    group = 1024 if element == 2 and not narrow else 512
    blocks = math.ceil(work.size / (group * (8 if element == 1 else 4)))
    direct = work.dim == work.given.dim() - 1 or work.count == 1
    short = direct and work.size <= 1 << 16
    counted = blocks <= 4 and not narrow
    fused = not counted and blocks <= 4 and blocks * blocks * work.rows <= 128
    tail = f"{metal(work.given.dtype)}_{bits}bit{'_tptg512' if narrow else ''}"
    scatter = f"radix_scatter_{'fused_' if fused else ''}"
    suffix = "_u16" if short else ""
    pairs = [work.scratch(work.given.dtype, torch.int16 if short else torch.int32) for _ in range(2)]
    entries = blocks << bits
    histograms = torch.empty((work.rows, entries), dtype=torch.int32, device=work.given.device)
    keys, at = work.rows_of(last=False), 0
    release, grid, passes = work.release, (blocks, work.rows, 1), 8 * element // bits
    for each in range(passes):
        dims = i32(work.size, blocks, each * bits, 0)
        count = {"input": keys, "histograms": histograms, "dims": dims, "desc": u8(work.descending)}
        if counted:
            release.kernel(f"radix_count_scan_{tail}_mb4").launch(count, groups=(1, work.rows, 1), group=group)
        else:
            release.kernel(f"radix_count_{tail}").launch(count, groups=grid, group=group)
            if not fused:
                release.kernel("radix_scan").launch(
                    {"histograms": histograms, "n_entries": i32(entries)}, groups=(1, work.rows, 1), group=1024
                )
        final = direct and each == passes - 1
        into = (work.values, work.indices) if final else pairs[1 - at]
        selected = "_topk" if work.count else ""
        bound = {
            "keys_in": keys,
            "vals_in": pairs[at][1],
            "keys_out": into[0],
            "vals_out": into[1],
            "offsets": histograms,
            "dims": dims,
            "flags": u8(work.descending, each == 0),
        }
        if final and work.count:
            bound["sel"] = i32(work.offset, work.count)
        name = f"{scatter}final{selected}_{tail}{suffix}" if final else f"{scatter}{tail}{suffix}"
        release.kernel(name).launch(bound, groups=grid, group=group)
        at = 1 - at
        keys = pairs[at][0]
    if not direct:
        work.finish(*pairs[at])
