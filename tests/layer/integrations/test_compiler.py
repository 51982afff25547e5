"""torch.compile loads its compiler for a function of bitsandbytes when that is called, and for others at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

PROGRAM = """
import json, sys
import torch, bitsandbytes

made = []

def backend(graph, inputs):
    made.append(graph)
    return graph.forward

def twice(tensor):
    return 2 * tensor

def thrice(tensor):
    return 3 * tensor

found = {"loaded": "torch._inductor.compile_fx" in sys.modules}
thrice.__module__ = "bitsandbytes.some"
theirs = torch.compile(thrice, backend=backend, dynamic=False)
found["theirs"] = hasattr(theirs, "_torchdynamo_orig_callable")
found["others"] = hasattr(torch.compile(twice, backend=backend), "_torchdynamo_orig_callable")
found["graphs"] = [len(made)]
found["result"] = [theirs(torch.ones(2)).tolist(), theirs(torch.ones(2)).tolist()]
found["graphs"].append(len(made))
found["name"] = theirs.__name__
print(json.dumps(found))
"""


def test_the_compiler_is_loaded_when_a_function_of_bitsandbytes_is_called(run_python: Callable[..., Any]) -> None:
    pytest.importorskip("bitsandbytes")
    ended = run_python("-c", PROGRAM)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == {
        "loaded": False,
        "theirs": False,
        "others": True,
        "graphs": [0, 1],
        "result": [[3.0, 3.0], [3.0, 3.0]],
        "name": "thrice",
    }
