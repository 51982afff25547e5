"""attention-no-grad: attention in evaluation and generation is computed as in training where Metal's own is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple

from hf_mps.core.choice import Choice
from hf_mps.core.patching import Patch
from hf_mps.core.stock import Stock
from hf_mps.device import faults
from hf_mps.guards import kernel_overrides, known_faults
from hf_mps.guards.kernel_overrides import Kernel, Tried

OPERATOR = "_scaled_dot_product_attention_math_for_mps"
"""What scaled_dot_product_attention calls on Metal where no gradient is wanted; with one it takes the math form."""
FEW = 8
"""Queries up to which Metal takes kernels made for generation (Attention.mm, `supports_sdpa_vector`)."""
WIDTHS = (64, 96, 128)
"""Of a head, for which those kernels are made; 256 too in later releases, where none of their faults is left."""
LONG = 1024
"""Keys from which on those kernels go over them in two passes."""


class Call(NamedTuple):
    """The arguments of one call; tensors are (batch, heads, length, width), the first two may be missing."""

    query: Any
    key: Any
    value: Any
    mask: Any = None
    dropout: float = 0.0
    causal: bool = False
    dropout_mask: Any = None
    scale: float | None = None
    grouped: bool = False

    def of(self, function: Callable[..., Any]) -> Any:
        """What `function` returns for it, in the operator's own order of arguments."""
        named = {"scale": self.scale} | ({"enable_gqa": True} if self.grouped else {})
        where = (self.query, self.key, self.value, self.mask, self.dropout, self.causal, self.dropout_mask)
        return function(*where, **named)


class AttentionNoGrad(Tried):
    """Stands before Metal's own attention, below autograd and autocast: a trained step never comes through here.

    That is below `scaled_dot_product_attention` itself, which a library may have imported before us and torch.compile
    traces: a compiled graph holds this operator, and tracing meets nothing of ours. A call that resembles none of the
    `CASES` goes straight on.
    """

    name = "attention-no-grad"
    what = (
        "attention without gradients (evaluation, generation, DPO's reference) has kernels of its own on Metal, some"
        " of which let causal models see later tokens in half precision or misread permuted tensors, long keys or masks"
    )
    issue = "https://github.com/pytorch/pytorch/issues/195910"
    until = "the oldest supported torch is 2.14"
    releases = "<2.14"
    faults = ("causal-leak", "permuted-attention", "long-keys", "odd-keys", "masked-rows", "value-width")

    @property
    def patches(self) -> dict[str, str | Patch]:
        """Its kernel before the device's; torch 2.8 cannot give that out, so the math form takes its place."""
        return {f"aten::{OPERATOR}": Kernel("_attend", alone=True, otherwise=_math)}

    def __init__(self) -> None:
        super().__init__()
        self._cures: dict[tuple[str, Any], Callable[[Call, Callable[..., Any]], Any]] = {}
        self._replaced = False

    def applies(self) -> Choice[bool]:
        """Whether one of the cases differs from the CPU on this device, in one of the dtypes."""
        import torch

        if self._replaced:
            # pytorch#163597, #174861 and #156707, none of them mended there.
            return Choice(True, f"torch {torch.__version__} has the fault and does not give its kernel out")
        return super().applies()

    def trial(self) -> Choice[bool]:
        """What trying all cases says."""
        with self.left_alone():
            self._cures = _found_wrong()
        if not self._cures:
            return Choice(False, f"tried on the device: attention without gradients is right ({', '.join(CASES)})")
        wrong: dict[str, list[str]] = {}
        for name, dtype in self._cures:
            wrong.setdefault(name, []).append(str(dtype).removeprefix("torch."))
        told = "; ".join(f"{name} in {', '.join(dtypes)}" for name, dtypes in wrong.items())
        return Choice(True, f"tried on the device, without gradients: {told} differ from the CPU")

    def concerns(self, module: ModuleType) -> bool:
        """Whether this release has one of the faults; it is noted whether it gives its kernel out.

        2.13 has one on macOS 26 that the simulated device does not imitate (PR 191794).
        """
        self._replaced = not kernel_overrides.given_out().value
        return self._replaced or known_faults.listed(self.name) or faults.possible(*self.faults)

    def forget(self) -> None:
        """Also what the trial found."""
        super().forget()
        self._cures = {}

    def _attend(self, stock: Stock, *args: Any, scale: Any = None, enable_gqa: bool = False) -> Any:
        call = Call(*args)._replace(scale=scale, grouped=enable_gqa)
        alike = [name for name, case in CASES.items() if case.like(call)]
        if (alike or self._replaced or self._verdict is not None) and not self.needed:
            # No call has a fault on this device: from the next one on none comes through here.
            self.release()
            return call.of(stock)
        cures = [self._cures[name, call.query.dtype] for name in alike if (name, call.query.dtype) in self._cures]
        if not cures and not self._replaced:
            return call.of(stock)
        self.acted(
            f"attention without gradients is not left to Metal's own kernels: {self.verdict().reason}", aloud=False
        )
        if self._replaced:
            return call.of(stock)
        cure = cures[0] if len(cures) == 1 else _by_math
        return stock.theirs(cure, call, stock.part)


def _math(query: Any, key: Any, value: Any, mask: Any = None, *args: Any, **named: Any) -> Any:
    """The form that training takes; half precision is added up in float32."""
    import torch

    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, mask, *args, **named)


def _by_math(call: Call, own: Callable[..., Any]) -> Any:
    return call.of(_math)


def _by_mask(call: Call, own: Callable[..., Any]) -> Any:
    """With the causal mask written out."""
    import torch

    shape = call.query.shape[-2], call.key.shape[-2]
    mask = torch.full(shape, float("-inf"), dtype=call.query.dtype, device=call.query.device).triu_(1)
    return call._replace(mask=mask, causal=False).of(own)


def _by_copies(call: Call, own: Callable[..., Any]) -> Any:
    """On tensors that lie as they are read."""
    query, key, value = (tensor.contiguous() for tensor in call[:3])
    return call._replace(query=query, key=key, value=value).of(own)


@dataclass(frozen=True)
class Case:
    """A kind of call that some release gets wrong; `like` tells such calls, `tried` is one on the CPU in float32.

    `cures` are tried one after the other, and the math form after them.
    """

    like: Callable[[Call], bool]
    tried: Callable[[], Call]
    cures: tuple[Callable[[Call, Callable[..., Any]], Any], ...] = ()


def _few(call: Call) -> bool:
    few = call.query.shape[-2] <= FEW and call.mask is None and not call.causal
    return few and call.query.shape[-1] in WIDTHS


def _loose(call: Call) -> bool:
    return not (call.query.is_contiguous() and call.key.is_contiguous() and call.value.is_contiguous())


def _made(queries: int, keys: int, *, heads: int = 4, permuted: bool = False, width: int = 64) -> Call:
    """Two rows of random numbers, of which no generator but its own is asked."""
    import torch

    drawn = torch.Generator("cpu").manual_seed(queries + keys)
    shapes = [(2, heads, length, each) for length, each in ((queries, 64), (keys, 64), (keys, width))]
    if permuted:
        shapes = [(2, length, heads, each) for _, _, length, each in shapes]
    made = [torch.randn(shape, generator=drawn, dtype=torch.float32, device="cpu") for shape in shapes]
    query, key, value = (tensor.transpose(1, 2) if permuted else tensor for tensor in made)
    return Call(query, key, value)


def _masked(*, added: bool = False) -> Call:
    """Rows padded on the left, whose first queries may attend to nothing; the mask is `added` or of bool."""
    import torch

    mask = torch.ones(2, 1, FEW, 40, dtype=torch.bool, device="cpu")
    mask[0, 0, :3], mask[1, 0, 4:, :30] = False, False
    if added:
        mask = torch.zeros(mask.shape, dtype=torch.float32, device="cpu").masked_fill_(~mask, float("-inf"))
    return _made(FEW, 40, permuted=True)._replace(mask=mask)


def _bool(call: Call) -> bool:
    import torch

    return call.mask is not None and call.mask.dtype == torch.bool


CASES: dict[str, Case] = {
    # pytorch#195910: in float16 and bfloat16, up to torch 2.12.
    "causal": Case(
        lambda call: call.causal and call.query.shape[-2] > 1, lambda: _made(64, 64)._replace(causal=True), (_by_mask,)
    ),
    # pytorch#181133 (up to 2.11), #170837 and #163597 (2.8): of a batch, as transformers permutes them.
    "permuted": Case(lambda call: _few(call) and _loose(call), lambda: _made(3, 64, permuted=True), (_by_copies,)),
    # pytorch#174861: in float16 and bfloat16, 2.8 to 2.10.
    "long keys": Case(lambda call: _few(call) and call.key.shape[-2] >= LONG, lambda: _made(1, 1100)),
    # pytorch pull request 169222: keys that do not fill the last block of 32.
    "odd keys": Case(lambda call: _few(call) and call.key.shape[-2] < LONG, lambda: _made(1, 70)),
    # pytorch#156707 (2.8), #167515 (open): NaN; PR 184180: masks that some rows share.
    "masked": Case(lambda call: call.mask is not None and not _bool(call), lambda: _masked(added=True)),
    # PR 182285; most releases make them float masks before they come here.
    "masked by bool": Case(_bool, _masked),
    # pytorch#176767, up to 2.11.
    "width of values": Case(lambda call: call.value.shape[-1] != call.query.shape[-1], lambda: _made(16, 16, width=24)),
}


def _found_wrong() -> dict[tuple[str, Any], Callable[[Call, Callable[..., Any]], Any]]:
    """The cases that the device gets wrong, with the first cure that mends each there."""
    import torch

    # What is read beyond a tensor is zero in fresh memory, and then changes nothing.
    filled = torch.full((2**22,), 1e4, dtype=torch.float32, device="mps")
    torch.mps.synchronize()
    del filled
    found = {}
    for (name, case), dtype in product(CASES.items(), (torch.float32, torch.float16, torch.bfloat16)):
        made = case.tried()
        call = _moved(made, dtype, "mps")
        # Of the same rounded numbers, in float32 on the CPU.
        right = _moved(_moved(made, dtype, "cpu"), torch.float32, "cpu").of(_math)[0]
        if not _agrees(call.of(_asked)[0], right):
            mend = (cure for cure in case.cures if _agrees(cure(call, _asked)[0], right))
            found[name, dtype] = next(mend, _by_math)
    return found


def _asked(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, dropout_mask: Any, **named: Any
) -> Any:
    """As a program asks for it: some systems and releases do not come to Metal's own kernels from there."""
    import torch

    with torch.no_grad():
        ask = torch.nn.functional.scaled_dot_product_attention
        return (ask(query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, **named),)


def _moved(call: Call, dtype: Any, device: str) -> Call:
    import torch

    # Permuted only there: a moved tensor could come as contiguous.
    def there(tensor: Any) -> Any:
        if tensor.is_contiguous():
            return tensor.to(device, dtype)
        return tensor.transpose(1, 2).to(device, dtype).transpose(1, 2)

    mask = call.mask
    if mask is not None:
        mask = mask.to(device) if mask.dtype == torch.bool else there(mask)
    query, key, value = (there(tensor) for tensor in call[:3])
    return call._replace(query=query, key=key, value=value, mask=mask)


def _agrees(found: Any, expected: Any) -> bool:
    """Whether no value is off by more than a twentieth of the largest, which half precision stays far below."""
    return found.shape == expected.shape and bool(
        (found.float().cpu() - expected).abs().max() <= 0.05 * expected.abs().max()
    )


GUARD = AttentionNoGrad()
