"""Copies of what an environment gives or gets, where others run beside it in one process.

What it gave is read after the others have stepped, too. Where all of a class share a dict or an
array, it would by then hold what the last of them wrote.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

_CONSTANT = frozenset(
    {type(None), bool, int, float, complex, str, bytes, *np.sctypeDict.values()} - {np.void}
)


def copied(value: Any, depth: int = 8) -> Any:
    """A copy that shares nothing with the value.

    Parts that cannot be copied are given as they are: pickle, by which they travel, takes some.

    Args:
        value: The value.
        depth: How many dicts deep parts are copied one by one, which is quicker and leaves out only
            what cannot be copied. A dict may hold itself.
    """
    kind = type(value)
    if kind in _CONSTANT:
        return value
    if kind is dict and depth:
        return {key: copied(part, depth - 1) for key, part in value.items()}
    if kind is np.ndarray and not value.dtype.hasobject:
        return value.copy("K")
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def copied_numbers(info: Any) -> Any:
    """A copy of an info that shares no dict and no array with it.

    Other objects are handed on as they are, as SyncVectorEnv does.
    """
    if type(info) is dict:
        return {key: copied_numbers(value) for key, value in info.items()}
    return info.copy() if type(info) is np.ndarray else info
