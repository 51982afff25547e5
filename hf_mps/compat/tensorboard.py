"""`logging_dir` reaches TensorBoard without an environment variable.

Replaced by TENSORBOARD_LOGGING_DIR, which the callback reads when it is made: that one wins where it is set. Needless
where TrainingArguments still has the field.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hf_mps.integrations.patch import around


def apply(integration_utils: ModuleType) -> None:
    """Let TensorBoardCallback follow `training_args.logging_dir`. Raises AttributeError without the class."""
    around(integration_utils.TensorBoardCallback, "on_train_begin", _on_train_begin)


def _on_train_begin(stock: Callable[..., Any], self: Any, args: Any, *more: Any, **kwargs: Any) -> Any:
    asked = vars(args).get("logging_dir")
    if asked and "logging_dir" not in args.__dataclass_fields__ and getattr(self, "logging_dir", None) is None:
        self.logging_dir = os.path.expanduser(asked)  # noqa: PTH111  as the callback does with the variable's value
    return stock(self, args, *more, **kwargs)
