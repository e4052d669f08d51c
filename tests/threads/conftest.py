"""Fixtures of tests with many threads."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator

import pytest

from ..fakes import FAULTS
from .crew import STALL_SECONDS, Crew


@pytest.fixture(autouse=True)
def faults() -> Iterator[None]:
    FAULTS.reset()
    yield
    FAULTS.reset()


@pytest.fixture(autouse=True, scope="session")
def end_with_hanging_threads() -> Iterator[None]:
    """Let the process end although threads hang: at its end, Python waits for the threads of executors."""
    yield
    if Crew.left_hanging:
        faulthandler.dump_traceback_later(2 * STALL_SECONDS, exit=True, file=2)


@pytest.fixture(autouse=True)
def short_turns() -> Iterator[None]:
    """Switch threads fifty times as often as usual."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(usual / 50)
    yield
    sys.setswitchinterval(usual)
