"""The oldest versions of its dependencies that the package supports: the lower bounds in pyproject.toml.

python tests/oldest.py    # prints name==version, one per line
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
NOT_INSTALLED_TWICE = "torch"  # it would be several GB


def lower_bounds() -> dict[str, Version | None]:
    """Return for each dependency of the package and its tests the lower bound for this Python, or `None`."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    bounds: dict[str, Version | None] = {}
    for requirement in map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["test"]]):
        if requirement.marker is None or requirement.marker.evaluate():
            found = [Version(each.version) for each in requirement.specifier if each.operator == ">="]
            found += filter(None, [bounds.get(requirement.name)])
            bounds[requirement.name] = max(found, default=None)
    return bounds


def oldest_versions() -> dict[str, Version]:
    """Return the versions for the tests with the oldest dependencies; torch stays as installed."""
    bounds = lower_bounds().items()
    return {name: bound for name, bound in bounds if bound is not None and name != NOT_INSTALLED_TWICE}


if __name__ == "__main__":
    sys.stdout.writelines(f"{name}=={version}\n" for name, version in oldest_versions().items())
