"""A call of each missing operator that OpInfo has no samples of: arguments made on a device, the same on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


class Made:
    """Tensors with the same content on every device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._source = torch.Generator("cpu").manual_seed(5)

    def f(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._source).to(self.device)

    def i(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(high, shape, generator=self._source).to(dtype).to(self.device)

    def t(self, *values: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device)

    def e(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device=self.device)


def _moving_average(m: Made) -> Any:
    state = [m.t(-1.0), m.t(1.0), m.t(0.1), m.t(0, dtype=torch.int32)]
    on = m.t(1)
    output = aten._fused_moving_avg_obs_fq_helper(m.f(4, 4), on, on, *state, 0.1, 0, 255, -1)
    return [*output, *state]


def _adagrad(m: Made, lr: Any = 0.1) -> Any:
    lists = [[m.f(3), m.f(2, 2)] for _ in range(2)] + [[m.f(3).abs(), m.f(2, 2).abs()], [m.t(1.0), m.t(1.0)]]
    more = {"lr_decay": 0.1, "weight_decay": 0.01, "eps": 1e-8, "maximize": False}
    (aten._fused_adagrad_ if isinstance(lr, float) else aten._fused_adagrad_.tensor_lr)(*lists, lr=lr, **more)
    return lists


def _encoder_layer(m: Made) -> Any:
    e, h, f = 8, 2, 16
    weights = [m.f(3 * e, e), m.f(3 * e), m.f(e, e), m.f(e)]
    rest = [m.f(e), m.f(e), m.f(e), m.f(e), m.f(f, e), m.f(f), m.f(e, f), m.f(e)]
    return aten._transformer_encoder_layer_fwd(m.f(2, 3, e), e, h, *weights, False, False, 1e-5, *rest)


def _attention(m: Made) -> Any:
    x = m.f(2, 3, 8)
    return aten._native_multi_head_attention(x, x, x, 8, 2, m.f(24, 8), m.f(24), m.f(8, 8), m.f(8))


def _ctc(m: Made) -> tuple[Any, ...]:
    return m.f(6, 2, 5).log_softmax(-1), m.i(4, 2, 3) + 1, m.t(6, 5), m.t(3, 2)


def _ctc_backward(m: Made) -> Any:
    arguments = _ctc(m)
    loss, alpha = aten._ctc_loss.Tensor(*arguments)
    return aten._ctc_loss_backward.Tensor(torch.ones_like(loss), *arguments, loss, alpha, 0)


def _slow_conv2d_backward(m: Made) -> Any:
    tensors, sizes = (m.f(1, 3, 4, 4), m.f(1, 2, 4, 4), m.f(3, 2, 3, 3)), ([3, 3], [1, 1], [1, 1])
    into = {"grad_input": m.e(), "grad_weight": m.f(3, 2, 3, 3), "grad_bias": m.f(3)}
    return aten._slow_conv2d_backward.grad_input(*tensors, *sizes, **into)


def _margin(m: Made) -> Any:
    x, target = m.f(3, 4), m.i(4, 3, 4)
    out, is_target = aten.multilabel_margin_loss_forward.output(x, target, 1, output=m.e(), is_target=m.e())
    return (
        out,
        is_target,
        aten.multilabel_margin_loss_backward.grad_input(m.t(1.0).view(()), x, target, 1, is_target, grad_input=m.e()),
    )


def _fractional_backward(m: Made) -> Any:
    x = m.f(1, 2, 6, 6, 6)
    out, where = torch.nn.functional.fractional_max_pool3d_with_indices(
        x, 2, output_size=3, _random_samples=m.f(1, 2, 3).sigmoid()
    )
    arguments = (torch.ones_like(out), x, [2, 2, 2], [3, 3, 3], where)
    return aten.fractional_max_pool3d_backward.grad_input(*arguments, grad_input=m.e())


def _scaled(m: Made) -> tuple[Any, ...]:
    a, b = m.f(16, 16), m.f(16, 16)
    return a.cpu().to(torch.float8_e4m3fn).to(m.device), b.cpu().to(torch.float8_e4m3fn).t().to(m.device)


def _scales(m: Made) -> tuple[Any, ...]:
    return [m.t(0.5).view(())], [0], [], [m.t(2.0).view(())], [0], []


CALLS: dict[str, Callable[[Made], Any]] = {
    "_add_relu.Scalar": lambda m: aten._add_relu.Scalar(m.f(5), 0.5, 2),
    "_add_relu.Tensor": lambda m: aten._add_relu.Tensor(m.f(5), m.f(5), alpha=2),
    "_add_relu.out": lambda m: aten._add_relu.out(m.f(5), m.f(5), out=m.e()),
    "_add_relu_.Scalar": lambda m: aten._add_relu_.Scalar(m.f(5), 0.5),
    "_add_relu_.Tensor": lambda m: aten._add_relu_.Tensor(m.f(5), m.f(5)),
    "_addmm_activation.out": lambda m: aten._addmm_activation(m.f(3), m.f(4, 5), m.f(5, 3), use_gelu=True),
    "_aminmax": lambda m: aten._aminmax(m.f(7)),
    "_aminmax.dim": lambda m: aten._aminmax.dim(m.f(3, 7), 1, True),
    "_compute_linear_combination": lambda m: aten._compute_linear_combination(m.f(3, 4), m.f(2, 3)),
    "_compute_linear_combination.out": lambda m: aten._compute_linear_combination.out(
        m.f(3, 4), m.f(2, 3), out=torch.zeros(2, 4, device=m.device)
    ),
    "_convert_indices_from_coo_to_csr.out": lambda m: torch._convert_indices_from_coo_to_csr(m.t(0, 0, 2), 3),
    "_convert_indices_from_csr_to_coo.out": lambda m: torch._convert_indices_from_csr_to_coo(
        m.t(0, 2, 2, 3), m.t(0, 1, 2)
    ),
    "_ctc_loss.Tensor": lambda m: aten._ctc_loss.Tensor(*_ctc(m))[0],  # the second result is partly unwritten
    "_ctc_loss_backward.Tensor": _ctc_backward,
    "_functional_assert_async.msg": lambda m: aten._functional_assert_async.msg(m.t(True), "never", m.f(1)),
    "_fused_adagrad_": _adagrad,
    "_fused_adagrad_.tensor_lr": lambda m: _adagrad(m, lr=torch.tensor(0.1)),
    "_fused_moving_avg_obs_fq_helper": _moving_average,
    "_int_mm": lambda m: torch._int_mm(m.i(9, 17, 8, dtype=torch.int8), m.i(9, 8, 16, dtype=torch.int8)),
    "_int_mm.out": lambda m: torch._int_mm(
        m.i(9, 17, 8, dtype=torch.int8), m.i(9, 8, 16, dtype=torch.int8), out=m.i(9, 17, 16, dtype=torch.int32)
    ),
    "_jagged_to_padded_dense_forward": lambda m: aten._jagged_to_padded_dense_forward(
        m.f(5, 2), [m.t(0, 2, 5)], [3], 9.0
    ),
    "_padded_dense_to_jagged_forward": lambda m: aten._padded_dense_to_jagged_forward(m.f(2, 3, 2), [m.t(0, 2, 5)], 5),
    "_make_dep_token": lambda m: aten._make_dep_token(device=m.device).shape,
    "_masked_softmax": lambda m: aten._masked_softmax(m.f(2, 1, 3, 3), m.f(2, 3) > 0, 3, 1),
    "_masked_softmax_backward": lambda m: aten._masked_softmax_backward(
        m.f(2, 1, 3, 3), m.f(2, 1, 3, 3).softmax(-1), m.f(2, 1, 3, 3) > 0, 3
    ),
    "_native_multi_head_attention": _attention,
    "_transformer_encoder_layer_fwd": _encoder_layer,
    "_transform_bias_rescale_qkv": lambda m: aten._transform_bias_rescale_qkv(m.f(2, 3, 24), m.f(24), 2),
    "_scaled_mm": lambda m: torch._scaled_mm(
        *_scaled(m), m.t(0.5).view(()), m.t(2.0).view(()), out_dtype=torch.float32
    ),
    "_scaled_mm.out": lambda m: torch._scaled_mm(
        *_scaled(m), m.t(0.5).view(()), m.t(2.0).view(()), out_dtype=torch.float32, out=m.e()
    ),
    "_scaled_mm_v2": lambda m: aten._scaled_mm_v2(*_scaled(m), *_scales(m), None, torch.float32),
    "_scaled_mm_v2.out": lambda m: aten._scaled_mm_v2.out(
        *_scaled(m), *_scales(m), None, torch.float32, out=m.f(16, 16)
    ),
    "_slow_conv2d_forward.output": lambda m: aten._slow_conv2d_forward.output(
        m.f(1, 2, 4, 4), m.f(3, 2, 3, 3), [3, 3], m.f(3), [1, 1], [1, 1], output=m.e()
    ),
    "_slow_conv2d_backward.output_mask": lambda m: aten._slow_conv2d_backward.output_mask(
        m.f(1, 3, 4, 4), m.f(1, 2, 4, 4), m.f(3, 2, 3, 3), [3, 3], [1, 1], [1, 1], [True, True, True]
    ),
    "_slow_conv2d_backward.grad_input": _slow_conv2d_backward,
    "slow_conv3d_forward": lambda m: aten.slow_conv3d_forward(
        m.f(1, 2, 4, 4, 4), m.f(3, 2, 3, 3, 3), [3, 3, 3], m.f(3), [1, 1, 1], [1, 1, 1]
    ),
    "slow_conv3d_forward.output": lambda m: aten.slow_conv3d_forward.output(
        m.f(1, 2, 4, 4, 4), m.f(3, 2, 3, 3, 3), [3, 3, 3], m.f(3), [1, 1, 1], [1, 1, 1], output=m.e()
    ),
    "slow_conv_dilated2d": lambda m: aten.slow_conv_dilated2d(
        m.f(1, 2, 6, 6), m.f(3, 2, 3, 3), [3, 3], m.f(3), [1, 1], [0, 0], [2, 2]
    ),
    "slow_conv_dilated3d": lambda m: aten.slow_conv_dilated3d(
        m.f(1, 2, 6, 6, 6), m.f(3, 2, 3, 3, 3), [3] * 3, m.f(3), [1] * 3, [0] * 3, [2] * 3
    ),
    "slow_conv_transpose2d.out": lambda m: aten.slow_conv_transpose2d(m.f(1, 2, 4, 4), m.f(2, 3, 3, 3), [3, 3], m.f(3)),
    "slow_conv_transpose3d": lambda m: aten.slow_conv_transpose3d(
        m.f(1, 2, 4, 4, 4), m.f(2, 3, 3, 3, 3), [3] * 3, m.f(3)
    ),
    "slow_conv_transpose3d.out": lambda m: aten.slow_conv_transpose3d.out(
        m.f(1, 2, 4, 4, 4), m.f(2, 3, 3, 3, 3), [3] * 3, m.f(3), out=m.e()
    ),
    "_upsample_bicubic2d_aa_backward.grad_input": lambda m: aten._upsample_bicubic2d_aa_backward(
        m.f(1, 2, 3, 3), [3, 3], [1, 2, 6, 6], False
    ),
    "_upsample_lanczos2d_aa.out": lambda m: aten._upsample_lanczos2d_aa(m.f(1, 2, 6, 6), [3, 3], False),
    "_upsample_lanczos2d_aa_backward.grad_input": lambda m: aten._upsample_lanczos2d_aa_backward(
        m.f(1, 2, 3, 3), [3, 3], [1, 2, 6, 6], False
    ),
    "adaptive_avg_pool3d.out": lambda m: aten.adaptive_avg_pool3d.out(m.f(1, 2, 4, 4, 4), [2, 2, 2], out=m.e()),
    "adaptive_avg_pool3d_backward.grad_input": lambda m: aten.adaptive_avg_pool3d_backward.grad_input(
        m.f(1, 2, 2, 2, 2), m.f(1, 2, 4, 4, 4), grad_input=m.f(1, 2, 4, 4, 4)
    ),
    "batch_norm_update_stats": lambda m: aten.batch_norm_update_stats(m.f(4, 3, 2), None, None, 0.1),
    "embedding_renorm_": lambda m: aten.embedding_renorm_(m.f(5, 3) * 3, m.t(1, 3), 1.0, 2.0),
    "fractional_max_pool3d_backward.grad_input": _fractional_backward,
    "glu_jvp": lambda m: aten.glu_jvp(m.f(3, 2), m.f(3, 4), m.f(3, 4), 1),
    "glu_backward_jvp": lambda m: aten.glu_backward_jvp(m.f(3, 4), m.f(3, 2), m.f(3, 4), m.f(3, 2), m.f(3, 4), 1),
    "multi_margin_loss.out": lambda m: aten.multi_margin_loss.out(m.f(3, 4), m.i(4, 3), out=m.e()),
    "multi_margin_loss_backward.grad_input": lambda m: aten.multi_margin_loss_backward.grad_input(
        m.t(1.0).view(()), m.f(3, 4), m.i(4, 3), 1, 1, grad_input=m.e()
    ),
    "multilabel_margin_loss_forward.output": _margin,
    "multilabel_margin_loss_backward.grad_input": _margin,
    "fake_quantize_per_tensor_affine_cachemask": lambda m: aten.fake_quantize_per_tensor_affine_cachemask(
        m.f(9), 0.1, 3, 0, 15
    ),
    "fake_quantize_per_channel_affine_cachemask": lambda m: aten.fake_quantize_per_channel_affine_cachemask(
        m.f(2, 9), m.t(0.1, 0.2), m.t(1, 2, dtype=torch.int32), 0, 0, 15
    ),
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": lambda m: (
        aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
            m.f(9), m.t(0.1), m.t(3, dtype=torch.int32), m.t(1), 0, 15
        )
    ),
    "_fake_quantize_learnable_per_tensor_affine": lambda m: aten._fake_quantize_learnable_per_tensor_affine(
        m.f(9), m.t(0.1), m.t(3.0), 0, 15
    ),
    "_fake_quantize_learnable_per_tensor_affine_backward": lambda m: (
        aten._fake_quantize_learnable_per_tensor_affine_backward(m.f(9), m.f(9), m.t(0.1), m.t(3.0), 0, 15)
    ),
    "_fake_quantize_learnable_per_channel_affine": lambda m: aten._fake_quantize_learnable_per_channel_affine(
        m.f(2, 9), m.t(0.1, 0.2), m.t(1.0, 2.0), 0, 0, 15
    ),
    "_fake_quantize_learnable_per_channel_affine_backward": lambda m: (
        aten._fake_quantize_learnable_per_channel_affine_backward(
            m.f(2, 9), m.f(2, 9), m.t(0.1, 0.2), m.t(1.0, 2.0), 0, 0, 15
        )
    ),
}
