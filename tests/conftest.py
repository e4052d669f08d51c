"""Fixtures of every test: a private storage directory, one torch thread, a check that nothing is left behind."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers

from hf_tiered_cache.manager import resources

from .interrupts import CtrlC

THREAD_PREFIX = "hf-tiered"


def pytest_configure() -> None:
    """Use one thread, so that parallel workers do not compete for cores; silence advice on missing kernels."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def cache_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty `$HF_TIERED_CACHE_DIR` for this test alone."""
    directory = tmp_path_factory.mktemp("hf-tiered-cache")
    monkeypatch.setenv("HF_TIERED_CACHE_DIR", str(directory))
    return directory


@pytest.fixture(autouse=True)
def no_host_tier_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn host memory off by default: a share of the machine's memory would leave nothing for the other tiers."""
    monkeypatch.setattr(resources, "_DEFAULT_HOST_SHARE", 0)


@pytest.fixture
def send_ctrl_c() -> Iterator[Callable[[float], CtrlC]]:
    """A function that prepares a Ctrl-C after a number of seconds."""
    before = signal.getsignal(signal.SIGINT)
    yield CtrlC
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def no_leaks(cache_directory: Path) -> Iterator[None]:
    """Check that a test's caches, closed or collected, have removed their directories and threads."""
    threads_before = set(threading.enumerate())
    yield
    if _left_behind(cache_directory, threads_before):
        gc.collect()  # slow with all of transformers loaded, so only for tests that do not close their caches
    deadline = time.monotonic() + 2.0
    while (left := _left_behind(cache_directory, threads_before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"left behind by this test: {left}"


def _left_behind(directory: Path, threads_before: set[threading.Thread]) -> list[str]:
    """Return cache directories and live threads that did not exist before the test."""
    threads = [
        thread.name
        for thread in set(threading.enumerate()) - threads_before
        if thread.name.startswith(THREAD_PREFIX)
    ]
    return threads + [str(path) for path in directory.iterdir()]
