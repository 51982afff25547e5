"""model.generate(num_beams=None), which the summarization and translation scripts without a Trainer pass.

None was the default of every argument until 4.24; today it is compared with a number (TypeError). Needless where
generate takes None: leaving such an argument out says the same there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_mps.core.notices import print_notice

COUNTS = ("num_beams", "num_return_sequences")


def _generate(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    for name in COUNTS:
        if name in kwargs and kwargs[name] is None:
            print_notice(f"generate({name}=None): left out, the default stays")
            del kwargs[name]
    return stock(self, *args, **kwargs)


patches = {"transformers.generation.utils:GenerationMixin.generate": _generate}
