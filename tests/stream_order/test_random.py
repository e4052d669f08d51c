"""Random use by three threads on changing streams, with blocks in every tier: all accesses are ordered.

`HF_TIERED_STREAM_RUNS=200 pytest tests/stream_order/test_random.py` for a long run; each run is one seed.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from hf_tiered_cache import KVCacheManager
from hf_tiered_cache.sequence import window_sizing

from ..fakes import RandomGovernor, random_kv
from .model import GPU, CudaModel, Stream
from .scenarios import BLOCK_BYTES, BLOCK_TOKENS, LAYERS, Form, Scenario

RUNS = int(os.environ.get("HF_TIERED_STREAM_RUNS", "4"))
CALLS = 40


class RandomUse:
    """Requests of one manager, and their expected content.

    One of three threads makes each call, one at a time, on one of four streams, and nothing makes the host wait
    for results: they are copied on the stream and compared at the end.

    Args:
        cuda: the model.
        manager: the manager of the run.
        seed: the seed of all choices.
    """

    def __init__(self, cuda: CudaModel, manager: KVCacheManager, seed: int) -> None:
        self.made: Counter[str] = Counter()
        self._cuda = cuda
        self._manager = manager
        self._random = random.Random(seed)
        self._streams = [cuda.new_stream() for _ in range(4)]
        self._names = iter(range(10**6))
        self._forms: dict[str, Form] = {}
        self._held: dict[str, list[list[torch.Tensor]]] = {}
        self._results: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(self) -> None:
        """Make the calls, one after the other."""
        ways: dict[Callable[[str], None], int] = {
            self._step: 12, self._append: 2, self._crop: 2, self._select: 1, self._fork: 1, self._evict: 1,
            self._fetch: 2, self._prefetch: 2, self._free: 1,
        }  # fmt: skip
        with contextlib.ExitStack() as closing:
            threads = [closing.enter_context(ThreadPoolExecutor(1)) for _ in range(3)]
            for _ in range(CALLS):
                if not self._held or (len(self._held) < 4 and self._random.random() < 0.1):
                    call, name = self._begin, f"r{next(self._names)}"
                else:
                    call = self._random.choices(list(ways), list(ways.values()))[0]
                    name = self._random.choice(list(self._held))
                stream = self._random.choice(self._streams)
                self.made[call.__name__] += 1
                self._random.choice(threads).submit(self._call, call, name, stream).result()

    def check(self) -> None:
        """Compare all results with the expected ones."""
        for found, expected in self._results:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    def _call(self, call: Callable[[str], None], name: str, stream: Stream) -> None:
        with self._cuda.computing_on(stream), self._cuda.watch(), torch.no_grad():
            call(name)

    def _begin(self, name: str) -> None:
        self._manager.allocate(name)
        self._forms[name] = self._random.choice(("gather", "stream"))
        self._held[name] = [[torch.empty(2, 2, 0, 16) for _ in range(2)] for _ in range(LAYERS)]
        self._add(name, self._random.choice((20, 70, 120)), self._forms[name])

    def _step(self, name: str) -> None:
        self._add(name, self._random.choice((1, 1, 1, 5, 40)), self._forms[name])

    def _append(self, name: str) -> None:
        self._add(name, self._random.choice((1, 20)), "append")

    def _add(self, name: str, tokens: int, way: str) -> None:
        for layer_id, held in enumerate(self._held[name]):
            rows = held[0].shape[0]
            new = random_kv(tokens, batch=rows, key_shape=(2, 16), value_shape=(2, 16))
            held[:] = [torch.cat([old, added], 2) for old, added in zip(held, new, strict=True)]
            if way == "append":
                self._manager.append(name, layer_id, *new)
            elif way == "gather":
                found = self._manager.update(name, layer_id, *new)
                self._results += [(states.clone(), expected) for states, expected in zip(found, held, strict=True)]
            else:
                query = torch.randn(rows, 4, tokens, 16)
                output = self._manager.attend(name, layer_id, query, *new)
                self._results.append((output, _attention(query, *held)))

    def _crop(self, name: str) -> None:
        tokens = self._held[name][0][0].shape[2]
        keep = max(1, tokens - self._random.choice((1, 7, 60)))
        for layer_id, held in enumerate(self._held[name]):
            self._manager.crop(name, layer_id, tokens - keep)
            held[:] = [states[:, :, :keep] for states in held]

    def _select(self, name: str) -> None:
        batch = self._held[name][0][0].shape[0]
        rows = np.array([self._random.randrange(batch) for _ in range(2)])
        for layer_id, held in enumerate(self._held[name]):
            self._manager.select_rows(name, layer_id, rows)
            held[:] = [states[torch.from_numpy(rows)] for states in held]

    def _fork(self, name: str) -> None:
        twin = f"r{next(self._names)}"
        if len(self._held) < 5:
            self._manager.fork(name, twin)
            self._held[twin] = [list(held) for held in self._held[name]]
            self._forms[twin] = self._forms[name]

    def _evict(self, name: str) -> None:
        self._manager.evict(name)

    def _fetch(self, name: str) -> None:
        tokens = self._held[name][0][0].shape[2]
        positions = torch.tensor([self._random.randrange(tokens) for _ in range(9)])
        for layer_id, held in enumerate(self._held[name]):
            found = self._manager.fetch(name, layer_id, positions)
            self._results += [(states, old[:, :, positions]) for states, old in zip(found, held, strict=True)]

    def _prefetch(self, name: str) -> None:
        self._manager.prefetch(name)

    def _free(self, name: str) -> None:
        self._manager.free(name)
        del self._held[name]


def _attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return attention `[B, Q, Hq, D]` of the newest tokens over all tokens."""
    queries, tokens = query.shape[2], keys.shape[2]
    mask = torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)
    output = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    return output.transpose(1, 2)


def _options(seed: int) -> dict[str, Any]:
    """Return settings with sizes that differ from run to run."""
    choose = random.Random(seed).choice
    return {
        "window_tokens": choose(("auto", BLOCK_TOKENS, 2 * BLOCK_TOKENS)),
        "sink_tokens": choose((0, 0, 5)),
        "resident_capacity": choose((2, 6)) * BLOCK_BYTES,
        "host_capacity": choose((2, 5)) * BLOCK_BYTES,
        "l1_capacity": choose((3, 8)) * BLOCK_BYTES,
        "prefetch_layers": choose((1, 2, 4)),
        "stream_buffers": choose((2, 3)),
        "eviction": choose(("random", "lru", "heat", "pinned")),
        "staging_blocks": choose((2, 4)),
    }


def _run(seed: int, path: Path) -> Counter[str]:
    with pytest.MonkeyPatch.context() as patch, mock.patch.object(window_sizing, "WindowGovernor", RandomGovernor):
        cuda = CudaModel(patch)
        scenario = Scenario(cuda, path)
        with scenario.manager(**_options(seed)) as manager:
            use = RandomUse(cuda, manager, seed)
            use.run()
    use.check()
    assert not cuda.violations, f"seed {seed}: {cuda.report()}"
    assert cuda.contexts == {GPU} and not cuda.locked
    return scenario.hits


@pytest.mark.timeout(60 + 30 * RUNS)
def test_random_use(tmp_path: Path) -> None:
    """Random use reports no violation, and all runs together read every tier."""
    hits: Counter[str] = Counter()
    for seed in range(RUNS):
        path = tmp_path / str(seed)
        path.mkdir()
        hits += _run(seed, path)
    assert all(hits[place] for place in ("L0", "host", "L1", "L2")), hits
