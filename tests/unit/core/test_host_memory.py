"""Available host memory, inside and outside a container."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from hf_tiered_cache.core import host_memory


@pytest.fixture
def control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    second = tmp_path / "memory"
    second.mkdir()
    monkeypatch.setattr(host_memory, "_CONTROL_GROUPS", (tmp_path, second))
    return tmp_path


def test_without_a_container(control_groups: Path) -> None:
    assert 0.5 < host_memory.available_bytes() / psutil.virtual_memory().available < 2


def test_without_a_limit(control_groups: Path) -> None:
    (control_groups / "memory.max").write_text("max\n")
    (control_groups / "memory.current").write_text("4096\n")
    assert host_memory.available_bytes() > 1 << 20


@pytest.mark.parametrize(
    ("limit", "usage"),
    [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")],
)
def test_in_a_container(control_groups: Path, limit: str, usage: str) -> None:
    (control_groups / limit).write_text("1000\n")
    (control_groups / usage).write_text("400\n")
    assert host_memory.available_bytes() == 600
