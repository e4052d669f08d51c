"""What every test gets: its own storage directory, one torch thread, a check that nothing is left behind."""

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
    """One thread, so that parallel test workers do not fight for cores; and no advice on missing kernels."""
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
    """Tests say which tiers they use; a share of this machine's memory would keep everything from the others."""
    monkeypatch.setattr(resources, "_DEFAULT_HOST_SHARE", 0)


@pytest.fixture
def send_ctrl_c() -> Iterator[Callable[[float], CtrlC]]:
    """Called with seconds, prepares a Ctrl-C after so long."""
    before = signal.getsignal(signal.SIGINT)
    yield CtrlC
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def no_leaks(cache_directory: Path) -> Iterator[None]:
    """After a test its caches, closed or collected, have removed their directories and threads."""
    threads_before = set(threading.enumerate())
    yield
    if _left_behind(cache_directory, threads_before):
        gc.collect()  # slow with all of transformers loaded, so only for those that do not close their caches
    deadline = time.monotonic() + 2.0
    while (left := _left_behind(cache_directory, threads_before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"left behind by this test: {left}"


def _left_behind(directory: Path, threads_before: set[threading.Thread]) -> list[str]:
    """Directories of caches and live threads that did not exist before the test."""
    threads = [
        thread.name
        for thread in set(threading.enumerate()) - threads_before
        if thread.name.startswith(THREAD_PREFIX)
    ]
    return threads + [str(path) for path in directory.iterdir()]
