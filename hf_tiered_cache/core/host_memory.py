"""The amount of host memory that is available."""

from __future__ import annotations

from pathlib import Path

import psutil

# Memory limit and usage of a container, in version 2 and in version 1 of control groups.
_CONTROL_GROUP_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
_CONTROL_GROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))


def available_bytes() -> int:
    """Return the host memory that can be used without swapping, within the limit of the container, if any.

    A container's usage counts the page cache too, so there this is a lower bound.
    """
    available: int = psutil.virtual_memory().available
    return min([available, *_left_in_container()])


def _left_in_container() -> list[int]:
    left = []
    for group, (limit_name, usage_name) in zip(_CONTROL_GROUPS, _CONTROL_GROUP_FILES, strict=True):
        try:
            limit, usage = (int((group / name).read_text()) for name in (limit_name, usage_name))
        except (OSError, ValueError):  # not this version, or no limit ("max")
            continue
        left.append(max(0, limit - usage))
    return left
