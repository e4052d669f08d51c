"""`KVCacheManager` without transformers: R14."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_tiered_cache import CacheClosedError, ConfigError, KVCacheManager, TieredCacheConfig, TierFullError
from hf_tiered_cache.sequence.requests import LayerOrder

from ...fakes import FAULTS, LateEngine, pieces, random_kv

SETTINGS: dict[str, Any] = {"window_tokens": 32, "block_tokens": 16}

NO_LAYERS: list[Any] = ["0", None, 0.5, True, [0], torch.tensor(0)]
NO_COUNTS: list[Any] = ["many", None, 0.5, True, [1], -1, float("nan")]
NO_POSITIONS: list[Any] = [
    *(None, 0, "0", ["0"], [0.0], [True], [[0], [0, 1]], [None], {0}, np.zeros((1, 1), int), np.array([0.0])),
    *(
        torch.zeros(1),
        torch.zeros(1, dtype=torch.bfloat16),
        torch.tensor(0),
        torch.zeros(1, dtype=torch.long).to("meta"),
    ),
]


@pytest.fixture(params=["l1", "l2", "both", "sink"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVCacheManager]:
    """A manager with late copies and poison, and blocks in L1, in L2, in both, or beside sink tokens."""
    options: dict[str, dict[str, object]] = {
        "l1": {},
        "l2": {"l1_capacity": 0, "l2_url": tmp_path},
        "both": {"l1_capacity": 3 * 4096, "l2_url": tmp_path},
        "sink": {"sink_tokens": 21},
    }
    config = TieredCacheConfig(**SETTINGS, **options[request.param])  # type: ignore[arg-type]
    with KVCacheManager(config, engine_factory=LateEngine) as manager:
        yield manager


@pytest.mark.parametrize("sizes", [[1], [15, 1, 16, 17], [300], [40, 7]])
def test_fetch_gives_what_was_appended(manager: KVCacheManager, sizes: list[int]) -> None:
    manager.allocate("a", seq_len=300)
    layers = [random_kv(300, batch=2, value_shape=(1, 4)) for _ in range(3)]
    for piece in pieces(300, sizes):
        for layer_id, (key, value) in enumerate(layers):
            manager.append("a", layer_id, key[:, :, piece], value[:, :, piece])
    for positions in ([0], [299, 0, 150, 150, 31], list(range(300)), [20, 21, 22], []):
        for layer_id, (key, value) in enumerate(layers):
            found_key, found_value = manager.fetch("a", layer_id, torch.tensor(positions, dtype=torch.long))
            assert torch.equal(found_key, key[:, :, positions])
            assert torch.equal(found_value, value[:, :, positions])


def test_update_returns_everything(manager: KVCacheManager) -> None:
    manager.allocate("a")
    layers = [random_kv(260) for _ in range(4)]
    for piece in pieces(260, [70, 1, 1, 1, 30]):
        for layer_id, (key, value) in enumerate(layers):
            keys, values = manager.update("a", layer_id, key[:, :, piece], value[:, :, piece])
            assert torch.equal(keys, key[:, :, : piece.stop]) and torch.equal(values, value[:, :, : piece.stop])


def test_prefetch_begins_reads_that_fetch_then_finds(tmp_path: Path) -> None:
    FAULTS.reset()
    config = TieredCacheConfig(**SETTINGS, l1_tier="faulty", prefetch_layers=2)
    with KVCacheManager(config) as manager:
        manager.allocate("a")
        layers = [random_kv(200) for _ in range(6)]
        for layer_id, kv in enumerate(layers):
            manager.append("a", layer_id, *kv)
        manager.flush()
        assert FAULTS.reads == []
        positions = torch.tensor([3, 100, 199])
        assert manager.prefetch("a", positions) == 3, "as many layers as there are buffers"
        for layer_id in range(3):
            assert torch.equal(manager.fetch("a", layer_id, positions)[0], layers[layer_id][0][:, :, positions])
        assert sorted(FAULTS.reads) == [0, 0, 1, 1, 2, 2], "the blocks of 3 and 100 for three layers, once"
        stats = manager.stats()
        assert (stats.prefetch_hits, stats.prefetch_misses) == (6, 0)
        manager.fetch("a", 3, positions)
        assert manager.stats().prefetch_misses == 2
        assert manager.prefetch("a", [199]) == 0, "the window needs no load"


def test_prefetch_of_what_is_likely_to_be_read() -> None:
    """R8: without positions, the heat table determines which blocks are loaded."""
    FAULTS.reset()
    with KVCacheManager(TieredCacheConfig(**SETTINGS, l1_tier="faulty", prefetch_threshold=0.6)) as manager:
        manager.allocate("a")
        assert manager.prefetch("a") == 0
        for layer_id in range(3):
            manager.append("a", layer_id, *random_kv(200))
        manager.flush()
        assert manager.prefetch("a") == 0, "nothing was read yet but when it was sealed"
        for _ in range(20):
            for layer_id in range(3):
                manager.fetch("a", layer_id, [20, 100 + layer_id])
        FAULTS.reads.clear()
        assert manager.prefetch("a") == 3
        for layer_id in range(3):
            manager.fetch("a", layer_id, [20, 100 + layer_id])
        assert sorted(FAULTS.reads) == [0, 0, 1, 1, 2, 2], "the same two blocks of each layer, once"


def test_evict_leaves_less_than_a_block_and_loses_nothing(manager: KVCacheManager) -> None:
    manager.allocate("a")
    key, value = random_kv(75)
    manager.append("a", 0, key[:, :, :70], value[:, :, :70])
    before = manager.stats()
    assert manager.evict("a") > 0
    after = manager.stats()
    assert after.l0_bytes < before.l0_bytes
    assert after.tiers["L0"].tokens < 16 + manager.config.sink_tokens
    keys, values = manager.update("a", 0, key[:, :, 70:], value[:, :, 70:])
    assert torch.equal(keys, key) and torch.equal(values, value)


def test_fork_shares_blocks_and_parts_ways(manager: KVCacheManager) -> None:
    manager.allocate("a")
    key, value = random_kv(200, batch=2)
    manager.append("a", 0, key, value)
    manager.flush()
    blocks = sum(manager.stats().tiers[tier].blocks for tier in ("L1", "L2"))
    manager.fork("a", "b")
    assert sum(manager.stats().tiers[tier].blocks for tier in ("L1", "L2")) == blocks
    manager.crop("a", 0, 150)
    other_key, other_value = random_kv(150, batch=2)
    manager.append("a", 0, other_key, other_value)
    manager.select_rows("b", 0, [1, 1, 0])
    everything = torch.arange(200)
    assert torch.equal(manager.fetch("a", 0, everything)[0], torch.cat([key[:, :, :50], other_key], 2))
    assert torch.equal(manager.fetch("b", 0, everything)[1], value[[1, 1, 0]])
    manager.free("a")
    assert torch.equal(manager.fetch("b", 0, everything)[0], key[[1, 1, 0]])
    manager.free("b")
    manager.flush()
    stats = manager.stats()
    assert all(stats.tiers[tier].used_bytes == 0 for tier in ("L1", "L2")), "no block is left"


def bytes_on_disk(base: Path) -> int:
    """Return the bytes that L1's blocks occupy now; files may come and go meanwhile."""
    total = 0
    for file in base.glob("*/L000*/c.*"):
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


# Every new block demotes the oldest one.
OLDEST_FIRST = {"eviction": "fifo", "protection_steps": 0, "low_watermark": 1.0, "high_watermark": 1.0}


@pytest.mark.parametrize(
    ("options", "demoted"), [(OLDEST_FIRST, range(20, 33)), ({}, range(1))], ids=["fifo", "pinned"]
)
def test_capacity_holds_while_blocks_move(options: dict[str, Any], demoted: range, tmp_path: Path) -> None:
    """R2: L1 is always full, the other blocks are in lower tiers, and disk use never exceeds the limit."""
    config = TieredCacheConfig(**SETTINGS, **options, l1_path=tmp_path, l1_capacity=5 * 4096, l2_url=tmp_path)
    with KVCacheManager(config) as manager:
        manager.allocate("a")
        key, value = random_kv(640, key_shape=(4, 8), value_shape=(4, 8))
        for piece in pieces(640, [16]):
            manager.append("a", 0, key[:, :, piece], value[:, :, piece])
            assert manager.stats().tiers["L1"].used_bytes <= 5 * 4096
            assert bytes_on_disk(tmp_path) <= 5 * 4096
        manager.flush()
        stats = manager.stats()
        assert stats.tiers["L1"].blocks == 5 and stats.tiers["L2"].blocks == 640 // 16 - 2 - 5 - 1
        assert stats.blocks_demoted in demoted
        assert torch.equal(manager.fetch("a", 0, torch.arange(640))[0], key)


def test_demotion_takes_blocks_of_many_layers_at_once(tmp_path: Path) -> None:
    config = TieredCacheConfig(**SETTINGS, **OLDEST_FIRST, l1_capacity=50 * 4096, l2_url=tmp_path)
    layers = [random_kv(400) for _ in range(12)]
    with KVCacheManager(config) as manager:
        manager.allocate("a")
        for piece in pieces(400, [64]):
            for layer_id, (key, value) in enumerate(layers):
                manager.append("a", layer_id, key[:, :, piece], value[:, :, piece])
        manager.flush()
        assert manager.stats().blocks_demoted > 8 * 12
        for layer_id, (key, value) in enumerate(layers):
            found_key, found_value = manager.fetch("a", layer_id, torch.arange(400))
            assert torch.equal(found_key, key) and torch.equal(found_value, value)


def test_nothing_is_opened_while_everything_fits(cache_directory: Path) -> None:
    """R25: a short context makes no directory and no thread."""
    with KVCacheManager(TieredCacheConfig(**SETTINGS)) as manager:
        manager.allocate("a")
        key, value = random_kv(48)
        manager.update("a", 0, key, value)
        assert list(cache_directory.iterdir()) == []
        manager.append("a", 0, *random_kv(1))
        assert len(list(cache_directory.glob("hf-tiered-*.lock"))) == 1


def test_lookahead_of_an_idle_request_gives_way() -> None:
    """A copy that generates while its original is idle is prefetched like any other request."""
    with KVCacheManager(TieredCacheConfig(**SETTINGS)) as manager:
        manager.allocate("original")
        for _ in range(2):
            for layer_id in range(6):
                manager.update("original", layer_id, *random_kv(100))
        manager.fork("original", "copy")
        before = manager.stats()
        for _ in range(10):
            for layer_id in range(6):
                manager.update("copy", layer_id, *random_kv(1))
        after = manager.stats()
        hits = after.prefetch_hits - before.prefetch_hits
        misses = after.prefetch_misses - before.prefetch_misses
        assert hits > 10 * misses


def test_tiers_add_up_after_a_fork() -> None:
    with KVCacheManager(TieredCacheConfig(**SETTINGS)) as manager:
        manager.allocate("a")
        for layer_id in range(3):
            manager.append("a", layer_id, *random_kv(300))
        manager.flush()
        for requests in ("a", "b"):
            stats = manager.stats()
            assert sum(tier.tokens for tier in stats.tiers.values()) == stats.sequence_tokens == 300, requests
            if requests == "a":
                manager.fork("a", "b")


_FORK = """
import os, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
from typing import Any
import torch
from hf_tiered_cache import CacheClosedError, KVCacheManager, TieredCacheConfig, TierError

def tokens(count):
    return torch.randn(1, 2, count, 8), torch.randn(1, 2, count, 8)

settings = TieredCacheConfig(window_tokens=32, block_tokens=16)
with KVCacheManager(settings) as manager:
    manager.allocate("a")
    manager.append("a", 0, *tokens(100))
    child = os.fork()
    if child == 0:
        seen = []
        try:
            manager.append("a", 0, *tokens(1))
        except CacheClosedError as error:
            seen.append(str(error))
        try:
            own = KVCacheManager(settings)
            own.allocate("a")
            own.append("a", 0, *tokens(100))
        except TierError as error:
            seen.append(str(error))
        Path(sys.argv[1]).write_text("\\n".join(seen))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    manager.append("a", 0, *tokens(100))
    manager.flush()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_child_is_told(tmp_path: Path) -> None:
    """A forked child, which tensorstore would abort, gets an error, with its parent's cache and with a new one."""
    subprocess.run([sys.executable, "-c", _FORK, str(tmp_path / "seen")], check=True, timeout=120)
    first, second = (tmp_path / "seen").read_text().splitlines()
    assert "parent process" in first and "spawn" in second


def test_bad_calls_change_nothing() -> None:
    with KVCacheManager(TieredCacheConfig(**SETTINGS)) as manager:
        key, value = random_kv(40, batch=2)
        with pytest.raises(ConfigError, match="no request 'a'"):
            manager.append("a", 0, key, value)
        manager.allocate("a")
        with pytest.raises(ConfigError, match="exists"):
            manager.allocate("a")
        with pytest.raises(ConfigError, match="negative"):
            manager.allocate("b", seq_len=-1)
        with pytest.raises(ConfigError, match="layer 3"):
            manager.fetch("a", 3, [0])
        manager.append("a", 0, key, value)
        for bad_key, bad_value, words in (
            (key[0], value[0], r"\[B, H, T, D\]"),
            (key[:, :, :3], value, "same number of tokens"),
            (key, value.bfloat16(), "both must be the same"),
            (key.double(), value.double(), "float64"),
            (key[:1], value[:1], "batch_repeat_interleave"),
            (key[..., :4], value, "key_dim=8"),
            (key.to("meta"), value.to("meta"), "meta"),
        ):
            with pytest.raises(ConfigError, match=words):
                manager.append("a", 0, bad_key, bad_value)
        for positions, words in (([40], "0, 40"), ([-1], "0, 40"), ([[1]], "1-D"), ([0.5], "ints")):
            with pytest.raises(ConfigError, match=words):
                manager.fetch("a", 0, positions)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="negative"):
            manager.crop("a", 0, -1)
        with pytest.raises(ConfigError, match="batch of 2"):
            manager.select_rows("a", 0, [2])
        assert manager.tokens("a", 0) == 40
        assert torch.equal(manager.fetch("a", 0, torch.arange(40))[0], key)


def test_closed_manager_says_so() -> None:
    manager = KVCacheManager(TieredCacheConfig(**SETTINGS))
    manager.allocate("a")
    manager.append("a", 0, *random_kv(100))
    manager.close()
    manager.close()
    for call in (lambda: manager.append("a", 0, *random_kv(1)), lambda: manager.fetch("a", 0, [0]), manager.flush):
        with pytest.raises(CacheClosedError, match="make a new one"):
            call()
    assert manager.stats().l0_bytes == 0


class TestLayerOrder:
    def test_learns_what_it_sees_and_wraps_around(self) -> None:
        order = LayerOrder()
        for layer_idx in (0, 4, 2, 6, 0, 4):
            order.observe(layer_idx)
        assert list(order.following(4, [0, 2, 4, 6])) == [2, 6, 0, 4]

    def test_guesses_the_next_higher_layer_at_first(self) -> None:
        assert list(LayerOrder().following(3, [1, 3, 7])) == [7, 1, 3]

    def test_follows_a_change(self) -> None:
        order = LayerOrder()
        for layer_idx in (0, 1, 2, 0, 2, 1, 0):
            order.observe(layer_idx)
        assert list(order.following(0, [0, 1, 2])) == [2, 1, 0]

    def test_a_layer_alone_follows_itself(self) -> None:
        order = LayerOrder()
        order.observe(5)
        order.observe(5)
        assert list(order.following(5, [5])) == [5]


def test_settings_go_to_the_manager_as_to_the_cache() -> None:
    with KVCacheManager(**SETTINGS, sink_tokens=3) as manager:
        assert manager.config == TieredCacheConfig(**SETTINGS, sink_tokens=3)  # type: ignore[arg-type]
        manager.allocate("a")
        manager.append("a", 0, *random_kv(100))
        assert manager.tokens("a", 0) == 100
    base = TieredCacheConfig(**SETTINGS, sink_tokens=3)  # type: ignore[arg-type]
    with KVCacheManager(base, sink_tokens=5) as manager:
        assert manager.config == TieredCacheConfig(**SETTINGS, sink_tokens=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean 'window_tokens'"):
        KVCacheManager(window_size=512)
    for nonsense in ("x", "", 0, {}, {"window_tokens": 64}, 4096, TieredCacheConfig):
        with pytest.raises(ConfigError, match="is not a TieredCacheConfig"):
            KVCacheManager(nonsense)  # type: ignore[arg-type]


def test_wrong_types_are_told_and_change_nothing() -> None:
    key, value = random_kv(40, batch=2)
    query = torch.randn(2, 4, 1, 8)
    new = random_kv(1, batch=2)
    with KVCacheManager(**SETTINGS) as manager:
        manager.allocate("a", seq_len=1e3)  # type: ignore[arg-type]
        for layer_id in (0, np.int64(1)):
            manager.append("a", layer_id, key, value)  # type: ignore[arg-type]
        calls: list[Callable[[], object]] = [
            *[
                lambda call=call: call("a", 0, key.numpy(), value.numpy())
                for call in (manager.append, manager.update)
            ],
            *[lambda call=call: call("a", 0, key.tolist(), value) for call in (manager.append, manager.update)],
            *[lambda call=call: call("a", 0, key, None) for call in (manager.append, manager.update)],
            lambda: manager.attend("a", 0, query.numpy(), *new),  # type: ignore[arg-type]
            lambda: manager.attend("a", 0, query, new[0].numpy(), new[1]),  # type: ignore[arg-type]
            lambda: manager.attend("a", 0, query, new[0], new[1].tolist()),  # type: ignore[arg-type]
            lambda: manager.attend("a", 0, query, *new, rule="causal"),  # type: ignore[arg-type]
            lambda: manager.attend("a", 5, None, *new),  # type: ignore[arg-type]
            *[lambda layer_id=layer_id: manager.append("a", layer_id, key, value) for layer_id in NO_LAYERS],
            *[lambda layer_id=layer_id: manager.fetch("a", layer_id, [0]) for layer_id in NO_LAYERS],
            *[lambda layer_id=layer_id: manager.attend("a", layer_id, query, *new) for layer_id in NO_LAYERS],
            *[lambda at=at: manager.fetch("a", 0, at) for at in NO_POSITIONS],  # type: ignore[misc]
            *[lambda at=at: manager.prefetch("a", at) for at in NO_POSITIONS if at is not None],  # type: ignore[misc]
            *[lambda at=at: manager.select_rows("a", 0, at) for at in [*NO_POSITIONS, []]],  # type: ignore[misc]
            *[lambda count=count: manager.crop("a", 0, count) for count in NO_COUNTS],  # type: ignore[misc]
            *[lambda count=count: manager.allocate("b", count) for count in NO_COUNTS],  # type: ignore[misc]
        ]
        for number, call in enumerate(calls):
            with pytest.raises(ConfigError):
                call()
                pytest.fail(f"call {number} was taken")
        assert [manager.tokens("a", layer_id) for layer_id in (0, 1, 5)] == [40, 40, 0]
        for at in (
            [0, 39],
            np.array([0, 39], np.uint8),
            torch.tensor([0, 39], dtype=torch.int32),
            range(0, 40, 39),
        ):
            assert torch.equal(manager.fetch("a", 0, at)[0], key[:, :, [0, 39]])  # type: ignore[arg-type]
        manager.select_rows("a", 1, torch.tensor([1, 1]))  # type: ignore[arg-type]
        manager.crop("a", 1, np.int64(30))  # type: ignore[arg-type]
        assert torch.equal(manager.fetch("a", 1, range(10))[1], value[[1, 1], :, :10])


@pytest.mark.parametrize(
    ("small", "block_bytes"), [("host_capacity", 4096), ("l1_capacity", 4096), ("resident_capacity", 2048)]
)
def test_a_capacity_below_one_block_is_told(
    small: str, block_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning comes once, with the first sealed block; a capacity of one block, or no L1, gives none."""
    ample = {"host_capacity": 3 * 4096, "l1_capacity": 3 * 4096, "resident_capacity": 4096, "l2_url": tmp_path}
    for settings, expected in ((ample | {small: block_bytes - 1}, 1), (ample, 0), (ample | {small: 0}, 0)):
        caplog.clear()
        with KVCacheManager(**SETTINGS, **settings) as manager:
            manager.allocate("a")
            manager.append("a", 0, *random_kv(48))
            assert not caplog.records
            manager.append("a", 0, *random_kv(200))
            manager.append("a", 1, *random_kv(200))
            manager.flush()
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(said) == expected
        told = f"{small}={block_bytes - 1} is less than one block of {block_bytes} bytes"
        assert all(told in message for message in said)


def test_blocks_that_have_nowhere_to_go_are_an_error() -> None:
    with KVCacheManager(**SETTINGS, host_capacity=100, l1_capacity=200) as manager:
        manager.allocate("a")
        with pytest.raises(TierFullError, match="Raise l1_capacity"):
            for _ in range(20):
                manager.append("a", 0, *random_kv(16))


@pytest.mark.parametrize(("old", "new"), [("bytes", "used_bytes"), ("hits", "blocks_served")])
def test_former_names_in_stats_warn_and_answer(old: str, new: str) -> None:
    with KVCacheManager(TieredCacheConfig()) as manager:
        tier = replace(manager.stats().tiers["L1"], used_bytes=4096, blocks_served=7)
    with pytest.warns(FutureWarning, match=new):
        assert getattr(tier, old) == getattr(tier, new) > 0
