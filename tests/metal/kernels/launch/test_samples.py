"""PyTorch's own samples of the operators that rules run agree with the CPU's, gradients too."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from hf_mps.metal.kernels import launch
from hf_mps.metal.kernels.rules import RULES, Dispatch
from scripts.conformance.opinfo import operators
from tests.metal.kernels.launch.samples import compared

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SCANNED = (*FLOATS, torch.int64, torch.int32, torch.uint8)


@dataclass(frozen=True)
class Taken:
    """Operators, "NAME/VARIANT" where samples have several, and what part of their samples rules run at the least."""

    operators: str
    dtypes: tuple[torch.dtype, ...] = FLOATS
    ran: float = 0.0
    every: int = 1
    tolerance: dict[torch.dtype, float] = field(default_factory=dict)


def _pointwise() -> str:
    launch.load()
    modules = {name: getattr(each.function, "func", each.function).__module__ for name, each in RULES.items()}
    names = {name.partition(".")[0] for name, own in modules.items() if own.endswith((".elementwise", ".pointwise"))}
    found = {each.name for each in operators() if each.aten_name in names or each.name.replace(".", "_") in names}
    # It computes in float64, which a Mac refuses.
    return " ".join(sorted(found - {"float_power"}))


TAKEN = [
    Taken("cat stack half bfloat16 long fill masked_fill"),
    Taken("index_put __getitem__ gather scatter scatter_add scatter_reduce", ran=0.7),
    Taken("tril triu nn.functional.unfold unfold repeat_interleave nonzero argwhere"),
    Taken("nn.functional.avg_pool2d", (torch.float32, torch.int64)),
    Taken("masked_select masked_scatter index_copy nn.functional.pad"),
    Taken("nn.functional.max_pool1d nn.functional.max_pool2d max_pool2d_with_indices_backward", ran=1.0, every=29),
    Taken("linalg.cholesky linalg.cholesky_ex", (torch.float32,)),
    Taken("sum mean amax amin nansum linalg.vector_norm norm", ran=0.7),
    Taken("any all count_nonzero argmax argmin aminmax", (*FLOATS, torch.int64, torch.uint8, torch.bool), ran=0.7),
    Taken("histc", (torch.float32,), ran=0.7),
    # The halves have equal values, which come in any order.
    Taken("sort topk", (torch.float32,), ran=0.6),
    Taken("searchsorted bucketize", (*FLOATS, torch.int64), ran=0.6),
    Taken("cumsum cumprod cummax cummin nn.functional.group_norm", SCANNED, ran=0.6, tolerance={torch.bfloat16: 6e-2}),
    # The samples' gradients go by logarithms of 1e4, where float32 has steps of 1e-3: the CPU's differ as much.
    Taken("logcumsumexp", SCANNED, ran=0.6, tolerance={torch.float32: 5e-3, torch.bfloat16: 6e-2}),
    # Sums of eight or sixteen products that nearly cancel keep a rounding of the largest, about 9.
    Taken(
        " ".join(
            f"nn.functional.interpolate/{each}"
            for each in ("linear", "bilinear", "bicubic", "trilinear", "nearest", "nearest-exact")
        ),
        tolerance={torch.bfloat16: 4e-2},
    ),
    Taken("nn.functional.embedding nn.functional.embedding_bag", ran=0.9),
]
ELSEWHERE = Taken(
    # test_opinfo.py takes the floats. Of whole numbers come floats, of many operators.
    _pointwise(),
    (torch.int64, torch.bool, torch.complex64),
    every=9,
    tolerance={torch.int64: 1e-4, torch.bool: 1e-4},
)
# Operators that a rule runs on a later release; this one computes them with MPSGraph.
LATER = {"logical_not", "nan_to_num", "nn.functional.glu", "nn.functional.logsigmoid", "nn.functional.mish"}
DRAWING = """bernoulli exponential log_normal multinomial nn.functional.alpha_dropout
    nn.functional.dropout nn.functional.dropout2d nn.functional.feature_alpha_dropout normal rand_like randint
    randint_like randn randn_like uniform"""


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("operator", "how"),
    [
        *((operator, how) for how in TAKEN for operator in how.operators.split()),
        *(pytest.param(operator, ELSEWHERE, marks=pytest.mark.slow) for operator in ELSEWHERE.operators.split()),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_samples_agree(kernels: Dispatch, operator: str, how: Taken) -> None:
    name, _, variant = operator.partition("/")
    ran = taken = 0
    for dtype in how.dtypes:
        tolerance = how.tolerance.get(dtype)
        found = compared(kernels, name, dtype, variant=variant or None, tolerance=tolerance, every=how.every)
        assert found.differ == []
        ran, taken = ran + found.ran, taken + found.taken
    assert taken or how is ELSEWHERE
    assert ran >= how.ran * taken
    assert ran or not taken or operator in LATER


@pytest.mark.slow
@pytest.mark.rotated
@pytest.mark.parametrize("operator", DRAWING.split())
def test_samples_that_draw_have_the_cpus_shape_and_repeat(kernels: Dispatch, operator: str) -> None:
    ran = 0
    for info in (each for each in operators() if each.name == operator):
        for dtype in (each for each in FLOATS if info.supports_dtype(each, "cpu")):
            for sample in info.sample_inputs("mps", dtype):
                on_cpu = sample.transform(lambda each: each.cpu() if isinstance(each, torch.Tensor) else each)
                if "device" in on_cpu.kwargs:
                    on_cpu.kwargs["device"] = "cpu"
                kernels.ledger.clear()
                found = []
                for _ in range(2):
                    torch.mps.manual_seed(3)
                    found.append(info(sample.input, *sample.args, **sample.kwargs))
                wanted = info(on_cpu.input, *on_cpu.args, **on_cpu.kwargs)
                ran += bool(kernels.ledger.operators)
                assert torch.equal(found[0].cpu(), found[1].cpu())
                assert (found[0].shape, found[0].dtype) == (wanted.shape, wanted.dtype)
    assert ran
