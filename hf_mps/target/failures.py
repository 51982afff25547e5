"""A step that cannot be taken because of the model's own code, told in one line."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from hf_mps.errors import RunError, UserError, first_line
from hf_mps.finetune import failures
from hf_mps.finetune.order import Order

# Where the code of architectures stands, and ours that it may call on its way: an error below that is our own.
# A folder that nobody gave: what is said of it is told of what lies in it.
_MADE_UP = re.compile(r"\S*hf-mps-smoke-\w+(/[\w.-]+)*")
MODELS, OURS = "/transformers/models/", "/hf_mps/finetune/loss/"


@contextmanager
def told(order: Order) -> Iterator[None]:
    """Raise UserError in place of an error that the code of the order's model made; every other one goes on."""
    try:
        yield
    except UserError as error:
        raise UserError(_MADE_UP.sub("the made-up rows", str(error))) from error
    except RunError:
        raise
    except Exception as error:
        if failures.in_words(error) is not None or not _of_a_model(error):
            raise
        recipe = order.recipe
        raise UserError(
            f"model {recipe.model}: it cannot take a step of the task {recipe.task}:"
            f" {type(error).__name__}: {first_line(error)}; next: --debug shows where"
        ) from error


def _of_a_model(error: Exception) -> bool:
    """Whether an error comes from an architecture's code, or from what that called outside of ours.

    A call with names that its forward pass does not take ends before that code, in the module's call.
    """
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, TypeError) and files[-1].endswith("torch/nn/modules/module.py"):
        return True
    last = max((place for place, file in enumerate(files) if MODELS in file), default=None)
    return last is not None and not any(OURS in file for file in files[last:])
