"""Conversion of numbers, sizes and paths, as users give them, to plain Python values.

Every function raises `ValueError` with the reason; the caller adds the name of the setting.
"""

from __future__ import annotations

import math
import numbers
import os
import re
from decimal import Decimal
from pathlib import Path
from urllib.parse import unquote

_COUNT_UNITS = {"": 1}
_COUNT_UNITS |= {prefix: 1000 ** (power + 1) for power, prefix in enumerate("KMGT")}
_COUNT_UNITS |= {f"{prefix}I": 1024 ** (power + 1) for power, prefix in enumerate("KMGT")}
_BYTE_UNITS = _COUNT_UNITS | {f"{unit}B": factor for unit, factor in _COUNT_UNITS.items()}
_NUMBER_AND_UNIT = re.compile(r"\s*([+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d{1,2})?)\s*([A-Za-z]*)\s*")


def as_number(value: object) -> int | float:
    """Convert a Python, numpy or torch number, or a zero-dimensional array, to a finite `int` or `float`."""
    try:
        if getattr(value, "ndim", None) == 0:
            value = value.item()  # type: ignore[attr-defined]
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError("it is not a number")
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
    except (RuntimeError, OverflowError) as error:  # a tensor without data, a fraction out of range
        raise ValueError(str(error)) from error
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError("it is not finite")
    return number


def as_count(value: object) -> int:
    """Convert a whole number of any type (`1e9` too), or text: `"4096"`, `"4K"` (4,000) or `"4Ki"` (4,096)."""
    return _whole(value, _COUNT_UNITS)


def as_bytes(value: object) -> int:
    """Convert a whole number of bytes, or text: `"6GiB"` or `"6Gi"` (binary), `"200 GB"` or `"200G"` (decimal)."""
    return _whole(value, _BYTE_UNITS)


def _whole(value: object, units: dict[str, int]) -> int:
    if isinstance(value, str):
        match = _NUMBER_AND_UNIT.fullmatch(value)
        if match is None or match[2].upper() not in units:
            raise ValueError("it is not a number with a unit")
        factor = units[match[2].upper()]
        amount = Decimal(match[1]) * factor
        # "1.1GiB" may end within a byte, which is dropped; "0.5" is an error.
        if amount != int(amount) and (factor == 1 or abs(amount) < 1):
            raise ValueError("it is not a whole number")
        return int(amount)
    number = as_number(value)
    if number != int(number):
        raise ValueError("it is not a whole number")
    return int(number)


def as_location(location: object) -> str:
    """Make a path absolute and expand `~`; leave a URL as it is, but turn `file://` into a path.

    Reads the working directory and the user's home directory, and nothing else.
    """
    if (
        not isinstance(location, (str, os.PathLike))
        or not isinstance(text := os.fspath(location), str)
        or not text
    ):
        raise ValueError("it is not a path")
    if "\0" in text:
        raise ValueError("a path cannot contain a zero byte")
    if text.startswith("file://"):
        path = text.removeprefix("file://").removeprefix("localhost")
        if not path.startswith("/"):
            raise ValueError("a file:// URL must have an absolute local path, e.g. 'file:///data/blocks'")
        return unquote(path)
    if "://" in text:
        return text
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise ValueError(f"there is no such user; for a directory of that name give './{text}'")
    try:
        # Not normalised: after a symbolic link, ".." is the parent of its target, not of the link.
        return str(Path(expanded).absolute())
    except OSError as error:
        raise ValueError(f"the working directory is gone, so give an absolute path ({error})") from error
