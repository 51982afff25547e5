"""A step that cannot be taken because of the model's own code, told in one line."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_mps.core.errors import RunError, UserError, first_line
from hf_mps.finetune.recipe.resolve import ResolvedRecipe
from hf_mps.finetune.run import failures

# A folder that nobody gave: what is said of it is told of what lies in it.
_MADE_UP = re.compile(r"\S*hf-mps-smoke-\w+(/[\w.-]+)*")
PACKAGE = str(Path(__file__).resolve().parents[1])
LOSS = str(Path(PACKAGE, "finetune", "loss", "chunked.py"))


@contextmanager
def told(resolved: ResolvedRecipe) -> Iterator[None]:
    """Raise UserError in place of an error that the code of the recipe's model made; every other one goes on."""
    try:
        yield
    except UserError as error:
        raise UserError(_MADE_UP.sub("the made-up rows", str(error))) from error
    except RunError:
        raise
    except Exception as error:
        if failures.describe(error) is not None or not _of_a_model(error):
            raise
        recipe = resolved.recipe
        raise UserError(
            f"model {recipe.model}: it cannot take a step of the task {recipe.task}:"
            f" {type(error).__name__}: {first_line(error)}; next: --debug shows where"
        ) from error


def _of_a_model(error: Exception) -> bool:
    """Whether an error comes from the libraries: an architecture's code, its call, or a Trainer that it does not suit.

    Below the loss in chunks it is our own.
    """
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return not files[-1].startswith(PACKAGE) and LOSS not in files
