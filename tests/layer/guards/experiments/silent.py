"""What Metal does without an error: indices out of range, copies that change the dtype, a bias that is lost.

Of indices out of range these say whether the run ended in a line, of the others whether numbers are the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_mps.core.errors import UserError
from tests.layer.guards import lightning_loops, loops
from tests.layer.guards.experiments.both import agree, numbers


def _refused(run: Callable[[], Any], *words: str) -> bool:
    """Whether `run` ends in a person's line with all `words`; False where it ends as if nothing were wrong.

    Or, from torch 2.14 on, in an error that comes late and names no place.
    """
    message = ""
    try:
        run()
    except UserError as error:
        message = str(error)
    except torch.AcceleratorError:
        return False
    assert not message or all(word in message for word in words), message
    return bool(message)


def _rows(column: str, value: Any, row: int = 3) -> list[dict[str, Any]]:
    data = loops.rows()
    data[row] = data[row] | {column: value}
    return data


def ids_of_another_tokenizer(folder: Path) -> bool:
    """An added token without resize_token_embeddings, in Trainer."""
    ids = [1, 2, loops.WORDS, 3, 4, 5]
    run = loops.trainer(folder, data=_rows("input_ids", ids), train_sampling_strategy="sequential")
    return _refused(run.train, "input_ids holds 40 in row 3", "has 40 rows", "resize_token_embeddings")


def labels_from_one(folder: Path) -> bool:
    """Labels 1 and 2 of a model with two classes."""
    data = [row | {"labels": row["labels"] + 1} for row in loops.rows()]
    run = loops.trainer(folder, data=data)
    return _refused(run.train, "labels holds 2 in row", "2 classes", "labels from 0 to 1")


def labels_smoothed(folder: Path) -> bool:
    """Label smoothing takes them out of the model's hands: Trainer gathers with them itself."""
    run = loops.trainer(folder, data=_rows("labels", 7), label_smoothing_factor=0.1)
    return _refused(run.train, "labels holds 7", "2 classes")


def labels_in_evaluation(folder: Path) -> bool:
    """A class that only the evaluation's rows have."""
    run = loops.trainer(folder)
    return _refused(lambda: run.evaluate(_rows("labels", 5)), "labels holds 5 in row 3")


def ids_of_accelerate(folder: Path) -> bool:
    """A bare Accelerate loop, whose collator pads with a number that is no id."""
    from transformers import default_data_collator

    def run() -> None:
        accelerator = loops.new_accelerator()
        data = torch.utils.data.DataLoader(
            _rows("input_ids", [1, 2, 3, 4, -1, -1]), 8, collate_fn=default_data_collator
        )
        model, loader = accelerator.prepare(loops.bert(), data)
        for batch in loader:
            accelerator.backward(model(**batch)["loss"])
        torch.mps.synchronize()  # where torch 2.14 and later raise

    return _refused(run, "input_ids holds -1 in row 3")


def words_that_are_no_label(folder: Path) -> bool:
    """A causal language model, padded with -1 where -100 is left out."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=loops.WORDS, n_positions=16))
    data = [{"input_ids": row["input_ids"], "labels": [*row["input_ids"][:4], -1, -1]} for row in loops.rows()]
    run = loops.trainer(folder, model=model, data=data)
    return _refused(run.train, "labels holds -1 in row 0", "-100 for what is to be left out")


def longer_than_its_positions(folder: Path) -> bool:
    """GPT-2 makes its positions on the device, so rows that were not cut read zeros for them."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=loops.WORDS, n_positions=4))
    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in loops.rows()]
    return _refused(loops.trainer(folder, model=model, data=data).train, "6 tokens long", "max_length=4")


def ids_of_lightning(folder: Path) -> bool:
    """Lightning, with the model inside its module."""
    from transformers import default_data_collator

    pl = lightning_loops.library()
    data = torch.utils.data.DataLoader(_rows("input_ids", [50] * 6), 8, collate_fn=default_data_collator)
    run = lightning_loops.trainer(pl, folder, max_epochs=1)
    return _refused(lambda: run.fit(lightning_loops.module(pl), data), "input_ids holds 50 in row 3")


def half_copies(folder: Path) -> bool:
    """Half weights that are saved: the model that goes on training is the one that was."""
    weights = torch.arange(64.0).view(8, 8) / 8
    there = weights.to("mps")
    saved = there.to("cpu", torch.float16)
    return torch.equal(there.cpu(), weights) and torch.equal(saved, weights.half())


def views_that_widen(folder: Path) -> bool:
    """A part of what lies there, as float32: pytorch#194344's own offsets."""
    whole = torch.arange(8192, dtype=torch.float16) / 16
    there = whole.to("mps")
    parts = [
        (there[at : at + 64].to(device="cpu", dtype=torch.float32), whole[at : at + 64].float()) for at in (1, 64, 4096)
    ]
    return all(torch.equal(found, right) for found, right in parts)


def copies_into_a_tensor(folder: Path) -> bool:
    """pytorch#189563's own: an end at an offset, and what `to(other)` does."""
    values = torch.arange(8.0) + 0.25
    there = values.to("mps")
    into = torch.empty(10, dtype=torch.float16)[2:].copy_(there)
    like = there.to(torch.empty(1, dtype=torch.int32))
    return torch.equal(into, values.half()) and torch.equal(like, values.int()) and torch.equal(there.cpu(), values)


def one_row(folder: Path) -> bool:
    """The classifier of the last row of an evaluation, with its gradients."""
    return _linear_agrees(1, 8)


def one_row_in_each(folder: Path) -> bool:
    """pytorch#188438's own shape."""
    return _linear_agrees(80, 1, 2)


def many_matrices(folder: Path) -> bool:
    """pytorch#189495: more than 65,536 of them."""
    return _linear_agrees(65_539, 2, 2)


def _linear_agrees(*shape: int) -> bool:
    def run(device: str) -> list[Tensor]:
        given = [numbers(*each).to(device).requires_grad_() for each in (shape, (3, shape[-1]), (3,))]
        found = F.linear(*given)
        return [found.detach(), *torch.autograd.grad(found.square().mean(), given)]

    return agree(run, tolerance=1e-5)


def _multiplied() -> torch.dtype:
    x = torch.ones(2, 2, device="mps")
    return (x @ x).dtype


def float32_island(folder: Path) -> bool:
    """A part of a model that is computed in float32 on purpose, under the autocast that its training has on mps."""
    with torch.autocast("mps", dtype=torch.bfloat16):
        around = _multiplied()
        with torch.autocast("cuda", enabled=False):
            inside = _multiplied()
        return (around, inside, _multiplied()) == (torch.bfloat16, torch.float32, torch.bfloat16)


def float32_of_old(folder: Path) -> bool:
    """The same in older words, as a decorator."""
    with pytest.deprecated_call():
        multiplied = torch.cuda.amp.autocast(enabled=False)(_multiplied)
    with torch.autocast("mps", dtype=torch.bfloat16):
        return multiplied() == torch.float32


def float32_function(folder: Path) -> bool:
    """A function of its own gradients that wants float32, and a backward pass as its forward pass was."""
    seen: list[torch.dtype] = []

    class Squared(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx: Any, x: Any) -> Any:
            seen.extend((x.dtype, _multiplied()))
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, grad: Any) -> Any:
            seen.append(_multiplied())
            return 2 * grad * ctx.saved_tensors[0]

    x = torch.ones(2, device="mps", dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("mps", dtype=torch.bfloat16):
        Squared.apply(x).sum().backward()
    return seen == [torch.float32] * 3
