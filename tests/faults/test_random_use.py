"""Calls in any order, against plain tensors: late copies, poison, tiny tiers, shared and forked blocks."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.nn.functional import scaled_dot_product_attention

from hf_tiered_cache import KVCacheManager, TieredCacheConfig
from hf_tiered_cache.sequence import window_sizing

from ..fakes import LateEngine, RandomGovernor, StagedLateEngine, random_kv

# A longer run: HF_TIERED_EXAMPLES=2000 pytest tests/faults/test_random_use.py
EXAMPLES = int(os.environ.get("HF_TIERED_EXAMPLES", "25"))
LAYERS = 3
SHAPES = ((2, 8), (2, 4))
QUERY_HEADS = 4
BLOCK_ROW_BYTES = 16 * 24 * 4
Layer = tuple[torch.Tensor, torch.Tensor]

token_counts = st.sampled_from([1, 1, 2, 15, 16, 17, 40, 90])
layer_ids = st.integers(0, LAYERS - 1)
any_number = st.integers(0, 1 << 16)


class RandomUse(RuleBasedStateMachine):
    """Calls on a manager; `model` has its expected content, K and V per request and layer as plain tensors."""

    @initialize(
        window=st.sampled_from([16, 24, 48, "auto"]),
        sink=st.sampled_from([0, 5, 16]),
        storage=st.sampled_from(["l1", "l2", "both", "all"]),
        resident_blocks=st.sampled_from([0, 3]),
        eviction=st.sampled_from(["pinned", "heat", "lru", "fifo", "random"]),
        protection_steps=st.sampled_from([0, 2]),
        watermarks=st.sampled_from([(0.4, 0.7), (0.8, 0.9), (1.0, 1.0)]),
        prefetch_layers=st.integers(1, 3),
        staging=st.sampled_from([1, 2, 8]),
        stream_buffers=st.integers(2, 4),
        stream_blocks=st.integers(1, 3),
        engine=st.sampled_from([LateEngine, StagedLateEngine]),
    )
    def start(
        self,
        window: int | str,
        sink: int,
        storage: str,
        resident_blocks: int,
        eviction: str,
        protection_steps: int,
        watermarks: tuple[float, float],
        prefetch_layers: int,
        staging: int,
        stream_buffers: int,
        stream_blocks: int,
        engine: type[LateEngine],
    ) -> None:
        torch.manual_seed(0)
        self.base = Path(tempfile.mkdtemp(prefix="random-use-"))
        governor = window_sizing.WindowGovernor
        window_sizing.WindowGovernor = RandomGovernor  # used only for automatic windows
        self.manager = KVCacheManager(
            TieredCacheConfig(
                window_tokens=window,
                sink_tokens=sink,
                block_tokens=16,
                prefetch_layers=prefetch_layers,
                staging_blocks=staging,
                stream_buffers=stream_buffers,
                stream_buffer_size=stream_blocks * 2 * BLOCK_ROW_BYTES,
                resident_capacity=resident_blocks * 2 * BLOCK_ROW_BYTES,
                host_capacity=5 * 4096 if storage == "all" else 0,
                eviction=eviction,
                protection_steps=protection_steps,
                warmup_steps=0,
                low_watermark=watermarks[0],
                high_watermark=watermarks[1],
                l1_path=self.base,
                l1_capacity={"l1": None, "l2": 0}.get(storage, 20 * 4096),
                l2_url=None if storage == "l1" else self.base,
            ),
            engine_factory=functools.partial(engine, max_delay_seconds=0.0005),
        )
        window_sizing.WindowGovernor = governor
        self.model: dict[str, dict[int, Layer]] = {}
        self.names = 0
        self.allocate()

    def pick(self, number: int) -> str:
        return sorted(self.model)[number % len(self.model)]

    def new_tokens(self, request: str, layer_id: int, count: int) -> tuple[Layer, Layer]:
        """Make more K and V for a layer; return them, and all that the layer then holds."""
        held = self.model[request].get(layer_id)
        batch = held[0].shape[0] if held else 2
        new = random_kv(count, batch=batch, key_shape=SHAPES[0], value_shape=SHAPES[1])
        if held is None:
            return new, new
        return new, (torch.cat([held[0], new[0]], 2), torch.cat([held[1], new[1]], 2))

    @rule()
    def allocate(self) -> None:
        if len(self.model) < 3:
            self.names += 1
            self.manager.allocate(f"r{self.names}")
            self.model[f"r{self.names}"] = {}

    @rule(number=any_number, layer_id=layer_ids, count=token_counts)
    def append(self, number: int, layer_id: int, count: int) -> None:
        request = self.pick(number)
        new, total = self.new_tokens(request, layer_id, count)
        self.manager.append(request, layer_id, *new)
        self.model[request][layer_id] = total

    @rule(number=any_number, count=token_counts)
    def forward(self, number: int, count: int) -> None:
        """Update all layers in turn, as a model does."""
        request = self.pick(number)
        for layer_id in range(LAYERS):
            new, total = self.new_tokens(request, layer_id, count)
            keys, values = self.manager.update(request, layer_id, *new)
            assert torch.equal(keys, total[0]) and torch.equal(values, total[1])
            self.model[request][layer_id] = total

    @rule(number=any_number, count=token_counts)
    def streamed_forward(self, number: int, count: int) -> None:
        """Compute streaming attention for all layers in turn, piece by piece."""
        request = self.pick(number)
        for layer_id in range(LAYERS):
            new, total = self.new_tokens(request, layer_id, count)
            query = torch.randn(new[0].shape[0], QUERY_HEADS, count, SHAPES[0][1])
            output = self.manager.attend(request, layer_id, query, *new)
            self.model[request][layer_id] = total
            tokens = total[0].shape[2]
            expected = scaled_dot_product_attention(
                query.double(),
                *(states.double().repeat_interleave(QUERY_HEADS // SHAPES[0][0], 1) for states in total),
                attn_mask=torch.ones(count, tokens, dtype=torch.bool).tril(tokens - count),
            )
            assert (output.transpose(1, 2) - expected).abs().max() < 1e-5

    @rule(number=any_number, layer_id=layer_ids, picks=st.lists(any_number, max_size=6))
    def fetch(self, number: int, layer_id: int, picks: list[int]) -> None:
        request = self.pick(number)
        if layer_id in self.model[request]:
            keys, values = self.model[request][layer_id]
            tokens = keys.shape[2]
            positions = [pick % tokens for pick in picks] if tokens else []
            found = self.manager.fetch(request, layer_id, positions)
            assert torch.equal(found[0], keys[:, :, positions])
            assert torch.equal(found[1], values[:, :, positions])

    @rule(number=any_number, picks=st.lists(any_number, min_size=1, max_size=6))
    def prefetch(self, number: int, picks: list[int]) -> None:
        request = self.pick(number)
        longest = max((keys.shape[2] for keys, _ in self.model[request].values()), default=0)
        if longest:
            self.manager.prefetch(request, [pick % longest for pick in picks])

    @rule(number=any_number, layer_id=layer_ids, count=st.sampled_from([0, 1, 5, 16, 33, 70, 1000]))
    def crop(self, number: int, layer_id: int, count: int) -> None:
        request = self.pick(number)
        if layer_id in self.model[request]:
            self.manager.crop(request, layer_id, count)
            keys, values = self.model[request][layer_id]
            keep = max(0, keys.shape[2] - count)
            self.model[request][layer_id] = keys[:, :, :keep], values[:, :, :keep]

    @rule(number=any_number, rows=st.lists(any_number, min_size=1, max_size=4))
    def select_rows(self, number: int, rows: list[int]) -> None:
        request = self.pick(number)
        for layer_id, (keys, values) in self.model[request].items():
            picked = [row % keys.shape[0] for row in rows]
            self.manager.select_rows(request, layer_id, picked)
            self.model[request][layer_id] = keys[picked], values[picked]

    @rule(number=any_number)
    def fork(self, number: int) -> None:
        if len(self.model) < 3:
            request = self.pick(number)
            self.names += 1
            self.manager.fork(request, f"r{self.names}")
            self.model[f"r{self.names}"] = dict(self.model[request])

    @rule(number=any_number)
    def evict(self, number: int) -> None:
        self.manager.evict(self.pick(number))

    @rule(number=any_number, layer_id=layer_ids)
    def reset_layer(self, number: int, layer_id: int) -> None:
        request = self.pick(number)
        self.manager.free_layer(request, layer_id)
        self.model[request].pop(layer_id, None)

    @precondition(lambda self: len(self.model) > 1)
    @rule(number=any_number)
    def free(self, number: int) -> None:
        request = self.pick(number)
        self.manager.free(request)
        del self.model[request]

    @rule()
    def flush(self) -> None:
        self.manager.flush()

    @invariant()
    def tiers_stay_within_their_capacities(self) -> None:
        tiers = self.manager.stats().tiers
        for name in ("host", "L1"):
            assert tiers[name].capacity_bytes is None or tiers[name].used_bytes <= tiers[name].capacity_bytes

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        try:
            for request, layers in self.model.items():
                for layer_id, (keys, values) in layers.items():
                    found = self.manager.fetch(request, layer_id, range(keys.shape[2]))
                    assert torch.equal(found[0], keys) and torch.equal(found[1], values)
                self.manager.free(request)
            self.manager.flush()
            stats = self.manager.stats()
            assert all(
                stats.tiers[name].used_bytes == stats.tiers[name].blocks == 0 for name in ("host", "L1", "L2")
            )
            assert stats.tiers["L0"].blocks == 0
        finally:
            self.manager.close()
        assert self.manager.stats().l0_bytes == 0
        assert list(self.base.iterdir()) == []
        shutil.rmtree(self.base)


TestRandomUse = RandomUse.TestCase
TestRandomUse.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
