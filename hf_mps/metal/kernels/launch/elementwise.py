"""Functions of one, two and three tensors, element by element, and activations with their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.kernels.launch.pointwise import binary, broadcast, params, plane, result, ternary, unary, valued, walk
from hf_mps.metal.kernels.rules import by_meta, kernels, refuse, rule
from hf_mps.metal.kernels.values import NoRule, i64, metal, span, u32

Operand = Tensor | complex
"""An input of two: a number comes as Python's where PyTorch wrapped one."""


def written(target: Tensor | None, dtype: torch.dtype, *operands: Operand, exact: bool = False) -> Tensor:
    """Return the output: `target` where it has the shape of the result and a dtype that takes `dtype`, else a new one.

    `exact` is for operators whose output has to be of `dtype` itself.

    Raises:
        NoRule: PyTorch refuses the arguments, or `target` has another shape (which PyTorch resizes).
    """
    inputs = [each for each in operands if isinstance(each, Tensor)]
    if target is None:
        return result(dtype, *inputs)
    shape = broadcast(*(tuple(each.shape) for each in inputs))
    refuse(tuple(target.shape) != shape and target.numel(), "the result has another shape than what it is written to")
    if target.dtype != dtype and (exact or not torch.can_cast(dtype, target.dtype)):
        raise NoRule("PyTorch refuses the arguments: the result's dtype can't be cast to the output's")
    refuse(any(_overlap(target, each) for each in inputs), "an input and the output share memory in part")
    if tuple(target.shape) != shape:
        target.resize_(shape)
    return target


def _overlap(target: Tensor, given: Tensor) -> bool:
    """They share storage, and are not the same elements in the same order: PyTorch refuses some of these cases."""
    if not given.is_mps or target.untyped_storage().data_ptr() != given.untyped_storage().data_ptr():
        return False
    if target.data_ptr() == given.data_ptr() and target.shape == given.shape and target.stride() == given.stride():
        return False
    apart = _end(target) <= given.data_ptr() or _end(given) <= target.data_ptr()
    return target.numel() > 0 and given.numel() > 0 and not apart


def _end(tensor: Tensor) -> int:
    return tensor.data_ptr() + span(tensor) * tensor.element_size()


def common(first: Operand, second: Operand) -> torch.dtype:
    """Return the dtype that two inputs are promoted to; numbers count less than tensors (torch.result_type)."""
    if isinstance(first, Tensor) and isinstance(second, Tensor) and first.dtype == second.dtype:
        return first.dtype
    return torch.result_type(first, second)


def floating(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a float function's result: whole numbers give the default dtype."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()


def as_input(target: Tensor | None, self: Tensor, *_: Any, **__: Any) -> Tensor:
    """One input, and the output has its dtype."""
    return torch.empty_like(self) if target is None else written(target, self.dtype, self, exact=True)


def as_float(target: Tensor | None, self: Tensor, *_: Any, **__: Any) -> Tensor:
    """One input, and whole numbers become floats."""
    return written(target, floating(self.dtype), self)


def as_truth(target: Tensor | None, *operands: Operand) -> Tensor:
    """One input or two, and the output is of bool."""
    return written(target, torch.bool, *operands)


def as_common(target: Tensor | None, self: Operand, other: Operand, *_: Any, **__: Any) -> Tensor:
    """Two inputs, promoted to one dtype."""
    return written(target, common(self, other), self, other)


def as_common_float(target: Tensor | None, self: Operand, other: Operand, *_: Any, **__: Any) -> Tensor:
    """Two inputs, promoted to one dtype, and whole numbers become floats."""
    return written(target, floating(common(self, other)), self, other)


# Host: operations/UnaryKernel.mm, BinaryKernel.mm, TensorCompare.mm, ActivationKernel.mm and Activation.mm.
COMPLEX = {torch.float32: torch.complex64, torch.float16: torch.complex32}
GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def activate(output: Tensor, self: Tensor, *, name: str) -> None:
    """Launch the kernel of one operand of a floating dtype."""
    refuse(not self.is_floating_point(), "no numbers of a floating dtype")
    unary(output, self, name)


def of_real(output: Tensor, self: Tensor, *, name: str) -> None:
    """Launch the kernel of one operand of real numbers."""
    refuse(self.is_complex(), "complex numbers: the host takes the real part of a complex result")
    unary(output, self, name)


def compare(output: Tensor, self: Operand, other: Operand, *, name: str) -> None:
    """Launch a comparison, whose result is of bool whatever the output is."""
    binary(output, self, other, name, common=common(self, other), natural=torch.bool)


def as_complex(target: Tensor | None, real: Tensor, imag: Tensor) -> Tensor:
    """Two inputs of one dtype, and the output holds pairs of them."""
    refuse(real.dtype != imag.dtype, "PyTorch refuses the arguments: two dtypes")
    refuse(real.dtype not in COMPLEX, "no kernel for the dtype")
    return written(target, COMPLEX[real.dtype], real, imag)


PLAIN: tuple[tuple[Callable[..., None], Callable[..., Tensor], str], ...] = (
    (unary, as_input, "neg bitwise_not round"),
    (
        unary, as_float,
        "acos asin atan cos cosh digamma erf erfc erfinv exp exp2 expm1 i0 lgamma log log10 log1p log2 reciprocal "
        "rsqrt sigmoid sin sinc sinh sqrt tan tanh special_entr special_erfcx special_i0e special_i1 special_i1e "
        "special_spherical_bessel_j0",
    ),
    *(
        (unary, as_float, f"special_{name}={name}_forward")
        for name in (
            "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "modified_bessel_i0", "modified_bessel_i1",
            "modified_bessel_k0", "modified_bessel_k1", "scaled_modified_bessel_k0", "scaled_modified_bessel_k1",
        )
    ),
    (unary, as_truth, "logical_not"),
    (of_real, as_input, "abs"),
    (of_real, as_float, "angle"),
    (activate, as_input, "silu hardswish hardsigmoid mish"),
    (
        binary, as_common,
        "mul.Tensor remainder.Tensor fmod.Tensor maximum minimum hypot nextafter logaddexp logaddexp2 igamma igammac "
        "gcd lcm bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor "
        "bitwise_right_shift.Tensor clamp_min.Tensor=maximum clamp_max.Tensor=minimum silu_backward hardswish_backward "
        "hardsigmoid_backward mish_backward sigmoid_backward",
    ),
    (
        binary, as_common_float,
        "div.Tensor=div_true atan2 copysign.Tensor xlogy.Tensor special_xlog1py special_zeta "
        "special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v "
        "special_chebyshev_polynomial_w special_shifted_chebyshev_polynomial_t "
        "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v "
        "special_shifted_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he",
    ),
    (binary, as_complex, "complex=make_complex polar"),
    (
        compare, as_truth,
        "eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar "
        "ge.Tensor ge.Scalar",
    ),
)  # fmt: skip
"""How it is launched, what it writes to, and the operators: "div.Tensor=div_true" where a kernel has
another name than its operator without `special_` and overload."""

for _launch, _outputs, _operators in PLAIN:
    for _word in _operators.split():
        _operator, _, _kernel = _word.partition("=")
        _kernel = _kernel or _operator.partition(".")[0].removeprefix("special_")
        rule(_operator, outputs=_outputs, name=_kernel)(_launch)


@rule("round.decimals", outputs=as_input)
def round_decimals(output: Tensor, self: Tensor, *, decimals: int) -> None:
    """Rounded to decimals; to none is `round`."""
    if decimals == 0:
        unary(output, self, "round")
    else:
        unary(output, self, "round_decimals", valued(decimals, torch.int64))


@rule(
    "pow.Tensor_Scalar",
    outputs=lambda target, self, power: written(target, torch.result_type(self, power), self, exact=True),
)
def power(output: Tensor, self: Tensor, exponent: complex) -> None:
    """A power; squares, roots and reciprocals have other kernels."""
    dtype = torch.result_type(self, exponent)
    whole, real = not (dtype.is_floating_point or dtype.is_complex), isinstance(exponent, int | float)
    if whole and isinstance(exponent, int | float) and exponent < 0:
        raise NoRule("PyTorch refuses the arguments: a whole number to a negative power")
    if exponent == 0:
        output.fill_(1)
        return
    if exponent == 1:
        output.copy_(self)
        return
    base = self if self.dtype == dtype else self.to(dtype)
    special = {2: "sqr"} if whole else {2: "sqr", -1: "reciprocal", -0.5: "rsqrt", 0.5: "sqrt"}
    if real and exponent in special:
        unary(output, base, special[exponent])  # type: ignore[index]
        return
    # The exponent's dtype does not follow the base's: a half's power is of a float exponent too.
    number = torch.int32 if whole else torch.float32 if real else torch.complex64
    unary(output, base, "pow_scalar", valued(exponent, number))


# Host: operations/Gamma.mm.


@rule("nan_to_num", outputs=as_input)
def nan_to_num(output: Tensor, self: Tensor, *replaced: float | None, **named: float | None) -> None:
    """What is no number, and infinities, replaced; from 2.14 on."""
    if not (self.is_floating_point() or self.is_complex()):
        output.copy_(self)
        return
    limits = torch.finfo(self.dtype)
    values = {"nan": 0.0, "posinf": limits.max, "neginf": limits.min}
    given = {**dict(zip(values, replaced, strict=False)), **named}
    values |= {name: value for name, value in given.items() if value is not None}
    unary(output, self, "nan_to_num", params("NanToNumParams", torch.float32, *values.values()))


@rule("fmax", outputs=as_common, kernel="fmax", whole="maximum")
@rule("fmin", outputs=as_common, kernel="fmin", whole="minimum")
def extreme(output: Tensor, self: Tensor, other: Tensor, *, kernel: str, whole: str) -> None:
    """The larger or smaller, and of a NaN the other; whole numbers have none."""
    binary(output, self, other, kernel if common(self, other).is_floating_point else whole)


def _as_divided(target: Tensor | None, self: Operand, other: Operand, *, rounding_mode: str | None = None) -> Tensor:
    return (as_common_float if rounding_mode is None else as_common)(target, self, other)


@rule("div.Tensor_mode", outputs=_as_divided)
def divide_rounding(output: Tensor, self: Operand, other: Operand, *, rounding_mode: str | None = None) -> None:
    """The quotient, rounded down or towards zero where asked."""
    names = {None: "div_true", "floor": "div_floor", "trunc": "div_trunc"}
    refuse(rounding_mode not in names, "PyTorch refuses the arguments: another rounding mode")
    binary(output, self, other, names[rounding_mode])


# Host: operations/BinaryOps.mm.
@rule("add.Tensor", outputs=as_common, name="add")
@rule("sub.Tensor", outputs=as_common, name="sub")
def add(output: Tensor, self: Operand, other: Operand, *, name: str, alpha: complex = 1) -> None:
    """self plus or minus alpha * other: no product where alpha is 1, a copy where it is 0 (add_sub_lerp_template)."""
    if name == "sub" and any(torch.result_type(each, each) == torch.bool for each in (self, other)):
        raise NoRule("PyTorch refuses the arguments: subtraction of bool")
    if alpha == 1:
        binary(output, self, other, name)
        return
    dtype = common(self, other)
    whole = not (dtype.is_floating_point or dtype.is_complex)
    if whole and not (isinstance(alpha, int) and dtype != torch.bool):
        raise NoRule("PyTorch refuses the arguments: alpha of another kind than the tensors")
    if alpha == 0:
        output.copy_(self) if isinstance(self, Tensor) else output.fill_(self)
        return
    # A kernel that casts computes in the output's dtype, its alpha too.
    binary(output, self, other, f"{name}_alpha", beside=valued(alpha, output.dtype))


def _clamped_dtype(self: Tensor, *bounds: float | None) -> torch.dtype:
    found = self.dtype
    for bound in bounds:
        if bound is not None:
            dtype = torch.result_type(self, bound)
            found = dtype if found == self.dtype else torch.promote_types(found, dtype)
    return found


def _as_clamped(target: Tensor | None, self: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    return written(target, _clamped_dtype(self, min, max), self, exact=True)


@rule("clamp", outputs=_as_clamped)
def clamp(output: Tensor, self: Tensor, min: float | None = None, max: float | None = None) -> None:
    """Between two numbers, or on one side of one."""
    refuse(min is None and max is None, "PyTorch refuses the arguments: no bound")
    dtype = _clamped_dtype(self, min, max)
    given = self if self.dtype == dtype else self.to(dtype)
    bounds = [each for each in (min, max) if each is not None]
    if any(map(math.isnan, bounds)):
        output.fill_(math.nan)
    elif len(bounds) == 2:
        unary(output, given, "clamp_scalar", params("ClampScalarParams", dtype, *bounds))
    else:
        unary(output, given, f"clamp_{'max' if min is None else 'min'}_scalar", valued(bounds[0], dtype))


@rule("clamp_min", outputs=_as_clamped, side="min")
@rule("clamp_max", outputs=_as_clamped, side="max")
def clamp_side(output: Tensor, self: Tensor, bound: float, *, side: str) -> None:
    """Not below, or not above, a number."""
    clamp(output, self, **{side: bound})


def _as_clamped_by(target: Tensor | None, self: Tensor, min: Tensor | None = None, max: Tensor | None = None) -> Tensor:
    bounds = [each for each in (min, max) if each is not None]
    refuse(not bounds, "PyTorch refuses the arguments: no bound")
    if len(bounds) == 1:
        return as_common(target, self, bounds[0])
    if any(each.dtype != self.dtype and each.dim() != self.dim() for each in bounds):
        raise NoRule("three dtypes in tensors with dimensions and without")
    dtype = torch.promote_types(common(self, bounds[0]), common(self, bounds[1]))
    return written(target, dtype, self, *bounds)


@rule("clamp.Tensor", outputs=_as_clamped_by)
def clamp_by_tensors(output: Tensor, self: Tensor, min: Tensor | None = None, max: Tensor | None = None) -> None:
    """Between the elements of two tensors, or on one side of one's."""
    if min is not None and max is not None:
        ternary(output, self, min, max, "clamp")
    elif min is not None:
        binary(output, self, min, "maximum")
    elif max is not None:
        binary(output, self, max, "minimum")


def _as_lerped(target: Tensor | None, self: Tensor, end: Tensor, weight: Tensor | complex) -> Tensor:
    refuse(self.dtype != end.dtype, "PyTorch refuses the arguments: two dtypes")
    inputs = (self, end, weight) if isinstance(weight, Tensor) else (self, end)
    return written(target, self.dtype, *inputs, exact=True)


@rule("lerp.Scalar", outputs=_as_lerped)
def lerp(output: Tensor, self: Tensor, end: Tensor, weight: complex) -> None:
    """self + weight * (end - self)."""
    binary(output, self, end, "lerp_alpha", beside=valued(weight, self.dtype))


@rule("lerp.Tensor", outputs=_as_lerped)
def lerp_by_tensor(output: Tensor, self: Tensor, end: Tensor, weight: Tensor | complex) -> None:
    """The same with a weight for each element, or one weight."""
    if not isinstance(weight, Tensor) or weight.dtype != self.dtype or not weight.is_mps:
        raise NoRule("a weight of another dtype or device")
    way, operands, grid = walk(output, self, end, weight), [output, self, end, weight], (output.numel(), 1, 1)
    group, rest = (1024, 1, 1), [i64(each) for each in way.strides]
    if way.contiguous:
        kind, rest = "dense", []
    elif weight.numel() == 1 and walk(output, self, end).contiguous:
        kind, rest = "scalar_weight", []
    elif len(way.shape) in (2, 3):
        kind, grid = f"strided_{len(way.shape)}d", (*way.shape, 1)[:3]  # type: ignore[assignment]
        group = (min(way.shape[0], 1024), 1, 1)
    else:
        kind, rest = "strided", [i64(way.shape), *rest, u32(len(way.shape))]
    kernels[f"lerp_tensor_{kind}_{metal(output.dtype)}"].launch([*operands, *rest], grid, group)


@rule("relu", outputs=as_input)
def relu(output: Tensor, self: Tensor) -> None:
    """What is positive."""
    refuse(self.dtype == torch.bool, "PyTorch refuses the arguments: bool")
    unary(output, self, "relu")


@rule("gelu", outputs=as_input)
def gelu(output: Tensor, self: Tensor, *, approximate: str = "none") -> None:
    """Gaussian error linear unit."""
    unary(output, self, _gelu(approximate))


@rule("gelu_backward", outputs=as_common)
def gelu_backward(grad_input: Tensor, grad_output: Tensor, self: Tensor, *, approximate: str = "none") -> None:
    """Its gradient."""
    binary(grad_input, grad_output, self, f"{_gelu(approximate)}_backward")


def _gelu(approximate: str) -> str:
    refuse(approximate not in GELU, "PyTorch refuses the arguments: another approximation")
    return GELU[approximate]


@rule("leaky_relu", outputs=as_input)
def leaky_relu(output: Tensor, self: Tensor, negative_slope: float = 0.01) -> None:
    """What is negative times the slope."""
    unary(output, self, "leaky_relu", valued(negative_slope, self.dtype))


@rule("leaky_relu_backward", outputs=as_common)
def leaky_relu_backward(
    grad_input: Tensor, grad_output: Tensor, self: Tensor, slope: float, self_is_result: bool
) -> None:
    """Its gradient; `self` may be the result, whose sign is the same."""
    refuse(self_is_result and slope < 0, "PyTorch refuses the arguments: an in-place call with a slope below zero")
    beside = valued(slope, grad_input.dtype)
    # This kernel, as log_sigmoid's, takes the input before the gradient; gelu's, elu's and silu's the gradient first.
    binary(grad_input, self, grad_output, "leaky_relu_backward", beside=beside)


@rule("elu", outputs=as_input)
def elu(output: Tensor, self: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> None:
    """Exponential linear unit; celu and selu are it with other numbers."""
    unary(output, self, "elu", params("ELUParams", self.dtype, alpha, scale, input_scale))


@rule("elu_backward", outputs=lambda target, *given: as_common(target, given[0], given[-1]))
def elu_backward(grad_input: Tensor, grad_output: Tensor, *given: Any) -> None:
    """Its gradient, of the input or of the result."""
    alpha, scale, input_scale, is_result, self_or_result = given
    refuse(is_result and alpha < 0, "PyTorch refuses the arguments: an in-place call with alpha below zero")
    beside = params("ELUBackwardParams", grad_input.dtype, alpha, scale, input_scale, truth=is_result)
    binary(grad_input, grad_output, self_or_result, "elu_backward", beside=beside)


@rule("log_sigmoid_forward")
def log_sigmoid(self: Tensor) -> tuple[Tensor, Tensor]:
    """The result, and an empty buffer: only the CPU's gradient reads one."""
    output = torch.empty_like(self)
    unary(output, self, "log_sigmoid_forward")
    return output, torch.empty(0, dtype=self.dtype, device=self.device)


@rule("log_sigmoid_backward", outputs=as_common)
def log_sigmoid_backward(grad_input: Tensor, grad_output: Tensor, self: Tensor, buffer: Tensor) -> None:
    """Its gradient, of the input alone."""
    binary(grad_input, self, grad_output, "log_sigmoid_backward")


@rule("glu", outputs=by_meta)
def glu(output: Tensor, self: Tensor, dim: int = -1) -> None:
    """The first half along a dimension times the second's sigmoid: in one grid where nothing is strided."""
    half = self.shape[dim] // 2
    if not _halved("glu", [output, self], self, dim):
        binary(output, self.narrow(dim, 0, half), self.narrow(dim, half, half), "glu")


@rule("glu_backward", outputs=by_meta)
def glu_backward(grad_input: Tensor, grad_output: Tensor, self: Tensor, dim: int) -> None:
    """Its gradient."""
    refuse(not _halved("glu_backward", [grad_input, self, grad_output], self, dim), "a gradient of a strided glu")


def _halved(kernel: str, operands: list[Tensor], self: Tensor, dim: int) -> bool:
    """Launch a line of threads for each half, one for each place before the dimension; False where one is strided."""
    kernel = f"{kernel}_dense_{metal(self.dtype)}"
    kernels.need(kernel)
    dense = all(each.is_contiguous() for each in operands)
    if dense and operands[0].numel():
        inner = math.prod(self.shape[dim % self.dim() :]) // 2
        kernels[kernel].launch([*operands, i64(inner)], *plane(inner, self.numel() // (2 * inner)))
    return dense
