"""`logging_dir` reaches TensorBoard without an environment variable.

Replaced by TENSORBOARD_LOGGING_DIR, which the callback reads when it is made: that one wins where it is set. Needless
where TrainingArguments still has the field.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def _on_train_begin(stock: Callable[..., Any], self: Any, args: Any, *more: Any, **kwargs: Any) -> Any:
    asked = vars(args).get("logging_dir")
    if asked and "logging_dir" not in args.__dataclass_fields__ and getattr(self, "logging_dir", None) is None:
        self.logging_dir = os.path.expanduser(asked)  # noqa: PTH111  as the callback does with the variable's value
    return stock(self, args, *more, **kwargs)


patches = {"transformers.integrations.integration_utils:TensorBoardCallback.on_train_begin": _on_train_begin}
