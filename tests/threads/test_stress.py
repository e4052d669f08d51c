"""Eight threads make any calls, checked against plain tensors. There are five kinds of requests:

    owned      one thread calls, and knows the tokens
    shared     several threads call, one at a time by a lock of the test: the tokens are known
    growing    several threads add at will; tokens identify their writer, so that every order can be checked
    changing   several threads add, crop and swap rows at will
    fleeting   any thread allocates, forks and frees it at any time

A longer run: HF_TIERED_STRESS_SECONDS=60 pytest tests/threads/test_stress.py
The same choices again: HF_TIERED_STRESS_SEED=<as printed>; the order of the threads still varies.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_tiered_cache import ConfigError, KVCacheManager

from ..fakes import LateEngine, StagedLateEngine
from .crew import (
    BLOCK_TOKENS,
    QUERY_HEADS,
    SHAPES,
    UNIT,
    Crew,
    Layer,
    assert_attention,
    assert_holds_nothing,
    assert_same,
    codes_from,
    codes_of,
    joined,
    opened,
    tokens_of,
)
from .kinds import Changing, Growing, Known, Succession

STRESS_SECONDS = float(os.environ.get("HF_TIERED_STRESS_SECONDS", "6"))


class Stress:
    """Shared state of the threads of one run."""

    def __init__(self, manager: KVCacheManager, seed: int) -> None:
        self.manager = manager
        self.seed = seed
        self.numbers = itertools.count()
        self.shared = [self.allocate() for _ in range(3)]
        self.growing = [Succession(lambda: Growing(manager, self.name("growing"))) for _ in range(2)]
        self.changing = [Succession(lambda: Changing(manager, self.name("changing"))) for _ in range(2)]
        self.users: list[User] = []

    def name(self, kind: str) -> str:
        return f"{kind}-{next(self.numbers)}"

    def allocate(self) -> Known:
        request = Known(self.name("known"))
        self.manager.allocate(request.request_id)
        return request

    def story(self) -> str:
        lines = [f"HF_TIERED_STRESS_SEED={self.seed}; the last calls, the newest at the end:"]
        return "\n".join(lines + [f"writer {user.writer}: {', '.join(user.log)}" for user in self.users])

    def close(self) -> None:
        """Check the content of all requests after the threads have ended, and free them."""
        for request in [*self.shared, *(request for user in self.users for request in user.owned)]:
            for layer_id, layer in request.layers.items():
                found = self.manager.fetch(request.request_id, layer_id, range(layer[0].shape[2]))
                assert_same(found, layer)
            self.manager.free(request.request_id)
        for succession in [*self.growing, *self.changing]:
            succession.close()
        with suppress(ConfigError):
            self.manager.free("fleeting")


class User:
    """One thread's random calls."""

    token_counts = (1, 1, 1, 2, 15, 16, 17, 40, 90)
    most_tokens = 300

    def __init__(self, stress: Stress, writer: int) -> None:
        self.stress = stress
        self.manager = stress.manager
        self.writer = writer
        self.log: deque[str] = deque(maxlen=12)
        self.owned = [stress.allocate()]
        self._choose = random.Random(f"{stress.seed}-{writer}")
        self._generator = torch.Generator().manual_seed(self._choose.randrange(1 << 32))
        self._fleeting_number = 0

    def step(self) -> None:
        """Make one random call."""
        kinds = (
            self.on_owned,
            self.on_shared,
            self.on_growing,
            self.on_changing,
            self.on_fleeting,
            self.on_all,
        )
        self._choose.choices(kinds, weights=(30, 20, 15, 15, 10, 3))[0]()

    def _note(self, request_id: str, action: str, *details: object) -> None:
        self.log.append(f"{action}({', '.join(map(str, (request_id, *details)))})")

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator)

    def _linger(self) -> None:
        """Give other threads time to spoil the results of the last call."""
        if self._choose.random() < 0.3:
            time.sleep(self._choose.random() * 0.003)

    def on_all(self) -> None:
        if self._choose.random() < 0.5:
            self._note("all", "flush")
            self.manager.flush()
        else:
            self._note("all", "stats")
            stats = self.manager.stats()
            assert isinstance(stats.lock_wait_seconds, float) and stats.lock_wait_seconds >= 0
            assert "L1" in str(stats)

    # -- requests whose tokens are known

    def on_owned(self) -> None:
        request = self._choose.choice(self.owned)
        if len(self.owned) > 1 and self._choose.random() < 0.1:
            self._note(request.request_id, "free")
            self.owned.remove(request)
            self.manager.free(request.request_id)
        else:
            self._on_known(request)

    def on_shared(self) -> None:
        request = self._choose.choice(self.stress.shared)
        if self._choose.random() < 0.03:
            with request.lock:
                self._note(request.request_id, "free")
                self.manager.free(request.request_id)
                request.request_id, request.layers = self.stress.name("known"), {}
                self.manager.allocate(request.request_id)
        else:
            self._on_known(request)

    def _on_known(self, request: Known) -> None:
        actions = {
            self._append: 3,
            self._update: 5,
            self._attend: 4,
            self._fetch: 3,
            self._crop: 2,
            self._select_rows: 1,
            self._evict: 1,
            self._prefetch: 2,
            self._fork: 1,
        }
        action = self._choose.choices(list(actions), weights=list(actions.values()))[0]
        layer_id = self._choose.randrange(3)
        with request.lock:
            if request.tokens(layer_id) > self.most_tokens:
                action = self._crop
            check = action(request, layer_id)
            if check is not None:
                self._linger()
                check()

    def _new(self, request: Known, layer_id: int) -> tuple[Layer, Layer]:
        """Return tokens to add, and the layer's content afterwards."""
        held = request.layers.get(layer_id)
        batch, count = held[0].shape[0] if held else 2, self._choose.choice(self.token_counts)
        keys, values = (self._random(batch, heads, count, dim) for heads, dim in SHAPES)
        return (keys, values), joined(held, (keys, values))

    def _append(self, request: Known, layer_id: int) -> None:
        new, total = self._new(request, layer_id)
        self._note(request.request_id, "append", layer_id, new[0].shape[2])
        self.manager.append(request.request_id, layer_id, *new)
        request.layers[layer_id] = total

    def _update(self, request: Known, layer_id: int) -> Callable[[], None]:
        new, total = self._new(request, layer_id)
        self._note(request.request_id, "update", layer_id, new[0].shape[2])
        found = self.manager.update(request.request_id, layer_id, *new)
        request.layers[layer_id] = total
        return lambda: assert_same(found, total)

    def _attend(self, request: Known, layer_id: int) -> Callable[[], None]:
        new, total = self._new(request, layer_id)
        self._note(request.request_id, "attend", layer_id, new[0].shape[2])
        query = self._random(new[0].shape[0], QUERY_HEADS, new[0].shape[2], SHAPES[0][1])
        output = self.manager.attend(request.request_id, layer_id, query, *new)
        request.layers[layer_id] = total
        return lambda: assert_attention(output, query, total)

    def _fetch(self, request: Known, layer_id: int) -> Callable[[], None] | None:
        tokens = request.tokens(layer_id)
        if not tokens:
            return None
        positions = [self._choose.randrange(tokens) for _ in range(self._choose.choice((0, 1, 3, 12)))]
        self._note(request.request_id, "fetch", layer_id, positions)
        keys, values = request.layers[layer_id]
        found = self.manager.fetch(request.request_id, layer_id, positions)
        return lambda: assert_same(found, (keys[:, :, positions], values[:, :, positions]))

    def _crop(self, request: Known, layer_id: int) -> None:
        if layer_id in request.layers:
            count = self._choose.choice((0, 1, 5, 16, 33, 70, 170, 1000))
            self._note(request.request_id, "crop", layer_id, count)
            self.manager.crop(request.request_id, layer_id, count)
            keep = max(0, request.tokens(layer_id) - count)
            keys, values = request.layers[layer_id]
            request.layers[layer_id] = keys[:, :, :keep], values[:, :, :keep]

    def _select_rows(self, request: Known, layer_id: int) -> None:
        if layer_id in request.layers:
            keys, values = request.layers[layer_id]
            rows = [self._choose.randrange(keys.shape[0]) for _ in range(self._choose.choice((1, 2, 2, 2, 3)))]
            self._note(request.request_id, "select_rows", layer_id, rows)
            self.manager.select_rows(request.request_id, layer_id, rows)
            request.layers[layer_id] = keys[rows], values[rows]

    def _evict(self, request: Known, layer_id: int) -> None:
        self._note(request.request_id, "evict")
        self.manager.evict(request.request_id)

    def _prefetch(self, request: Known, layer_id: int) -> None:
        longest = max(map(request.tokens, request.layers), default=0)
        if longest:
            self._note(request.request_id, "prefetch")
            self.manager.prefetch(request.request_id, [self._choose.randrange(longest) for _ in range(4)])

    def _fork(self, request: Known, layer_id: int) -> None:
        if len(self.owned) < 3:
            twin = Known(self.stress.name("known"), dict(request.layers))
            self._note(request.request_id, "fork", twin.request_id)
            self.manager.fork(request.request_id, twin.request_id)
            self.owned.append(twin)

    # -- open requests

    def on_growing(self) -> None:
        layer_id = self._choose.randrange(2)
        with self._choose.choice(self.stress.growing).use() as request:
            name = request.request_id
            action = self._choose.choice(("append", "update", "attend", "fetch", "fork", "evict", "prefetch"))
            self._note(name, action, layer_id)
            if action in ("append", "update", "attend"):
                own = request.new_tokens(layer_id, self.writer, self._choose.choice(self.token_counts))
                new = tokens_of(own)
                if action == "append":
                    self.manager.append(name, layer_id, *new)
                elif action == "update":
                    self.manager.update(name, layer_id, *new)  # other threads' calls spoil its results
                else:
                    query = self._random(2, QUERY_HEADS, len(own), SHAPES[0][1])
                    output = self.manager.attend(name, layer_id, query, *new)
                    request.attended.append((layer_id, own, query, output))
            elif action == "fetch":
                positions = self._some_positions(name, layer_id)
                if positions:
                    found = self.manager.fetch(name, layer_id, positions)
                    request.fetched.append((layer_id, positions, codes_of(found)[0]))
            elif action == "fork":
                twin = self.stress.name("twin")
                self.manager.fork(name, twin)
                tokens = self.manager.tokens(twin, layer_id)
                if tokens:
                    request.saw(layer_id, self.manager.fetch(twin, layer_id, range(tokens)))
                self.manager.free(twin)
            elif action == "evict":
                self.manager.evict(name)
            elif positions := self._some_positions(name, layer_id):
                self.manager.prefetch(name, positions)

    def _some_positions(self, request_id: str, layer_id: int) -> list[int]:
        tokens = self.manager.tokens(request_id, layer_id)
        return [self._choose.randrange(tokens) for _ in range(min(tokens, 5))]

    def on_changing(self) -> None:
        layer_id = self._choose.randrange(2)
        with self._choose.choice(self.stress.changing).use() as request:
            name = request.request_id
            action = self._choose.choice(
                ("append", "update", "crop", "crop", "swap", "fetch", "evict", "prefetch")
            )
            self._note(name, action, layer_id)
            if action in ("append", "update"):
                own = request.new_tokens(layer_id, self.writer, self._choose.choice(self.token_counts))
                if action == "append":
                    self.manager.append(name, layer_id, *tokens_of(own))
                else:
                    self.manager.update(name, layer_id, *tokens_of(own))
                if self.manager.tokens(name, layer_id) > self.most_tokens:
                    self._crop_open(request, layer_id, len(own))
                else:
                    with request.lock:
                        request.credit[layer_id, self.writer] += len(own)
            elif action == "crop":
                with request.lock:
                    most = request.credit[layer_id, self.writer]
                    count = self._choose.randint(0, most)
                    request.credit[layer_id, self.writer] -= count
                self._crop_open(request, layer_id, count)
            elif action == "swap":
                self.manager.select_rows(name, layer_id, [1, 0])
                with request.lock:
                    request.swaps[layer_id] += 1
            elif action == "fetch":
                positions = range(request.first_tokens)
                codes, _ = codes_of(self.manager.fetch(name, layer_id, positions))
                assert torch.equal(codes, codes_from(15, 0, request.first_tokens))
            elif action == "evict":
                self.manager.evict(name)
            else:
                self.manager.prefetch(name, range(request.first_tokens))

    def _crop_open(self, request: Changing, layer_id: int, count: int) -> None:
        self.manager.crop(request.request_id, layer_id, count)
        with request.lock:
            request.cropped[layer_id] += count

    # -- a request that comes and goes

    def on_fleeting(self) -> None:
        name, layer_id = "fleeting", self._choose.randrange(2)
        action = self._choose.choice(("allocate", "append", "update", "attend", "fetch", "fork", "crop", "free"))
        self._note(name, action, layer_id)
        own = codes_from(self.writer, self._fleeting_number, self._choose.choice(self.token_counts))
        twin = self.stress.name("twin")
        try:
            if action == "allocate":
                self.manager.allocate(name)
            elif action == "append":
                self.manager.append(name, layer_id, *tokens_of(own))
            elif action == "update":
                self.manager.update(name, layer_id, *tokens_of(own))
            elif action == "attend":
                query = self._random(2, QUERY_HEADS, len(own), SHAPES[0][1])
                assert self.manager.attend(name, layer_id, query, *tokens_of(own)).isfinite().all()
            elif action == "fetch":
                codes_of(self.manager.fetch(name, layer_id, range(self.manager.tokens(name, layer_id))))
            elif action == "crop":
                self.manager.crop(name, layer_id, 20)
            elif action == "free":
                self.manager.free(name)
            else:
                self.manager.fork(name, twin)
        except ConfigError:
            return
        self._fleeting_number = (self._fleeting_number + 100) % (UNIT - 100)
        if action == "fork":  # no other thread knows it
            tokens = self.manager.tokens(twin, layer_id)
            if tokens:
                codes_of(self.manager.fetch(twin, layer_id, range(tokens)))
            self.manager.free(twin)


SMALLEST_BLOCK_BYTES = 24 * BLOCK_TOKENS * 4  # with a batch of one row
LARGEST_BLOCK_BYTES = 3 * SMALLEST_BLOCK_BYTES  # two blocks of the file system


def files_below(base: Path) -> dict[Path, int]:
    """Return L1's blocks and the bytes that each occupies."""
    sizes = {}
    for file in base.glob("*/L000*/c.*"):
        with suppress(FileNotFoundError):
            sizes[file] = file.stat().st_size
    return sizes


def check_capacities(manager: KVCacheManager, base: Path) -> None:
    """Check the capacities against the statistics of the tiers and the files on disk."""
    config, tiers = manager.config, manager.stats().tiers
    l1_capacity = config.l1_capacity_bytes
    for name, capacity in (("host", config.host_capacity_bytes), ("L1", l1_capacity)):
        if capacity is not None and name in tiers:
            assert tiers[name].used_bytes <= capacity, f"{name} holds {tiers[name].used_bytes} of {capacity} bytes"
    resident = tiers["L0"].blocks  # of unknown sizes
    assert resident * SMALLEST_BLOCK_BYTES <= config.resident_bytes, f"{resident} blocks stay on the accelerator"
    time.sleep(0.002)
    if l1_capacity is not None:
        seen = files_below(base)
        # File names are never reused, so files that still exist existed at the same time.
        together = sum(nbytes for file, nbytes in seen.items() if file.exists())
        assert together <= l1_capacity, f"L1 has {together} bytes on disk, of {l1_capacity}"


FEW_BLOCKS = {"host_capacity": 4 * LARGEST_BLOCK_BYTES, "l1_capacity": 5 * 8192}
STRESSES: dict[str, dict[str, Any]] = {
    "heat": FEW_BLOCKS
    | {
        "l2": True,
        "engine": LateEngine,
        "eviction": "heat",
        "protection_steps": 0,
        "warmup_steps": 0,
        "high_watermark": 0.8,
        "low_watermark": 0.5,
        "staging_blocks": 2,
        "concurrent_streams": 1,
        "stream_buffers": 2,
        "stream_buffer_size": 4096,
        "prefetch_layers": 1,
    },
    "pinned": FEW_BLOCKS
    | {
        "l2": True,
        "engine": StagedLateEngine,
        "eviction": "pinned",
        "sink_tokens": 5,
        "window_tokens": 16,
        "resident_capacity": 4 * LARGEST_BLOCK_BYTES,
        "concurrent_streams": 2,
        "stream_buffer_size": 16384,
    },
    "lru-protected": FEW_BLOCKS
    | {
        "l2": True,
        "engine": LateEngine,
        "eviction": "lru",
        "protection_steps": 3,
        "host_capacity": 0,
        "staging_blocks": 1,
        "prefetch_layers": 3,
        "concurrent_streams": 3,
    },
    "l1 only": {"engine": StagedLateEngine, "l1_capacity": None, "stream_buffers": 4, "staging_blocks": 4},
}


@pytest.mark.timeout(4 * STRESS_SECONDS + 300)
@pytest.mark.parametrize("options", STRESSES.values(), ids=STRESSES.keys())
def test_stress(options: dict[str, Any], tmp_path: Path) -> None:
    options = dict(options)
    if options.pop("l2", False):
        options["l2_url"] = tmp_path
    seed = int(os.environ.get("HF_TIERED_STRESS_SEED", time.time_ns() % 1_000_000))
    with opened(tmp_path, **options) as manager:
        stress = Stress(manager, seed)
        stress.users = [User(stress, writer) for writer in range(8)]
        crew = Crew(stress.story)
        for user in stress.users:
            crew.start(crew.loop, user.step)
        crew.start(crew.loop, functools.partial(check_capacities, manager, tmp_path))
        crew.join(stop_after_seconds=STRESS_SECONDS)
        closing = Crew(stress.story)
        closing.start(stress.close)
        closing.join()
        tiers = manager.stats().tiers
        used = {
            "L1",
            *(["L2"] if "l2_url" in options else []),
            *(["host"] if options.get("host_capacity") else []),
        }
        assert all(tiers[name].bytes_written for name in used), "a tier was not tested"
        assert_holds_nothing(manager)
