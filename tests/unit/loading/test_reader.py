"""The buffers through which sealed blocks stream: look-ahead, discarded loads, and errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hf_tiered_cache import KVCacheManager, TieredCacheConfig, TierError, TierFullError, TierReadError
from hf_tiered_cache.core.errors import ConfigError
from hf_tiered_cache.loading.buffers import LoadBuffer
from hf_tiered_cache.loading.reader import BlockReader
from hf_tiered_cache.residency.table import ResidencyTable
from hf_tiered_cache.transfer.engine import CpuCopyEngine

from ...fakes import FAULTS, LateEngine, StagedLateEngine, eventually, random_kv

LAYERS, BLOCK_TOKENS = 3, 16
BLOCK_BYTES = 2 * 2 * BLOCK_TOKENS * 8 * 4


@pytest.fixture
def manager() -> Iterator[KVCacheManager]:
    """A manager with three layers of 200 tokens, ten sealed blocks each, and three buffers of two blocks."""
    FAULTS.reset()
    config = TieredCacheConfig(
        window_tokens=32,
        block_tokens=BLOCK_TOKENS,
        stream_buffer_size=2 * BLOCK_BYTES,
        l1_tier="faulty",
    )
    with KVCacheManager(config, engine_factory=LateEngine) as manager:
        manager.allocate("a")
        for layer_id in range(LAYERS):
            manager.append("a", layer_id, *random_kv(200))
        manager.flush()
        yield manager
    FAULTS.reset()


def attend(manager: KVCacheManager, layer_id: int, tokens: int = 1, request: str = "a") -> torch.Tensor:
    """Compute one step of one layer."""
    return manager.attend(request, layer_id, torch.randn(1, 4, tokens, 8), *random_kv(tokens))


def stream_of(manager: KVCacheManager) -> BlockReader:
    """Return the reader of the CPU, while only one thread uses streaming attention."""
    (lease,) = manager._resources.reader_pool(torch.device("cpu"))._idle
    assert lease.reader is not None
    return lease.reader


def loads(manager: KVCacheManager) -> list[tuple[int, int, int]]:
    """Return the loads under way: layer, first block, number of blocks."""
    return [(load.layer.layer_idx, load.first_block, len(load.blocks)) for load in stream_of(manager)._queue]


def test_the_next_layers_are_loaded_ahead(manager: KVCacheManager) -> None:
    attend(manager, 0)
    assert loads(manager) == [(0, 0, 2), (0, 2, 2), (0, 4, 2)]  # no other layer was streamed yet
    for layer_id in (1, 2):
        attend(manager, layer_id)
    assert loads(manager) == [(0, 0, 2), (0, 2, 2), (0, 4, 2)]
    misses = manager.stats().prefetch_misses
    for layer_id in (0, 1, 2, 0, 1, 2):
        attend(manager, layer_id)
    assert manager.stats().prefetch_misses == misses


def test_a_layer_that_was_not_expected_starts_over(manager: KVCacheManager) -> None:
    for layer_id in (0, 1, 2, 0):
        attend(manager, layer_id)
    assert loads(manager)[0][0] == 1
    attend(manager, 2)
    assert manager.stats().prefetch_misses > 0
    assert loads(manager)[0][0] != 2 and len(stream_of(manager)._free) + len(loads(manager)) == 3


def test_blocks_sealed_meanwhile_squeeze_in(manager: KVCacheManager) -> None:
    """Blocks sealed meanwhile change the end of a layer; loads foreseen for the next layer stay."""
    for _ in range(2):
        for layer_id in range(LAYERS):
            attend(manager, layer_id)
    before = manager.stats()
    for layer_id in range(LAYERS):
        attend(manager, layer_id, tokens=40)
    for layer_id in range(LAYERS):
        attend(manager, layer_id)
    after = manager.stats()
    sealed_blocks = after.blocks_sealed - before.blocks_sealed
    assert sealed_blocks and after.prefetch_misses - before.prefetch_misses <= sealed_blocks


def test_a_reorder_loses_nothing_under_way(manager: KVCacheManager) -> None:
    for _ in range(2):
        for layer_id in range(LAYERS):
            attend(manager, layer_id)
    misses = manager.stats().prefetch_misses
    for layer_id in range(LAYERS):
        manager.select_rows("a", layer_id, np.array([0, 0]))
        manager.attend("a", layer_id, torch.randn(2, 4, 1, 8), *random_kv(1, batch=2))
    assert manager.stats().prefetch_misses == misses


def test_a_crop_is_noticed(manager: KVCacheManager) -> None:
    for _ in range(2):
        for layer_id in range(LAYERS):
            attend(manager, layer_id)
    for layer_id in range(LAYERS):
        manager.crop("a", layer_id, 195)
    for layer_id in range(LAYERS):
        attend(manager, layer_id, tokens=150)
    keys, values = manager.fetch("a", 0, range(manager.tokens("a", 0)))
    query, (key, value) = torch.randn(1, 4, 1, 8), random_kv(1)
    output = manager.attend("a", 0, query, key, value)
    keys, values = torch.cat([keys, key], 2).repeat_interleave(2, 1), torch.cat([values, value], 2)
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values.repeat_interleave(2, 1))
    assert (output.transpose(1, 2) - expected).abs().max() < 1e-5


def test_two_requests_do_not_starve_each_other(manager: KVCacheManager) -> None:
    manager.fork("a", "b")
    for _ in range(3):
        for request in "ab":
            for layer_id in range(LAYERS):
                attend(manager, layer_id, request=request)
    # The first split of each request's first layer was not foreseen; all others were.
    assert manager.stats().prefetch_hits > 3 * manager.stats().prefetch_misses


def test_freeing_a_request_forgets_its_loads(manager: KVCacheManager) -> None:
    for layer_id in range(LAYERS):
        attend(manager, layer_id)
    assert loads(manager)
    manager.free("a")
    assert not loads(manager)
    manager.flush()
    assert manager.stats().tiers["L1"].blocks == 0


def test_prefetch_starts_loads(manager: KVCacheManager) -> None:
    for layer_id in range(LAYERS):
        attend(manager, layer_id)
    stream_of(manager).start_over()
    assert manager.prefetch("a", [0]) == 1
    assert loads(manager)[0] == (0, 0, 2)
    assert manager.prefetch("a", [0]) == 0  # under way


def test_a_failed_read_is_raised_and_changes_nothing(manager: KVCacheManager) -> None:
    for layer_id in range(LAYERS):
        attend(manager, layer_id)
    tokens = manager.tokens("a", 0)
    FAULTS.read_error = "NOT_FOUND: gone"
    with pytest.raises(TierReadError):
        for _ in range(3):  # loads that ran ahead are still valid
            attend(manager, 0)
            tokens += 1
    assert manager.tokens("a", 0) == tokens
    with pytest.raises(TierReadError):
        attend(manager, 0, tokens=5)
    assert manager.tokens("a", 0) == tokens
    FAULTS.read_error = None
    keys, values = manager.fetch("a", 0, range(tokens))
    query, (key, value) = torch.randn(1, 4, 1, 8), random_kv(1)
    output = manager.attend("a", 0, query, key, value)
    keys, values = torch.cat([keys, key], 2).repeat_interleave(2, 1), torch.cat([values, value], 2)
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values.repeat_interleave(2, 1))
    assert (output.transpose(1, 2) - expected).abs().max() < 1e-5
    assert len(stream_of(manager)._free) + len(loads(manager)) == 3


def test_a_failing_kernel_leaves_the_buffers_whole(
    manager: KVCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    for layer_id in range(LAYERS):
        attend(manager, layer_id)
    tokens, l0_bytes = manager.tokens("a", 0), manager.stats().l0_bytes

    def fail(*arguments: Any) -> None:
        raise RuntimeError("out of something")

    with monkeypatch.context() as patch:
        patch.setattr("hf_tiered_cache.attention.online.OnlineAttention.add_blocks", fail)
        for new_tokens in (1, 3):
            with pytest.raises(RuntimeError, match="out of something"):
                attend(manager, 0, tokens=new_tokens)
    assert manager.tokens("a", 0) == tokens and manager.stats().l0_bytes == l0_bytes
    attend(manager, 0)
    assert len(stream_of(manager)._free) + len(loads(manager)) == 3


def test_layouts_that_come_back() -> None:
    """A batch of 1, then 3, then 1 again: blocks of different layouts are never in one load."""
    with KVCacheManager(TieredCacheConfig(window_tokens=16, block_tokens=16)) as manager:
        manager.allocate("a")
        kept = []
        for rows, batch in (([0], 1), ([0, 0, 0], 3), ([1], 1)):
            if kept:
                manager.select_rows("a", 0, rows)
            key, value = random_kv(64, batch=batch)
            manager.append("a", 0, key, value)
            kept.append((key, value))
        query, (key, value) = torch.randn(1, 4, 1, 8), random_kv(1)
        output = manager.attend("a", 0, query, key, value)
        whole = [
            torch.cat([kept[0][part], kept[1][part][1:2], kept[2][part], new], 2).repeat_interleave(2, 1)
            for part, new in enumerate((key, value))
        ]
        expected = torch.nn.functional.scaled_dot_product_attention(query, *whole)
        assert (output.transpose(1, 2) - expected).abs().max() < 1e-5


def test_storage_that_stays_full_costs_no_token() -> None:
    """Each call is refused before anything is added, and the stored tokens stay intact."""
    config = TieredCacheConfig(window_tokens=16, block_tokens=16, staging_blocks=1, l1_capacity=3 * 4096)
    with KVCacheManager(config) as manager:
        manager.allocate("a")
        kept, refused = [], 0
        for _ in range(250):
            query, (key, value) = torch.randn(1, 4, 1, 8), random_kv(1)
            tokens = manager.tokens("a", 0)
            try:
                manager.attend("a", 0, query, key, value)
            except TierFullError:
                refused += 1
            if manager.tokens("a", 0) > tokens:
                kept.append(key)
        assert refused > 50 and manager.tokens("a", 0) == len(kept)
        keys, _ = manager.fetch("a", 0, range(len(kept)))
        assert torch.equal(keys, torch.cat(kept, dim=2))


def test_a_read_without_an_answer_may_write_late(manager: KVCacheManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory given to a read without an answer is not used again."""
    late: list[Any] = []

    def never_answers(residency: ResidencyTable, blocks: Any, target: Any) -> None:
        late.append(target)
        raise TierError("no answer within 120 s")

    with monkeypatch.context() as patch:
        patch.setattr(ResidencyTable, "read", never_answers)
        with pytest.raises(TierError, match="no answer"):
            attend(manager, 0)
    for _ in range(3):
        query, (key, value) = torch.randn(1, 4, 1, 8), random_kv(1)
        keys, values = manager.fetch("a", 0, range(manager.tokens("a", 0)))
        for target in late:
            target[:] = 0xFFFFFFFF
        output = manager.attend("a", 0, query, key, value)
        keys, values = torch.cat([keys, key], 2).repeat_interleave(2, 1), torch.cat([values, value], 2)
        expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values.repeat_interleave(2, 1))
        assert (output.transpose(1, 2) - expected).abs().max() < 1e-5


def test_heads_whose_elements_are_not_adjacent(manager: KVCacheManager) -> None:
    query, (key, value) = torch.randn(1, 4, 1, 8), random_kv(1)
    strided = [states.transpose(2, 3).contiguous().transpose(2, 3) for states in (query, key, value)]
    strided = [torch.stack([states, states], -1)[..., 0] for states in strided]
    assert strided[0].stride(-1) == 2
    manager.fork("a", "b")
    difference = manager.attend("a", 0, query, key, value) - manager.attend("b", 0, *strided)
    assert difference.abs().max() == 0


def test_no_memory_to_look_ahead_is_no_error(manager: KVCacheManager, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = LateEngine._allocate
    allocations = []

    def one_buffer_only(engine: LateEngine, nbytes: int) -> torch.Tensor:
        if nbytes >= 2 * BLOCK_BYTES:
            allocations.append(nbytes)
            if len(allocations) > 1:
                raise torch.OutOfMemoryError
        return allocate(engine, nbytes)

    monkeypatch.setattr(LateEngine, "_allocate", one_buffer_only)
    assert attend(manager, 0).isfinite().all()
    assert len(allocations) > 1


def test_what_cannot_be_attended_to_adds_nothing(manager: KVCacheManager) -> None:
    key, value = random_kv(2)
    for query, new in (
        (torch.randn(1, 4, 3, 8), (key, value)),
        (torch.randn(1, 3, 2, 8), (key, value)),
        (torch.randn(1, 4, 2, 8), random_kv(2, batch=2)),
        (torch.randn(1, 4, 2, 8).bfloat16(), (key, value)),
    ):
        with pytest.raises(ConfigError):
            manager.attend("a", 0, query, *new)
    assert manager.tokens("a", 0) == 200
    with pytest.raises(ConfigError):
        manager.attend("a", 7, torch.randn(1, 3, 2, 8), key, value)
    attend(manager, 7)  # and nothing was recorded for a new layer


def test_a_block_larger_than_a_buffer() -> None:
    config = TieredCacheConfig(window_tokens=32, block_tokens=32, stream_buffer_size=100)
    with KVCacheManager(config) as manager:
        manager.allocate("a")
        manager.append("a", 0, *random_kv(200))
        assert attend(manager, 0).isfinite().all()
        assert manager.stats().peak_l0_bytes > 3 * 2 * BLOCK_BYTES


def sizes_of(manager: KVCacheManager) -> list[int]:
    """Return the bytes of each stream buffer."""
    return [buffer.storage.numel() for buffer in stream_of(manager)._buffers]


@pytest.mark.parametrize("engine", [CpuCopyEngine, StagedLateEngine])
def test_buffers_grow_with_the_layers(engine: type[CpuCopyEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers grow seldom, to at most the longest layer and an eighth, and to at most the size set."""
    grown: list[int] = []
    reallocate = LoadBuffer.reallocate

    def noting(buffer: LoadBuffer, nbytes: int) -> None:
        grown.append(nbytes)
        reallocate(buffer, nbytes)

    monkeypatch.setattr(LoadBuffer, "reallocate", noting)
    most_blocks = 100
    config = TieredCacheConfig(
        window_tokens=32, block_tokens=BLOCK_TOKENS, stream_buffer_size=most_blocks * BLOCK_BYTES
    )
    with KVCacheManager(config, engine_factory=engine) as manager:
        manager.allocate("a")
        for layer_id in range(4):
            manager.append("a", layer_id, *random_kv(64))
        for step in range(130):
            for layer_id in range(4):
                attend(manager, layer_id, tokens=BLOCK_TOKENS)
            sealed = (manager.tokens("a", 0) - 32) // BLOCK_TOKENS
            assert max(sizes_of(manager)) <= min(most_blocks, 9 / 8 * sealed) * BLOCK_BYTES
            if step == 60:
                assert min(sizes_of(manager)) >= sealed / 2 * BLOCK_BYTES
        assert sizes_of(manager) == [most_blocks * BLOCK_BYTES] * 3
    assert len(grown) < 3 * 40


def test_a_short_context_takes_little() -> None:
    """A short context takes only the memory of its layers, not default buffers of 16 MiB."""
    with KVCacheManager(TieredCacheConfig(window_tokens=32, block_tokens=BLOCK_TOKENS)) as manager:
        manager.allocate("a")
        for layer_id in range(4):
            manager.append("a", layer_id, *random_kv(500))
        for layer_id in [*range(4)] * 3:
            attend(manager, layer_id)
        held = 4 * 2 * 2 * 503 * 8 * 4
        assert sum(sizes_of(manager)) <= held and manager.stats().peak_l0_bytes < 2.5 * held


@pytest.mark.parametrize("free_blocks", [1, 3])
def test_without_memory_to_grow_a_buffer_serves_as_it_is(
    free_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory to grow, results stay right without an error; the buffer grows once there is memory."""
    reallocate = LoadBuffer.reallocate
    refused: list[int] = []

    def scarce(buffer: LoadBuffer, nbytes: int) -> None:
        if nbytes > free_blocks * BLOCK_BYTES:
            refused.append(nbytes)
            reallocate(buffer, 0)
            raise torch.OutOfMemoryError
        reallocate(buffer, nbytes)

    config = TieredCacheConfig(window_tokens=32, block_tokens=BLOCK_TOKENS)
    with KVCacheManager(config, engine_factory=LateEngine) as manager:
        manager.allocate("a")
        for layer_id in range(LAYERS):
            manager.append("a", layer_id, *random_kv(32 + (free_blocks + 1) * BLOCK_TOKENS))
        manager.fork("a", "b")
        expected = []
        torch.manual_seed(0)
        inputs = [(torch.randn(1, 4, 20, 8), *random_kv(20)) for _ in range(12)]
        for step, states in enumerate(inputs):
            expected.append(manager.attend("b", step % LAYERS, *states))
        with monkeypatch.context() as patch:
            patch.setattr(LoadBuffer, "reallocate", scarce)
            stream_of(manager).start_over()
            for buffer in stream_of(manager)._buffers:
                reallocate(buffer, 0)
            for step, states in enumerate(inputs):
                output = manager.attend("a", step % LAYERS, *states)
                assert (output - expected[step]).abs().max() < 1e-5
                assert max(sizes_of(manager)) <= free_blocks * BLOCK_BYTES
        assert refused
        for layer_id in range(LAYERS):
            attend(manager, layer_id)
        assert max(sizes_of(manager)) > free_blocks * BLOCK_BYTES


def test_without_any_memory_a_load_is_an_error_and_looking_ahead_is_none(
    manager: KVCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    reallocate = LoadBuffer.reallocate

    def no_more_than(limit: int, buffer: LoadBuffer, nbytes: int) -> None:
        if len(made) >= limit:
            raise torch.OutOfMemoryError
        made.append(nbytes)
        reallocate(buffer, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(LoadBuffer, "reallocate", lambda buffer, nbytes: no_more_than(0, buffer, nbytes))
        with pytest.raises(torch.OutOfMemoryError):
            attend(manager, 0)
        assert manager.tokens("a", 0) == 200
        patch.setattr(LoadBuffer, "reallocate", lambda buffer, nbytes: no_more_than(1, buffer, nbytes))
        assert attend(manager, 0).isfinite().all()
        assert len(made) == 1 == len(loads(manager))
    attend(manager, 0)
    assert len(loads(manager)) == 3


def test_a_buffer_that_a_cancelled_load_still_fills_does_not_grow(
    manager: KVCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer that a cancelled load still fills does not grow: its memory would exist twice."""
    attend(manager, 0)
    stream = stream_of(manager)
    stream.start_over()
    for buffer in stream._buffers:
        buffer.reallocate(0)
    going_on, reading = threading.Event(), threading.Event()
    read = ResidencyTable.read

    def slow_read(residency: ResidencyTable, blocks: Any, target: Any) -> None:
        reading.set()
        assert going_on.wait(10)
        read(residency, blocks, target)

    stream._buffer_bytes = BLOCK_BYTES
    attend(manager, 0)
    stream.start_over()
    monkeypatch.setattr(ResidencyTable, "read", slow_read)
    layer = manager._request_table.find("a").layers[0]
    for buffer in list(stream._free)[1:]:
        stream._free.remove(buffer)
    load = stream._start(layer, 0)
    assert reading.wait(10)
    stream._cancel(load)
    stream._buffer_bytes = 2 * BLOCK_BYTES
    next_load = stream._start(layer, 0)
    assert len(next_load.blocks) == 1 and next_load.buffer is load.buffer
    assert load.storage is next_load.storage
    going_on.set()
    stream._wait(next_load)
    assert eventually(lambda: not stream._cancelled) and load.storage.numel() == 0
    stream._cancel(next_load)
    assert eventually(lambda: not stream._cancelled)
    again = stream._start(layer, 0)
    assert len(again.blocks) == 2
    stream._cancel(again)
