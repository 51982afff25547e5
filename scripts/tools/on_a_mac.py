"""Small experiments that only a real Mac can answer; each prints one JSON object. docs/first-hour.md says what for.

    python scripts/tools/on_a_mac.py head-gradient
    python scripts/tools/on_a_mac.py shapes --steps 20

`as_expected` is true, false, or null where there are only figures; scripts/tools/first_hour.py runs all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mac_batches import Told, batches, copies, fork, workers

CLOSE = 1e-3
"""The relative error that float32 stays far below and the faults looked for are far above."""

FLOAT32 = 1e-5
"""Products over 512 values are some 3e-7 off in float32, and 8e-4 with operands of 11 bits (ml-explore/mlx#3860)."""


def main(arguments: list[str] | None = None) -> int:
    """Run one experiment and print what it found; exit code 1 where that is not what was expected."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--steps", type=int, help="fewer or more repetitions than the experiment's own")
    given = parser.parse_args(arguments)
    if given.steps is not None and given.steps < 1:
        parser.error(f"--steps {given.steps}: at least 1")
    import torch  # noqa: F401  brings the layer, and a simulated device where there is one

    experiment = EXPERIMENTS[given.experiment]
    found = experiment() if given.steps is None else experiment(given.steps)
    print(json.dumps({"experiment": given.experiment, **found}))
    return 1 if found["as_expected"] is False else 0


def head_gradient(steps: int = 3) -> Told:
    """The gradient that a head of 50,257 words sends to the layer below, with and without the guard, to the CPU's."""
    import torch

    def gradient(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        inner, head = torch.nn.Linear(64, 64), torch.nn.Linear(64, 50257)
        rows, labels = torch.randn(256, 64), torch.randint(50257, (256,))
        inner, head = inner.to(device), head.to(device)
        torch.nn.functional.cross_entropy(head(inner(rows.to(device))), labels.to(device)).backward()
        assert inner.weight.grad is not None
        return inner.weight.grad.cpu()

    right = gradient("cpu")

    def error() -> float:
        # Fresh memory is zero, and then what is read beyond the operands changes nothing.
        filled = torch.full((2**24,), 1e4, device="mps")
        torch.mps.synchronize()
        del filled
        return max(_off(gradient("mps"), right) for _ in range(steps))

    with _stock():
        stock = error()
    cured = error()
    return {"as_expected": cured < CLOSE, "error_stock": stock, "error_with_guard": cured}


def evaluation(steps: int = 1) -> Told:
    """The loss of a small causal model without gradients, by both ways to attend, to the CPU's in float32."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=200, n_positions=128, n_embd=128, n_layer=2, n_head=2)
    tokens = torch.randint(200, (2, 96), generator=torch.Generator().manual_seed(1))

    def loss(device: str, dtype: torch.dtype, attention: str) -> float:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).to(device, dtype).eval()
        model.set_attn_implementation(attention)
        with torch.no_grad():
            return float(model(input_ids=tokens.to(device), labels=tokens.to(device)).loss)

    right = loss("cpu", torch.float32, "eager")
    losses: Told = {"cpu": right}
    worst = 0.0
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        with _stock():
            losses[f"{name} sdpa stock"] = loss("mps", dtype, "sdpa")
        for attention in ("sdpa", "eager"):
            losses[f"{name} {attention}"] = loss("mps", dtype, attention)
            worst = max(worst, abs(losses[f"{name} {attention}"] - right) / right)
    return {"as_expected": worst < 0.02, "worst": worst, "losses": losses}


def out_of_range(steps: int = 1) -> Told:
    """What an id and a label out of range do: nothing up to torch 2.13, a late error from 2.14 on."""
    import torch

    from hf_mps.core.releases import torch_release

    def outcome(call: Callable[[], torch.Tensor]) -> str:
        try:
            result = call()
        except Exception as error:
            return f"at once: {type(error).__name__}: {str(error).splitlines()[0]}"
        try:
            return f"no error: {result.cpu().flatten().tolist()[:4]}"
        except Exception as error:
            return f"when read: {type(error).__name__}: {str(error).splitlines()[0]}"

    table, scores = torch.ones(3, 2, device="mps"), torch.zeros(2, 3, device="mps")
    found = {
        "id": outcome(lambda: torch.nn.functional.embedding(torch.tensor([1, 3]).to("mps"), table)),
        "label": outcome(lambda: torch.nn.functional.cross_entropy(scores, torch.tensor([1, 3]).to("mps"))),
    }
    silent = [text.startswith("no error") for text in found.values()]
    return {"as_expected": all(silent) if torch_release() < (2, 14) else not any(silent), **found}


def twice(steps: int = 20) -> Told:
    """Whether two equal trainings of a model with an embedding end in the same bits; also when torch is asked."""
    import torch

    def trained() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(50, 32), torch.nn.Flatten(), torch.nn.Linear(32 * 64, 4))
        model.to("mps")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        draw = torch.Generator().manual_seed(1)
        for _ in range(steps):
            tokens, labels = torch.randint(50, (64, 64), generator=draw), torch.randint(4, (64,), generator=draw)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(tokens.to("mps")), labels.to("mps")).backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    def apart() -> float:
        return max(float((one - other).abs().max()) for one, other in zip(trained(), trained(), strict=True))

    plain = apart()
    torch.use_deterministic_algorithms(True)
    try:
        asked: float | str = apart()
    except RuntimeError as error:
        asked = f"refused: {str(error).splitlines()[0]}"
    finally:
        torch.use_deterministic_algorithms(False)
    return {"as_expected": asked == 0.0, "apart": plain, "apart_deterministic": asked, "steps": steps}


def fallback(steps: int = 20) -> Told:
    """Operators without a Metal kernel, in place and into a given tensor, over memory that both processors share."""
    import warnings

    import torch

    from hf_mps.metal.fallback import host_view

    warnings.simplefilter("ignore")
    wrong = []
    for step in range(steps):
        base = torch.linspace(0.1, 0.9, 4096).view(64, 64)
        there, out = base.to("mps"), torch.zeros(64, device="mps")
        there.t()[1:].logit_()
        torch.take(there, torch.arange(64, device="mps"), out=out)
        there.mul_(2)
        expected = base.clone()
        expected.t()[1:].logit_()
        if not torch.allclose(out.cpu(), expected.view(-1)[:64], atol=1e-5):
            wrong.append(f"take, out=, call {step}")
        if not torch.allclose(there.cpu(), expected * 2, atol=1e-4):
            wrong.append(f"logit_, call {step}")
    try:
        host_view.host_alias(torch.ones(1, device="mps"))
        shared = True
    except host_view.NotShared:
        shared = False
    return {"as_expected": not wrong, "shared": shared, "wrong": wrong[:5]}


def repeated(steps: int = 500) -> Told:
    """The same calls again and again, without a wait between them: sums, means and half-precision layers."""
    import torch

    values = torch.linspace(-1, 1, 4096, device="mps")
    rows = torch.linspace(-1, 1, 2 * 16 * 64, device="mps").view(2, 16, 64).half()
    weight = torch.linspace(-0.1, 0.1, 64 * 64, device="mps").view(64, 64).half().requires_grad_()
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "sum": lambda: values.sum(),
        "mean": lambda: (values + 1).mean(),
        "linear in float16": lambda: torch.nn.functional.linear(rows, weight),
        "its gradient": lambda: torch.autograd.grad(torch.nn.functional.linear(rows, weight).sum(), weight)[0],
    }
    differ = {}
    for name, call in calls.items():
        made = [call() for _ in range(steps)]
        first = made[0].cpu()
        differ[name] = sum(not torch.equal(each.cpu(), first) for each in made)
    return {"as_expected": not any(differ.values()), "differ_of": steps, "differ": differ}


def precision(steps: int = 1) -> Told:
    """The relative error of float32 products on the device, to float64 on the CPU."""
    import torch

    torch.manual_seed(0)
    left, right = torch.randn(4, 512, 512), torch.randn(4, 512, 512)
    products: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "mm": lambda a, b: a[0] @ b[0],
        "bmm": torch.bmm,
        "linear": lambda a, b: torch.nn.functional.linear(a, b[0]),
        "mm of one row": lambda a, b: a[0, :1] @ b[0],
    }
    errors = dict.fromkeys(products, 0.0)
    for name, product in products.items():
        exact = product(left.double(), right.double())
        for _ in range(steps):
            found = product(left.to("mps"), right.to("mps")).cpu().double()
            errors[name] = max(errors[name], float((found - exact).norm() / exact.norm()))
    return {"as_expected": max(errors.values()) < FLOAT32, "relative_errors": errors}


def memory(steps: int = 5) -> Told:
    """What the driver holds beside live tensors in a training, and how much one process is granted at all."""
    import torch

    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True), 4).to("mps")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 128, 256, device="mps")).square().mean().backward()
        optimizer.step()
    torch.mps.synchronize()
    live, driver = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
    recommended = torch.mps.recommended_max_memory()
    held, refused = [], ""
    piece = 64 * 2**20
    most = min(4 * 2**30, recommended // 2)
    while len(held) * piece < most:
        try:
            held.append(torch.empty(piece, dtype=torch.uint8, device="mps"))
        except RuntimeError as error:
            refused = str(error).splitlines()[0]
            break
    return {
        "as_expected": driver - live < 3 * 2**30 and not refused,
        "live": live,
        "driver": driver,
        "recommended": recommended,
        "granted": len(held) * piece,
        "refused": refused,
    }


def shapes(steps: int = 100) -> Told:
    """Seconds a step over many lengths, with the guard that gives memory back and without it, and what is held."""
    import torch

    from hf_mps.layer import guards

    def run() -> tuple[list[float], int]:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to("mps")
        optimizer = torch.optim.AdamW(model.parameters())
        times = []
        for step in range(steps):
            begun = time.perf_counter()
            optimizer.zero_grad()
            model(torch.randn(8, 16 + 3 * (step % 50), 128, device="mps")).square().mean().backward()
            optimizer.step()
            torch.mps.synchronize()
            times.append(time.perf_counter() - begun)
        return times, torch.mps.driver_allocated_memory()

    figures: Told = {}
    for name in ("warm", "off", "on"):  # the first compiles what the others use too
        if name == "on":
            times, driver = run()
        else:
            with guards.suspended("shape-growth"):
                times, driver = run()
        figures[name] = {"median": statistics.median(times), "longest": max(times), "driver": driver}
    ratio = figures["on"]["median"] / figures["off"]["median"]
    return {"as_expected": None if steps < 20 else ratio < 1.2, "on_over_off": ratio, "seconds": figures}


def sizes(steps: int = 1001) -> Told:
    """torch.cat and a batched product, with their guards, of `steps` thousandths of the sizes where faults begin.

    Without the guards they write over other tensors on some releases. What memory does not hold is left out.
    """
    import torch

    memory = torch.mps.recommended_max_memory()
    right: Told = {}
    rows, half = 2**16 * steps // 1000, 2**14  # 2^31 values of a byte in all, beside as many that come in
    if memory > 2.5 * 2 * rows * half:
        parts = [torch.full((rows, half), value, dtype=torch.int8, device="mps") for value in (1, 2)]
        whole = torch.cat(parts, 1)
        right["cat"] = [sorted(set(whole[row].cpu().tolist())) == [1, 2] for row in (0, rows // 2, -1)]
        del parts, whole
    batch = 2**16 * steps // 1000  # of 2^16 values each
    if memory > 1.5 * 2 * batch * 2**16:
        one, other = (torch.randn(batch, 256, 64, device="mps", dtype=torch.float16) for _ in range(2))
        product = torch.bmm(one, other.transpose(1, 2))
        places = (0, batch // 2, batch - 1)
        pairs = [(product[i].float().cpu(), one[i].cpu().float() @ other[i].cpu().float().T) for i in places]
        right["product"] = [_off(*pair) < 0.01 for pair in pairs]
    return {"as_expected": all(map(all, right.values())) if right else None, "right": right}


def _off(found: Any, right: Any) -> float:
    return float((found - right).abs().max() / right.abs().max())


@contextmanager
def _stock() -> Iterator[None]:
    """The device without the guards."""
    from hf_mps.layer import guards

    with guards.suspended():
        yield


EXPERIMENTS: dict[str, Callable[..., Told]] = {
    "head-gradient": head_gradient,
    "evaluation": evaluation,
    "out-of-range": out_of_range,
    "twice": twice,
    "fallback": fallback,
    "repeated": repeated,
    "precision": precision,
    "copies": copies,
    "fork": fork,
    "workers": workers,
    "batches": batches,
    "memory": memory,
    "shapes": shapes,
    "sizes": sizes,
}

if __name__ == "__main__":
    sys.exit(main())
