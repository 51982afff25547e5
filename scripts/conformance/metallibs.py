"""Compile a fixed sample of MLX's Metal kernels, and run its kernels of training against float64.

    hf-mps kernels fetch mlx
    HF_MPS_SIMULATE=1 python scripts/conformance/metallibs.py [--sample 500] [--processes 2]

An error is the largest difference from float64, in epsilons of float32 and of the largest value of the result.
"""

from __future__ import annotations

import argparse
import struct
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.kernels import constants, metallib, signature, store

RELEASE = "mlx"


def main() -> None:
    """Print how many functions of the sample compile, what the others lack, and each training kernel's error."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--sample", type=int, default=500)
    asked.add_argument("--processes", type=int, default=2)
    given = asked.parse_args()
    library = torch.mps.load_metallib(store.path(RELEASE))
    for name, found, expected in training(library):
        print(f"{name:28} {error(found, expected):5.1f} epsilons", flush=True)
    names = sorted(store.open_library(RELEASE))
    sample = [names[number * len(names) // given.sample] for number in range(given.sample)]
    with ProcessPoolExecutor(given.processes) as pool:
        reasons = Counter(pool.map(lacking, sample))
    print(f"{store.named(store.canonical(RELEASE))}: {reasons.pop('', 0)} of {len(sample)} functions compile "
          f"(of {len(names):,})")  # fmt: skip
    for reason, count in reasons.most_common():
        print(f"{count:5} {reason}")


def lacking(name: str) -> str:
    """Compile a kernel, each function constant 0, and return why that fails, or an empty string."""
    import llvmlite.binding as llvm

    from hf_mps.metal.kernels.lowering.compiler import compile_kernel

    try:
        text = str(metallib.parse(store.open_library(RELEASE), name))
        text = constants.stated(text, name, {each.name: 0 for each in constants.declared(text)})
        compile_kernel(signature.read(text, name), llvm.parse_assembly(text).as_bitcode())
    except (RuntimeError, ValueError) as error:
        return str(error).replace(name, "…").splitlines()[-1]
    return ""


def error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, in epsilons of float32 and of the largest expected value."""
    return float((found.cpu().double() - expected).abs().max() / expected.abs().max()) / torch.finfo(torch.float).eps


def training(library: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Run MLX's kernels of training as its host binds them; a name, what it wrote, and the same in float64."""
    torch.manual_seed(0)
    yield from _norms(library)
    yield from _loss(library)
    yield from _attention(library)
    small = torch.linspace(-1e-3, 1e-3, 1000)
    out = torch.empty(1000, device="mps")
    library.v_Expm1float32float32(small.to("mps"), out, 1000, threads=1000, arg_casts="int32")
    yield "expm1 (|x| <= 0.001)", out, torch.expm1(small.double())


def _norms(library: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    # A thread reads 4 values of a row, or 8. With threads beyond the row's end vjp_layer_norm leaves its own arrays.
    rows, size, eps = 6, 256, 1e-5
    for name, rms, group in (("vjp_rms", True, 64), ("vjp_layer_norm", False, 32)):
        for looped in ("", "_looped"):
            x, w, g = torch.randn(rows, size), torch.randn(size), torch.randn(rows, size)
            gx, gw = torch.zeros(rows, size, device="mps"), torch.zeros(rows, size, device="mps")
            sizes = [size, 1] + [rows, 1] * (rms and not looped)
            bound = [each.to("mps") for each in (x, w, g)]
            kernel = getattr(library.with_constants(has_w=True), f"{name}{looped}float32")
            casts = dict.fromkeys(range(6, 10), "int32")
            kernel(*bound, gx, gw, eps, *sizes, threads=group * rows, group_size=group, arg_casts=casts)
            x, w = x.double().requires_grad_(), w.double().expand(rows, size).detach().requires_grad_()
            centred = x if rms else x - x.mean(-1, keepdim=True)
            ((centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * w) * g).sum().backward()
            assert x.grad is not None
            assert w.grad is not None
            yield f"{name}{looped}: x", gx, x.grad
            yield f"{name}{looped}: w", gw, w.grad


def _loss(library: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    rows, classes = 5, 1000
    x, target, cotangent = torch.randn(rows, classes), torch.randint(classes, (rows,)), torch.randn(rows)
    exact = x.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(exact, target, reduction="none")
    loss.backward(cotangent.double())
    assert exact.grad is not None
    out = torch.empty(rows, classes, device="mps")
    bound = [each.to("mps") for each in (x, target.int(), loss.detach().float(), cotangent)]
    library.cross_entropy_vjp_float32(*bound, out, classes, threads=128 * rows, group_size=128, arg_casts={5: "int32"})
    yield "cross_entropy_vjp", out, exact.grad


def _attention(library: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    heads, length, width, scale = 3, 40, 64, 0.125
    q, k, v, g = (torch.randn(heads, length, width) for _ in range(4))
    scores = q.double() @ k.double().mT * scale
    lse, weights = scores.logsumexp(-1), scores.softmax(-1)
    out = weights @ v.double()
    found = torch.empty(heads, length, device="mps")
    library.sdpa_vjp_odo_float_64(out.float().to("mps"), g.to("mps"), found, length, threads=(32, length, heads),
                                  group_size=(32, 1, 1), arg_casts={3: "int32"})  # fmt: skip
    odo = (out.float().double() * g.double()).sum(-1)
    yield "sdpa_vjp_odo", found, odo
    s, dp = (q.double() @ k.double().mT).float(), (g.double() @ v.double().mT).float()
    ds, p = (torch.empty(heads, length, length, device="mps") for _ in range(2))
    # SDPAVJPTileParams: one tile of all scores, not causal.
    sizes = struct.pack("<5if2i", length, length, length, 0, 0, scale, 0, 0)
    tile = torch.frombuffer(bytearray(sizes), dtype=torch.int32).to("mps")
    bound = [each.to("mps") for each in (s, dp, lse.float(), odo.float())]
    library.sdpa_vjp_ds_float(*bound, ds, p, tile, threads=(length, length, heads), group_size=(8, 8, 1))
    exact = (s.double() * scale - lse.float().double()[..., None]).exp()
    yield "sdpa_vjp_ds: p", p, exact
    yield "sdpa_vjp_ds: ds", ds, exact * (dp.double() - odo.float().double()[..., None]) * scale


if __name__ == "__main__":
    main()
