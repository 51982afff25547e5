"""Labels of text that a script's `map` turns into numbers stay numbers, where pandas 3 reads texts as large strings.

datasets keeps a column's type where the new values fit it, and texts are excepted: numbers do not become texts
(https://github.com/huggingface/datasets/issues/6805). Its test knows `string` alone; csv files read with pandas 3 have
`large_string`, so run_glue.py with labels of text in a csv trains on "0" and "1". Needless where datasets refuses the
cast for both.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from hf_mps.core.notices import print_notice


def _cast(stock: Callable[..., Any], array: Any, pa_type: Any, *args: Any, **kwargs: Any) -> Any:
    import pyarrow as pa

    allowed = args[0] if args else kwargs.get("allow_primitive_to_str", True)
    if not allowed and pa.types.is_large_string(pa_type) and pa.types.is_primitive(array.type):
        print_notice(f"map: numbers in place of a column's texts stay {array.type}; datasets would keep them as texts")
        # datasets' own error for `string`, upon which its writer keeps the type of the new values.
        raise TypeError(f"Couldn't cast array of type {array.type} to {pa_type}: numbers do not become texts")
    return stock(array, pa_type, *args, **kwargs)


def concerns(module: ModuleType) -> bool:
    """Whether array_cast makes texts of numbers for large strings. Raises AttributeError without the function."""
    import pyarrow as pa

    try:
        module.array_cast(pa.array([1]), pa.large_string(), allow_primitive_to_str=False)
    except TypeError:
        return False
    return True


patches = {"datasets.table:array_cast": _cast}
