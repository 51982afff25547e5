"""What Metal makes of an operator: a kernel of its own, other operators, the CPU, or a refusal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from hf_mps.core.errors import UserError
from hf_mps.metal.operators.dispatcher import MADE_OF_OTHERS, is_missing
from hf_mps.metal.operators.launch_class import LaunchTable
from hf_mps.metal.operators.table import Table, parse, table

Kind = Literal["native", "composite", "fallback", "refused", "unknown"]
KINDS: dict[Kind, str] = {
    "native": "a Metal kernel of its own",
    "composite": "made of other operators",
    "fallback": "no Metal kernel: the CPU runs it, and each call waits for the GPU",
    "refused": "a dtype that Metal does not have: it ends in an error",
    "unknown": "that release of PyTorch has no such operator",
}
FINDINGS: tuple[Kind, ...] = ("fallback", "refused")
# What PyTorch calls only while a dispatch mode looks on (areAnyTensorSubclassLike in aten/src/ATen/native/LossCTC.cpp),
# and what it calls otherwise: the same kernels, with lengths in a list.
SEEN_AS = {
    "aten::_ctc_loss.Tensor": "aten::_ctc_loss",
    "aten::_ctc_loss_backward.Tensor": "aten::_ctc_loss_backward",
}
# Bookkeeping of PyTorch's own, nothing that a device computes.
NO_OPERATORS = ("prim::", "profiler::")


class OperatorSupport:
    """What Metal makes of the operators of one PyTorch: the installed one, or that of a native_functions.yaml.

    With `launches` it is that release's word which of them have a kernel, and the installed one's of what each is.
    """

    def __init__(self, file: Path | None = None, launches: LaunchTable | None = None) -> None:
        self._installed, self._launches = file is None, launches
        self._table = table() if file is None else read(file)

    def kind(self, name: str, refused: Iterable[str] = ()) -> Kind:
        """What Metal makes of `name` ("aten::add.Tensor"); `refused` are dtypes of its calls that Metal lacks."""
        if list(refused):
            return "refused"
        if not name.startswith("aten::"):
            return self._elsewhere(name)
        if self._launches is not None and name not in MADE_OF_OTHERS:
            ways = self._launches.ways(name)
            if not ways or ways == ("cpu",):
                return "fallback" if ways else "unknown"
            here = self._installed_kind(name)
            return here if here == "composite" else "native"
        return self._installed_kind(name)

    def _installed_kind(self, name: str) -> Kind:
        try:
            kind = self._table.kind(name)
        except KeyError:
            return self._elsewhere(name) if self._installed else "unknown"
        if kind == "missing" and name in MADE_OF_OTHERS:
            return "composite"
        return {"missing": "fallback", "cpu": "fallback", "python": "native"}.get(kind, kind)  # type: ignore[return-value]

    def kernel_owner(self, name: str) -> str:
        """Return the operator that has or lacks the kernel: for composite forms of a structured one the out= form."""
        return self._table.kernel_owners.get(name, name)

    def _elsewhere(self, name: str) -> Kind:
        """What becomes of an operator of another library, which the running dispatcher knows."""
        return "fallback" if is_missing(name) else "native"


def read(file: Path) -> Table:
    """The table of another release. Raises UserError where `file` is no native_functions.yaml."""
    import yaml

    try:
        content = file.read_bytes()
        support_table = parse(content)
    except OSError as error:
        raise UserError(f"--torch-table {file}: {error.strerror}; allowed: a native_functions.yaml") from error
    except (yaml.YAMLError, TypeError, KeyError, AttributeError, UnicodeDecodeError) as error:
        raise UserError(
            f"--torch-table {file}: no list of PyTorch's operators ({type(error).__name__}); allowed: "
            "aten/src/ATen/native/native_functions.yaml of a release"
        ) from error
    if "aten::add.Tensor" not in support_table.native | support_table.composite | support_table.missing:
        raise UserError(f"--torch-table {file}: it lists no add.Tensor; allowed: a release's native_functions.yaml")
    return support_table
