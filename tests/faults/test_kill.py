"""R12: SIGKILL in the middle of a generation leaves nothing that the next start does not clear."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from hf_tiered_cache import TieredCache

from ..fakes import eventually
from ..models import generate, prompt_ids, tiny_llama

_ENDLESS = """
import sys
import torch
from hf_tiered_cache import TieredCache
from tests.models import generate, prompt_ids, tiny_llama
torch.set_num_threads(1)
model = tiny_llama()
with TieredCache(
    config=model.config, window_tokens=32, block_tokens=16, l1_capacity=40 * 4096, l2_url=sys.argv[1]
) as cache:
    print("running", flush=True)
    generate(model, prompt_ids(200), cache, max_new_tokens=3000)
"""


def _generating(l1_base: Path, l2_base: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _ENDLESS, str(l2_base)],
        env=os.environ | {"HF_TIERED_CACHE_DIR": str(l1_base), "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )


def _directories(base: Path) -> set[Path]:
    return {path for path in base.iterdir() if path.is_dir()}


def test_kill_in_the_middle(tmp_path: Path, cache_directory: Path) -> None:
    l2_base = tmp_path / "l2"
    l2_base.mkdir()
    with _generating(cache_directory, l2_base) as survivor:
        assert survivor.stdout is not None
        survivor.stdout.readline()
        assert eventually(lambda: bool(list(l2_base.glob("*/*/layers/*/*/c/**/0"))), 120), "it writes to L2"
        alive = _directories(cache_directory) | _directories(l2_base)
        assert len(alive) == 2
        with _generating(cache_directory, l2_base) as victim:
            assert victim.stdout is not None
            victim.stdout.readline()
            assert eventually(lambda: len(_directories(l2_base)) == 2, 120)
            time.sleep(0.2)
            victim.send_signal(signal.SIGKILL)
            victim.wait()
        dead = (_directories(cache_directory) | _directories(l2_base)) - alive
        assert len(dead) == 2 and all(any(directory.iterdir()) for directory in dead)

        model = tiny_llama()
        with TieredCache(
            config=model.config, window_tokens=32, block_tokens=16, l1_capacity=4096, l2_url=l2_base
        ) as cache:
            generate(model, prompt_ids(100), cache, max_new_tokens=2)
            left = _directories(cache_directory) | _directories(l2_base)
            assert not dead & left, "the next start sweeps"
            assert alive < left, "and spares the living"
        assert survivor.poll() is None, "the other process generates on, undisturbed"
        survivor.send_signal(signal.SIGKILL)
        survivor.wait()
    with TieredCache(
        config=model.config, window_tokens=32, block_tokens=16, l1_capacity=4096, l2_url=l2_base
    ) as cache:
        generate(model, torch.ones(1, 100, dtype=torch.long), cache, max_new_tokens=2)
    assert list(l2_base.iterdir()) == [] and list(cache_directory.iterdir()) == []
