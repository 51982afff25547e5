"""One kernel for each missing operator: the CPU's own, with the device's tensors made reachable to it.

`make` gives the function that the dispatcher calls: the short way of short.py for small tensors, and the general one
for everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from hf_mps.fallback import fast_path
from hf_mps.fallback.accounting import Slot
from hf_mps.fallback.host_view import SMALL, Loan, NotShared, entangled
from hf_mps.fallback.op_schema import Plan
from hf_mps.fallback.output_specs import Layout, Layouts

# Inside a kernel no Python of the user's may run: a default device (a TorchFunctionMode), a subclass of Tensor.
_InKernel = torch._C.DisableTorchFunction

Function = Callable[..., Any]


def make(op: Any, slot: Slot, *, share: bool, small: float = SMALL) -> Function:
    """The function to be registered for `op` (an overload of torch.ops) under the dispatch key MPS.

    It takes and gives device tensors as the operator's schema says, and books each call in `slot`. With `share`
    tensors of more than `small` bytes go without a copy. Errors are the CPU's own.
    """
    plan = Plan.of(op)
    general = Kernel(plan, slot, share=share, small=small)
    return fast_path.kernel(plan, slot, general, general.largest_copied) or general


class Kernel:
    """The general way: any schema, large tensors over shared memory."""

    def __init__(self, plan: Plan, slot: Slot, *, share: bool, small: float = SMALL) -> None:
        self.plan = plan
        self.slot = slot
        self.largest_copied = small if share else float("inf")
        # Without a formula of its own, autograd follows the operations inside a kernel, as it does on the CPU; it
        # cannot follow them through memory that is only lent.
        self.followed = not torch._C._dispatch_has_kernel_for_dispatch_key(plan.op.name(), "Autograd")
        self._layouts = Layouts(plan.op) if plan.out_twin is not None else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        if self.slot.calls == 0:
            self.slot.first(args, kwargs)
        with _InKernel():
            return self.run(start, args, kwargs)

    def run(self, start: float, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that began at `start` (perf_counter) and book it."""
        tensors = _tensors((args, kwargs))
        args = self._with_tensors_for_numbers(args, tensors)
        try:
            result, loan = self._run(args, kwargs, tensors, share=self._worth_sharing(tensors))
        except NotShared:
            result, loan = self._run(args, kwargs, tensors, share=False)
        except RuntimeError as error:
            # An `out=` of the wrong size must grow, and cannot in memory that it shares; nothing was written yet.
            if "resiz" not in str(error) or not self.plan.written:
                raise
            result, loan = self._run(args, kwargs, tensors, share=False)
        if loan.single:
            self.slot.became_single()
        self.slot.book(start, loan.copied, shared=loan.shared)
        return result

    def _worth_sharing(self, tensors: list[Tensor]) -> bool:
        if self.followed and any(tensor.requires_grad for tensor in tensors):
            return False
        return any(tensor.nbytes > self.largest_copied for tensor in tensors)

    def _limit(self, share: bool) -> float:
        return self.largest_copied if share else float("inf")

    def _run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], *, share: bool
    ) -> tuple[Any, Loan]:
        if self.plan.generator is not None:
            args, kwargs = self._with_host_generator(args, kwargs)
        if share:
            torch.mps.synchronize()
        if self.plan.written:
            loan = Loan(self._limit(share), entangled(tensors, self._written(args, kwargs)))
            result = self._writing(loan, args, kwargs)
        else:
            loan = Loan(self._limit(share))
            result = self._functional(loan, args, kwargs)
        if share:
            torch.mps.synchronize()
        return result, loan

    def _functional(self, loan: Loan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        over = [loan.read(value) for value in args]
        more = {name: loan.read(value) for name, value in kwargs.items()}
        layouts = self._layouts.of(args, kwargs) if loan.shared and self._layouts is not None else None
        if layouts is None:
            return loan.bring(self.plan.op(*over, **more))
        try:
            return self._into_device(loan, layouts, over, more)
        except RuntimeError:
            # Another dtype or size than was foreseen, or the call's own error, which comes again here.
            result = loan.bring(self.plan.op(*over, **more))
            self._layouts = None
            return result

    def _into_device(self, loan: Loan, layouts: tuple[Layout, ...], over: list[Any], more: dict[str, Any]) -> Any:
        """Let the operator's out= form write into fresh device memory."""
        results = [layout.empty() for layout in layouts]
        hosts = {name: loan.fresh(result) for name, result in zip(self.plan.out_names, results, strict=True)}
        assert self.plan.out_twin is not None
        self.plan.out_twin(*over, **more, **hosts)
        loan.settle()
        return results[0] if len(self.plan.returns) == 1 else tuple(results)

    def _writing(self, loan: Loan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plan = self.plan
        given = dict(zip(plan.names, args, strict=False)) | kwargs
        over = {name: loan.lend(value, written=name in plan.written) for name, value in given.items()}
        positional = [over[name] for name in plan.names[: len(args)]]
        result = plan.op(*positional, **{name: over[name] for name in kwargs})
        loan.settle()
        results = result if isinstance(result, tuple) else (result,)
        final = tuple(
            given[written] if written is not None else loan.bring(value)
            for written, value in zip(plan.returns, results, strict=False)
        )
        return final[0] if len(plan.returns) == 1 else final if plan.returns else None

    def _written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        given = dict(zip(self.plan.names, args, strict=False)) | kwargs
        return _tensors([given.get(name) for name in self.plan.written])

    def _with_tensors_for_numbers(self, args: tuple[Any, ...], tensors: list[Tensor]) -> tuple[Any, ...]:
        """The arguments with the tensors again that PyTorch hands to Python as plain numbers: the 2 of `op(x, 2)`.

        They get the dtype that such a number has beside the first tensor, so that promotion stays what it was.
        """
        at = [p for p in self.plan.takes_tensor if p < len(args) and isinstance(args[p], (bool, int, float, complex))]
        if not at or not tensors:
            return args
        whole = list(args)
        for position in at:
            number = whole[position]
            dtype = torch.result_type(tensors[0], number)
            whole[position] = torch.scalar_tensor(number, dtype=dtype, device="cpu")
        return tuple(whole)

    def _with_host_generator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments with a CPU generator seeded by a draw on the device, so that the device's seed decides."""
        name = self.plan.generator
        assert name is not None
        position = self.plan.names.index(name)
        given = args[position] if position < len(args) else kwargs.get(name)
        if given is not None and given.device.type != "mps":
            return args, kwargs
        draw = torch.empty(1, dtype=torch.int64, device="mps").random_(generator=given)
        host = torch.Generator("cpu").manual_seed(int(draw.item()))
        if position < len(args):
            return (*args[:position], host, *args[position + 1 :]), kwargs
        return args, {**kwargs, name: host}


def _tensors(tree: Any) -> list[Tensor]:
    """The device tensors in nested lists, tuples and dicts of arguments."""
    if isinstance(tree, Tensor):
        return [tree] if tree.is_mps else []
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [tensor for item in tree for tensor in _tensors(item)]
