"""Two machines to pretend to be."""

from __future__ import annotations

from collections.abc import Callable

from hf_mps.metal.device.machine import Machine

GIB = 2**30
MAC = Machine(system="Darwin", processor="arm64", chip="Apple M2", memory=16 * GIB, macos="15.6")
LINUX = Machine(system="Linux", processor="x86_64", chip="AMD EPYC", memory=8 * GIB)

Pretend = Callable[..., None]
