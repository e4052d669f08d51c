"""Private directories: ownership and removal."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hf_tiered_cache import ConfigError, KVCacheManager, TieredCacheConfig, TierError
from hf_tiered_cache.tiers.workspace import PrivateDirectory, check_directory, default_base

from ...fakes import random_kv

_HOLD = """
import os, sys
from pathlib import Path
from hf_tiered_cache.tiers.workspace import PrivateDirectory
directory = PrivateDirectory(Path(sys.argv[1]))
(directory.path / "data").write_text("x")
print(directory.path, flush=True)
sys.stdin.read()
"""


def _owner(base: Path) -> subprocess.Popen[str]:
    """Start another process with a private directory below `base`; it prints the path and waits."""
    return subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(base)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_closing_removes_only_what_was_made(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    (tmp_path / "hf-tiered-notes.txt").write_text("keep")
    first, second = PrivateDirectory(tmp_path), PrivateDirectory(tmp_path)
    (first.path / "block").write_text("x")
    first.close()
    first.close()
    assert not first.path.exists() and second.path.exists()
    second.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf-tiered-notes.txt", "mine"]


def test_forgotten_directory_goes_with_its_owner(tmp_path: Path) -> None:
    path = PrivateDirectory(tmp_path).path
    gc.collect()
    assert not path.exists()


def test_next_start_sweeps_after_a_kill_and_spares_the_living(tmp_path: Path) -> None:
    with _owner(tmp_path) as victim, _owner(tmp_path) as survivor:
        assert victim.stdout is not None and survivor.stdout is not None
        dead, alive = Path(victim.stdout.readline().strip()), Path(survivor.stdout.readline().strip())
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        assert dead.exists()
        with_sweep = PrivateDirectory(tmp_path)
        assert not dead.exists()
        assert (alive / "data").read_text() == "x"
        with_sweep.close()
        survivor.communicate("")
    assert list(tmp_path.iterdir()) == []


def test_forked_child_leaves_the_directory_alone(tmp_path: Path) -> None:
    directory = PrivateDirectory(tmp_path)
    child = os.fork()
    if child == 0:
        directory.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert directory.path.exists()
    directory.close()


def test_bad_directories(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"l1_path=.*does not exist.*mounted"):
        check_directory(tmp_path / "missing", "l1_path")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="not a directory"):
        check_directory(tmp_path / "file", "l1_path")
    with pytest.raises(TierError, match="cannot make a private directory"):
        PrivateDirectory(tmp_path / "file")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a directory in which nothing can be made")
def test_directory_that_takes_no_files_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_tiered_cache.tiers.workspace._LOCK_TIMEOUT_SECONDS", 0.2)
    with pytest.raises(TierError, match="cannot make a private directory"):
        PrivateDirectory(Path("/proc"))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="not writable"):
        check_directory(tmp_path, "l1_path")
    tmp_path.chmod(0o700)


def test_unwritable_directory_for_any_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="not writable"):
        check_directory(tmp_path, "l1_path")


@pytest.mark.parametrize("setting", ["l1_path", "l2_url", "HF_TIERED_CACHE_DIR"])
def test_a_change_of_the_working_directory_changes_nothing(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files go where the path pointed, before and after the first sealed block, and none is left."""
    for name in ("kv", "elsewhere", "elsewhere/kv"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    options = {} if setting == "HF_TIERED_CACHE_DIR" else {setting: "kv"}
    if setting == "l2_url":
        options["l1_capacity"] = 0
    elif setting != "l1_path":
        monkeypatch.setenv(setting, "kv")
    config = TieredCacheConfig(window_tokens=32, block_tokens=16, host_capacity=0, **options)  # type: ignore[arg-type]
    with KVCacheManager(config) as manager:
        manager.allocate("a")
        key, value = random_kv(200)
        for directory in (tmp_path / "elsewhere", tmp_path):
            monkeypatch.chdir(directory)
            manager.append("a", 0, key, value)
            manager.flush()
            assert len(list((tmp_path / "kv").glob("hf-tiered-*/*"))) > 0
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert manager.fetch("a", 0, range(200))[0].equal(key)
    assert list((tmp_path / "kv").iterdir()) == [] == list((tmp_path / "elsewhere/kv").iterdir())


def test_the_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_TIERED_CACHE_DIR", "~/kv")
    assert default_base() == tmp_path / "kv"
    monkeypatch.setenv("HF_TIERED_CACHE_DIR", f"file://{tmp_path}/kv")
    assert default_base() == tmp_path / "kv"
    for nonsense in ("s3://bucket", "~no-such-user/kv", "file://kv"):
        monkeypatch.setenv("HF_TIERED_CACHE_DIR", nonsense)
        with pytest.raises(ConfigError, match="HF_TIERED_CACHE_DIR"):
            default_base()
    monkeypatch.delenv("HF_TIERED_CACHE_DIR")
    monkeypatch.setattr("tempfile.tempdir", "relative")
    assert default_base().is_absolute()
