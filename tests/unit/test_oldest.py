"""The package's dependencies have lower bounds, and `make test` really runs with those."""

from __future__ import annotations

import importlib.metadata
import os
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from ..oldest import PYPROJECT, lower_bounds, oldest_versions


def test_every_dependency_has_a_lower_bound() -> None:
    dependencies = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    bounds = lower_bounds()
    assert len(dependencies) > 5
    assert [line for line in dependencies if bounds.get(Requirement(line).name) is None] == []


@pytest.mark.skipif("HF_TIERED_OLDEST" not in os.environ, reason="not the run with the oldest versions")
def test_the_oldest_versions_are_installed() -> None:
    oldest = oldest_versions()
    assert {name: Version(importlib.metadata.version(name)) for name in oldest} == oldest
