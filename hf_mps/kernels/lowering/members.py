"""What a kernel only reads through an address of its argument buffer stays as it is while the kernel runs.

Fused optimizers read a parameter's step for each element, through one address of their argument buffer, and write the
parameter through another. For all that LLVM knows the two are the same memory: it would read the step again, and raise
two numbers to its power, for each element. A host lists no tensor twice where one of the two is written.
"""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"^  (%\S+) = load ptr addrspace\(1\), ptr ", re.MULTILINE)
_NODE = 1 << 20
"""A number that no metadata of a kernel has."""


def marked(text: str) -> str:
    """A function with loads marked as invariant whose address was loaded itself, and is used for nothing else."""
    found = False
    for address in _ADDRESS.findall(text):
        uses = re.findall(rf"^.*[ (]{address}(?=[,)\s]).*$", text, re.MULTILINE)[1:]  # the first one makes it
        if uses and all(re.search(rf" = load [^,]+, ptr addrspace\(1\) {address},", use) for use in uses):
            for use in uses:
                found, text = True, text.replace(use, f"{use}, !invariant.load !{_NODE}")
    return f"{text}\n!{_NODE} = !{{}}\n" if found else text
