"""Runs programs of this folder one after the other in each process: a start of Python takes longer than all of them."""

from __future__ import annotations

import runpy
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

dist.init_process_group(timeout=timedelta(seconds=120))
for program in sys.argv[1:]:
    runpy.run_path(str(Path(__file__).with_name(program)))
dist.destroy_process_group()
