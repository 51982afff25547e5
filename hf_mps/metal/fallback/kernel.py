"""One kernel for each missing operator: the CPU's own, with the device's tensors made reachable to it.

`make` gives the function that the dispatcher calls: the fast path (fast_path.py) for small tensors, and the general one
for everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.fallback import fast_path
from hf_mps.metal.fallback.accounting import OpStats, warn_float32, warn_operator, warn_refused
from hf_mps.metal.fallback.host_view import SMALL, HostView, NotShared, nbytes, overlapping_storages
from hf_mps.metal.fallback.op_schema import OpSchema
from hf_mps.metal.operators.calls import OutputSpecs, on_device

# Inside a kernel no Python of the user's may run: a default device (a TorchFunctionMode), a subclass of Tensor.
_NoTorchFunction = torch._C.DisableTorchFunction

Function = Callable[..., Any]


def make(op: Any, stats: OpStats, *, share: bool, small: float = SMALL) -> Function:
    """Return the function to be registered for `op` (an overload of torch.ops) under the dispatch key MPS.

    It takes and gives device tensors as the operator's schema says, and books each call in `stats`. With `share`
    tensors of more than `small` bytes go without a copy. Errors are the CPU's own.
    """
    schema = OpSchema.of(op)
    general = Kernel(schema, stats, share=share, small=small)
    return fast_path.kernel(schema, stats, general, general.largest_copied) or general


def make_sparse(op: Any, stats: OpStats) -> Function:
    """The same under the key of sparse tensors, which are copied; the schema is read at the first call."""
    made = cache(lambda: Kernel(OpSchema.of(op), stats, share=False))  # few programs have one
    return lambda *args, **kwargs: made()(*args, **kwargs)


def make_for_refused(op: Any, metal: Function, stats: OpStats, *, share: bool) -> Function:
    """The same for an operator whose kernel on Metal, `metal`, refuses some calls: the CPU takes those alone."""
    made = cache(lambda: Kernel(OpSchema.of(op), stats, share=share))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        try:
            return metal(*args, **kwargs)
        except NotImplementedError as refusal:
            start = perf_counter()
            warn_refused(stats.name, (*args, *kwargs.values()), str(refusal).partition(". ")[0])
            with _NoTorchFunction():
                return made().run(start, args, kwargs)

    return kernel


class Kernel:
    """The general way: any schema, large tensors over shared memory."""

    def __init__(self, schema: OpSchema, stats: OpStats, *, share: bool, small: float = SMALL) -> None:
        self.schema = schema
        self.stats = stats
        self.largest_copied = small if share else float("inf")
        # Without a formula for an operator, autograd follows the operations inside a kernel, as it does on the CPU; it
        # cannot follow them through memory that is only lent.
        self.followed = not torch._C._dispatch_has_kernel_for_dispatch_key(schema.op.name(), "Autograd")
        self._output_specs = OutputSpecs(schema.op) if schema.out_overload is not None else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        if self.stats.calls == 0:
            warn_operator(self.stats.name, (*args, *kwargs.values()))
        with _NoTorchFunction():
            return self.run(start, args, kwargs)

    def run(self, start: float, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that began at `start` (perf_counter) and book it."""
        tensors = on_device(args, kwargs)
        args = self._with_tensors_for_numbers(args, tensors)
        lent = not (self.followed and any(tensor.requires_grad for tensor in tensors))
        share = lent and any(nbytes(tensor) > self.largest_copied for tensor in tensors)
        try:
            result, view = self._run(args, kwargs, tensors, share=share)
        except RuntimeError as error:
            # An `out=` of the wrong size must grow, and cannot in memory that it shares; nothing was written yet.
            grows = "resiz" in str(error) and self.schema.written
            if not grows and not isinstance(error, NotShared):
                raise
            result, view = self._run(args, kwargs, tensors, share=False)
        if view.became_float32:
            warn_float32(self.stats.name)
        self.stats.book(start, view.copied, shared=view.shared)
        return result

    def _run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], *, share: bool
    ) -> tuple[Any, HostView]:
        if self.schema.generator is not None:
            args, kwargs = self._with_host_generator(args, kwargs)
        if share:
            torch.mps.synchronize()
        limit = self.largest_copied if share else float("inf")
        if self.schema.written:
            given = dict(zip(self.schema.names, args, strict=False)) | kwargs
            written = on_device([given.get(name) for name in self.schema.written])
            view = HostView(limit, overlapping_storages(tensors, written))
            result = self._writing(view, given, len(args))
        else:
            view = HostView(limit)
            result = self._functional(view, args, kwargs)
        if share:
            torch.mps.synchronize()
        return result, view

    def _functional(self, view: HostView, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        host_args = [view.to_host(value) for value in args]
        host_kwargs = {name: view.to_host(value) for name, value in kwargs.items()}
        specs = self._output_specs.infer(args, kwargs) if view.shared and self._output_specs is not None else None
        write = self.schema.out_overload
        if specs is None or write is None:
            return view.to_device(self.schema.op(*host_args, **host_kwargs))
        try:
            # The operator's out= form writes into fresh device memory.
            results = tuple(spec.empty() for spec in specs)
            hosts = {name: view.alias_output(each) for name, each in zip(self.schema.out_names, results, strict=True)}
            write(*host_args, **host_kwargs, **hosts)
            view.write_back()
            return results[0] if len(self.schema.returns) == 1 else results
        except RuntimeError:
            # Another dtype or size than was foreseen, or the call's own error, which comes again here.
            result = view.to_device(self.schema.op(*host_args, **host_kwargs))
            self._output_specs = None
            return result

    def _writing(self, view: HostView, given: dict[str, Any], positional: int) -> Any:
        """Run an operator that writes into arguments, of which the first `positional` come without their names."""
        schema = self.schema
        host_args = {name: view.to_host_mutable(value, written=name in schema.written) for name, value in given.items()}
        first = [host_args.pop(name) for name in schema.names[:positional]]
        result = schema.op(*first, **host_args)
        view.write_back()
        results = result if isinstance(result, tuple) else (result,)
        final = tuple(
            given[written] if written is not None else view.to_device(value)
            for written, value in zip(schema.returns, results, strict=False)
        )
        return final[0] if len(schema.returns) == 1 else final if schema.returns else None

    def _with_tensors_for_numbers(self, args: tuple[Any, ...], tensors: list[Tensor]) -> tuple[Any, ...]:
        """The arguments with the tensors again that PyTorch hands to Python as plain numbers: the 2 of `op(x, 2)`.

        They get the dtype that such a number has beside the first tensor, so that promotion stays what it was.
        """
        whole = list(args)
        for at in self.schema.takes_tensor if tensors else ():
            if at < len(args) and isinstance(number := args[at], (bool, int, float, complex)):
                whole[at] = torch.scalar_tensor(number, dtype=torch.result_type(tensors[0], number), device="cpu")
        return tuple(whole)

    def _with_host_generator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments with a CPU generator seeded by a draw on the device, so that the device's seed decides."""
        name = self.schema.generator
        assert name is not None
        position = self.schema.names.index(name)
        given = args[position] if position < len(args) else kwargs.get(name)
        if given is not None and given.device.type != "mps":
            return args, kwargs
        draw = torch.empty(1, dtype=torch.int64, device="mps").random_(generator=given)
        host = torch.Generator("cpu").manual_seed(int(draw.item()))
        if position < len(args):
            return (*args[:position], host, *args[position + 1 :]), kwargs
        return args, {**kwargs, name: host}
