"""One kernel for each missing operator: the CPU's, over the device's own memory wherever that is possible.

Two ways in and out, chosen for each tensor:

- shared: the CPU reads and writes the device's buffer through `torch.mps._host_alias_storage` (torch 2.13), no copy;
- copied: the tensor goes over and, where the operator wrote into it, comes back. For small tensors this is the
  quicker way, and it is the only one where the buffer is not shared or torch is older.

The traps, which PyTorch's own documentation of the alias names: wait for the device before the CPU touches a buffer,
and again before the device does. And an operator that writes into an argument (`out=`, in-place) must find its
result in the caller's tensor, resized where the operator resizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

# Below this many bytes a copy is cheaper than setting up an alias: scripts/bench_fallback.py.
SMALL = 32 * 1024
MOST_LAYOUTS = 256
# Metal has neither; the result takes the type that Metal has.
NO_METAL = {torch.float64: torch.float32, torch.complex128: torch.complex64}

Book = Callable[[float, int, bool], None]
"""Called after each call with seconds, bytes copied, and whether the shared way was taken."""


def has_alias() -> bool:
    """Whether this torch can lend the CPU a device buffer (2.13 and later, on shared memory)."""
    return hasattr(torch.mps, "_host_alias_storage") and hasattr(torch._C, "_mps_host_alias_storage")


def host_alias(tensor: Tensor) -> Tensor | None:
    """A CPU tensor over the same memory as a device tensor, or None where its buffer is not shared.

    The caller synchronises before and after.
    """
    try:
        storage = torch.mps._host_alias_storage(tensor.untyped_storage())
    except RuntimeError:
        return None
    alias = torch.empty(0, dtype=tensor.dtype)
    return alias.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


@dataclass
class Plan:
    """What an operator's schema says about its arguments and results, read once."""

    op: Any
    written: dict[str, bool]  # name of a written argument -> whether its old content is read too
    names: tuple[str, ...]  # of the positional arguments, in order
    returns: tuple[str | None, ...]  # for each result, the written argument that it is, or None
    out_twin: Any | None = None  # the overload that takes its results' memory, where there is one
    out_names: tuple[str, ...] = ()

    @classmethod
    def of(cls, op: Any) -> Plan:
        """Read the schema of `op`, an overload of torch.ops."""
        schema = op._schema
        written = {}
        sets: dict[str, str] = {}
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                written[argument.name] = not argument.is_out
                for name in argument.alias_info.after_set:
                    sets[name] = argument.name
        returns = tuple(
            next((sets[name] for name in value.alias_info.after_set if name in sets), None) if value.alias_info else None
            for value in schema.returns
        )
        names = tuple(argument.name for argument in schema.arguments)
        twin, out_names = (None, ()) if written else _out_twin(op)
        return cls(op, written, names, returns, twin, out_names)


def _out_twin(op: Any) -> tuple[Any | None, tuple[str, ...]]:
    """The out= overload of a functional operator: the same arguments, then one tensor for each result."""
    arguments = [(argument.name, str(argument.type)) for argument in op._schema.arguments]
    for name in op.overloadpacket.overloads():
        twin = getattr(op.overloadpacket, name)
        outs = [argument for argument in twin._schema.arguments if argument.is_out]
        others = [(argument.name, str(argument.type)) for argument in twin._schema.arguments if not argument.is_out]
        if outs and others == arguments and len(outs) == len(op._schema.returns):
            if torch._C._dispatch_has_kernel_for_dispatch_key(twin.name(), "CPU"):
                return twin, tuple(argument.name for argument in outs)
    return None, ()


class Loan:
    """The tensors of one call that stand on the other side, and what has to come back."""

    __slots__ = ("_written", "copied", "share", "shared")

    def __init__(self, share: bool) -> None:
        self.share = share
        self.shared = False
        self.copied = 0
        self._written: list[tuple[Tensor, Tensor]] = []

    def read(self, value: Any) -> Any:
        """The CPU's side of an argument that is only read; anything but device tensors passes through."""
        if isinstance(value, Tensor):
            return self._over(value) if value.device.type == "mps" else value
        if isinstance(value, (list, tuple)):
            return [self.read(item) for item in value]
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == "mps" else value
        if isinstance(value, torch.Generator):
            return _cpu_generator(value)
        return value

    def write(self, value: Any, *, content: bool) -> Any:
        """The CPU's side of an argument that is written; `content` says whether its old content counts."""
        if isinstance(value, (list, tuple)):
            return [self.write(item, content=content) for item in value]
        if not isinstance(value, Tensor) or value.device.type != "mps":
            return value
        host = self._over(value, content=content)
        self._written.append((value, host))
        return host

    def settle(self) -> None:
        """Let the caller's tensors have what was written: content, and size where the operator resized."""
        for device, host in self._written:
            if device.shape != host.shape:
                device.resize_(host.shape)
            if not (self.shared and host.data_ptr() == device.data_ptr()):
                device.copy_(host)
                self.copied += host.nbytes

    def bring(self, result: Any) -> Any:
        """A fresh CPU result on the device."""
        if isinstance(result, Tensor):
            if result.device.type != "cpu":
                return result
            self.copied += result.nbytes
            return _without_doubles(result).to("mps")
        if isinstance(result, (list, tuple)):
            return [self.bring(item) for item in result]
        return result

    def _over(self, tensor: Tensor, *, content: bool = True) -> Tensor:
        if self.share and tensor.nbytes > SMALL:
            alias = host_alias(tensor)
            if alias is not None:
                self.shared = True
                return alias
        if not content:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        self.copied += tensor.nbytes
        return tensor.cpu()


class Kernel:
    """Runs one operator on the CPU for device tensors; registered under the dispatch key MPS."""

    def __init__(self, op: Any, book: Book, *, share: bool) -> None:
        self.plan = Plan.of(op)
        self.book = book
        self.share = share
        self._layouts: dict[Any, list[Layout] | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take and give device tensors, as the operator's schema says."""
        start = perf_counter()
        try:
            result, loan = self._run(args, kwargs, self.share)
        except RuntimeError as error:
            # An `out=` that must grow cannot do so in a buffer that it shares; nothing was written yet.
            if "resiz" not in str(error) or not self.plan.written:
                raise
            result, loan = self._run(args, kwargs, False)
        self.book(perf_counter() - start, loan.copied, loan.shared)
        return result

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], share: bool) -> tuple[Any, Loan]:
        loan = Loan(share)
        torch.mps.synchronize()
        result = self._writing(loan, args, kwargs) if self.plan.written else self._functional(loan, args, kwargs)
        if loan.shared:
            torch.mps.synchronize()
        return result, loan

    def _functional(self, loan: Loan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        over = [loan.read(value) for value in args]
        more = {name: loan.read(value) for name, value in kwargs.items()}
        layouts = self._layouts_of(args, kwargs) if loan.shared and self.plan.out_twin is not None else None
        if layouts is None:
            return loan.bring(self.plan.op(*over, **more))
        results = [layout.empty() for layout in layouts]
        hosts = [host_alias(result) for result in results]
        if any(host is None for host in hosts):
            return loan.bring(self.plan.op(*over, **more))
        assert self.plan.out_twin is not None
        self.plan.out_twin(*over, **more, **dict(zip(self.plan.out_names, hosts, strict=True)))
        return results[0] if len(results) == 1 else tuple(results)

    def _writing(self, loan: Loan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plan = self.plan
        given = dict(zip(plan.names, args, strict=False)) | kwargs
        over = {
            name: loan.write(value, content=plan.written[name]) if name in plan.written else loan.read(value)
            for name, value in given.items()
        }
        positional = [over[name] for name in plan.names[: len(args)]]
        result = plan.op(*positional, **{name: over[name] for name in kwargs})
        loan.settle()
        results = result if isinstance(result, tuple) else (result,)
        final = tuple(
            given[written] if written is not None else loan.bring(value)
            for written, value in zip(plan.returns, results, strict=False)
        )
        return final[0] if len(plan.returns) == 1 else final if plan.returns else None

    def _layouts_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Layout] | None:
        """Size, strides and dtype of each result, found on meta tensors once for each kind of call; None if unknown."""
        try:
            key = (_described(args), _described(tuple(kwargs.items())))
            if key not in self._layouts:
                if len(self._layouts) >= MOST_LAYOUTS:
                    self._layouts.clear()
                self._layouts[key] = _infer_layouts(self.plan.op, args, kwargs)
            return self._layouts[key]
        except TypeError:  # an argument that cannot be a key
            return None


@dataclass(frozen=True)
class Layout:
    """Size, strides in elements and dtype of a result."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        """An uninitialised device tensor of this layout."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="mps")


def _infer_layouts(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Layout] | None:
    try:
        result = op(*_on_meta(args), **{name: _on_meta(value) for name, value in kwargs.items()})
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        return None  # the size depends on the content, or the operator has no meta form
    results = result if isinstance(result, (tuple, list)) else (result,)
    if not all(isinstance(value, Tensor) and value.dtype not in NO_METAL for value in results):
        return None
    return [Layout(value.shape, value.stride(), value.dtype) for value in results]


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_on_meta(item) for item in value)
    return torch.device("meta") if isinstance(value, torch.device) else value


def _described(value: Any) -> Any:
    """A hashable description that decides the layout of the results."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(_described(item) for item in value)
    return type(value), value


def _without_doubles(result: Tensor) -> Tensor:
    single = NO_METAL.get(result.dtype)
    if single is None:
        return result
    return result.to(single)


def _cpu_generator(generator: torch.Generator) -> torch.Generator:
    """A CPU generator seeded by a draw from a device generator, so that the device's seed decides the result."""
    if generator.device.type != "mps":
        return generator
    draw = torch.randint(2**62, (1,), device="mps", generator=generator)
    return torch.Generator().manual_seed(int(draw))
