"""An automatic window on simulated memory, shared by the windows and the rest of the program."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from hf_tiered_cache import TieredCacheConfig
from hf_tiered_cache.sequence.pressure import (
    FIRST_GROWTH_TOKENS,
    GROWTH_STEPS,
    MemoryState,
    WindowGovernor,
    probe_memory,
)
from hf_tiered_cache.sequence.window import ring_tokens

CPU = torch.device("cpu")
OTHER = torch.device("meta")
TOTAL_BYTES = 1 << 30
LAYERS = 32
LAYER_BYTES_PER_TOKEN = 512
BLOCK = 256
SINK = 4


class World:
    """A device with one request of `context_tokens` at most, whose windows fill, seal and release at once.

    `others` is the share of the memory that the rest of the program takes.
    """

    def __init__(self, device: torch.device = CPU, layers: int = LAYERS, context_tokens: int = 1 << 40) -> None:
        self.device = device
        self.layers = layers
        self.context_tokens = context_tokens
        self.others = 0.0
        self.noise: Callable[[], float] = lambda: 0.0
        self.held_bytes = 0
        self.lowest_free = 1.0
        self.probes = 0

    @property
    def free(self) -> float:
        """The share of the memory that is really free."""
        return 1 - self.others - self.held_bytes / TOTAL_BYTES

    def probe(self, device: torch.device) -> MemoryState:
        assert device == self.device
        self.probes += 1
        return MemoryState(int((self.free + self.noise()) * TOTAL_BYTES), TOTAL_BYTES)

    def observe(self, governor: WindowGovernor, step: int, requests: int = 1) -> int:
        layer_bytes = requests * LAYER_BYTES_PER_TOKEN
        return governor.observe(
            self.device,
            step=step,
            bytes_per_token=self.layers * layer_bytes,
            largest_bytes_per_token=layer_bytes,
            held_bytes=self.held_bytes,
        )

    def step(self, governor: WindowGovernor, step: int) -> int:
        """Run one forward pass: free memory is least while the last layer's ring exists twice."""
        window_tokens = self.observe(governor, step)
        held_tokens = min(self.context_tokens, SINK + ring_tokens(window_tokens, BLOCK))
        new_bytes = held_tokens * self.layers * LAYER_BYTES_PER_TOKEN
        twice = self.held_bytes / self.layers / TOTAL_BYTES if new_bytes > self.held_bytes else 0
        self.held_bytes = new_bytes
        self.lowest_free = min(self.lowest_free, self.free - twice)
        return window_tokens


def make_governor(world: World, **options: object) -> WindowGovernor:
    settings: dict[str, Any] = {"window_tokens": "auto", "block_tokens": BLOCK, "sink_tokens": SINK}
    return WindowGovernor(TieredCacheConfig(**(settings | options)), world.probe)


def settle(world: World, governor: WindowGovernor, first_step: int = 1, steps: int = 400) -> int:
    """Run until nothing changes any more; return the number of the next step."""
    for step in range(first_step, first_step + steps):
        world.step(governor, step)
    assert governor.changes[-1].step < first_step + steps // 2, "does not settle"
    return first_step + steps


@pytest.mark.parametrize("others", [0.0, 0.3, 0.6, 0.8])
def test_settles_with_the_reserve_free(others: float) -> None:
    world = World()
    world.others = others
    governor = make_governor(world)
    settle(world, governor)
    assert 0.10 <= world.free <= 0.15
    assert world.lowest_free >= 0.10, "growth went through the reserve"
    assert governor.window_tokens % BLOCK == 0


@pytest.mark.parametrize("layers", [1, 2, 8])
def test_few_layers_leave_room_for_a_ring_twice(layers: int) -> None:
    world = World(layers=layers)
    governor = make_governor(world)
    settle(world, governor)
    assert world.lowest_free >= 0.10 and governor.window_tokens > FIRST_GROWTH_TOKENS
    tokens = [change.window_tokens for change in governor.changes]
    assert tokens == sorted(tokens)


@pytest.mark.parametrize("reserve", [0.05, 0.125, 0.3])
def test_reserve_is_as_set(reserve: float) -> None:
    world = World()
    governor = make_governor(world, memory_reserve=reserve)
    settle(world, governor)
    assert reserve - 0.025 <= world.free <= reserve + 0.025


@pytest.mark.parametrize("points_per_step", [0.001, 0.01, 0.05, 0.09])
def test_shrinks_before_memory_runs_out(points_per_step: float) -> None:
    world = World()
    governor = make_governor(world)
    step = settle(world, governor)
    world.lowest_free = 1.0
    while world.others < 0.8:
        world.others += points_per_step
        assert world.free > 0, "out of memory"
        world.step(governor, step)
        assert world.free >= 0.10, "shrinks at once"
        step += 1
    grown = [change for change in governor.changes if change.step >= step]
    assert not grown
    settle(world, governor, step)
    assert 0.10 <= world.free <= 0.15


def test_nothing_moves_within_the_band() -> None:
    world = World()
    governor = make_governor(world)
    step = settle(world, governor)
    settled = governor.changes
    world.others = 0.02
    settle(world, governor, step)
    world.others = 0.0
    settle(world, governor, step + 400)
    assert governor.changes == settled


@pytest.mark.parametrize("seed", range(8))
def test_noise_moves_nothing(seed: int) -> None:
    """Noise of ±2 points changes nothing, in a settled state and after a change of the others' memory."""
    randomness = random.Random(seed)
    world = World()
    governor = make_governor(world)
    first = settle(world, governor)
    world.noise = lambda: randomness.choice([randomness.uniform(-0.02, 0.02), -0.02, 0.02])
    for others in (0.0, 0.5, 0.1):
        world.others = others
        settle(world, governor, first, steps=800)
        assert 0.08 <= world.free <= 0.17
        first += 800


def test_a_dip_now_and_then_keeps_the_window_small() -> None:
    """Memory that a forward pass takes every few steps does not count as free in between."""
    world = World()
    world.others = 0.5
    governor = make_governor(world)
    for step in range(1, 1000):
        world.others = 0.6 if step % 7 == 0 else 0.5
        world.step(governor, step)
    assert governor.changes[-1].step < 500
    assert world.lowest_free >= 0.09


def test_growth_is_gradual_and_shrinking_is_not() -> None:
    world = World()
    world.others = 0.8
    governor = make_governor(world)
    step = settle(world, governor)
    small = governor.window_tokens
    world.others = 0.0
    settle(world, governor, step)
    growths = [change for change in governor.changes if change.step >= step]
    assert len(growths) > 2 and governor.window_tokens > 4 * small
    tokens, last_step = small, step - GROWTH_STEPS
    for change in growths:
        assert tokens < change.window_tokens <= 2 * tokens
        assert change.step >= last_step + GROWTH_STEPS
        tokens, last_step = change.window_tokens, change.step
    world.others = 0.8
    world.step(governor, 10_000)
    assert governor.window_tokens < 2 * small and world.free >= 0.10


def test_starts_at_the_floor_then_modestly() -> None:
    world = World()
    governor = make_governor(world, window_min_tokens=512)
    assert governor.window_tokens == 512
    assert world.step(governor, 1) == FIRST_GROWTH_TOKENS
    tight = World()
    tight.others = 0.85
    governor = make_governor(tight)
    assert BLOCK <= tight.step(governor, 1) < FIRST_GROWTH_TOKENS
    assert tight.free >= 0.10


@pytest.mark.parametrize("others", [0.0, 0.5, 0.8, 0.84])
@pytest.mark.parametrize("layer_bytes", [512, 4096])
def test_layers_come_one_by_one(others: float, layer_bytes: int) -> None:
    """The windows of the first forward pass fill before the number of layers is known."""
    world = World()
    world.others = others
    governor = make_governor(world)
    for layers in range(1, 101):
        window_tokens = governor.observe(
            CPU,
            step=1,
            bytes_per_token=layers * layer_bytes,
            largest_bytes_per_token=layer_bytes,
            held_bytes=world.held_bytes,
        )
        world.held_bytes += layer_bytes * (SINK + ring_tokens(window_tokens, BLOCK))
    assert world.probes == 1
    assert world.free >= 0.10 or window_tokens == BLOCK


@pytest.mark.parametrize("minimum", [256, 700, 1024])
def test_bounds(minimum: int) -> None:
    world = World()
    governor = make_governor(world, window_min_tokens=minimum, window_max_tokens=5000)
    step = settle(world, governor)
    assert governor.window_tokens == 5000 // BLOCK * BLOCK
    world.others = 0.99
    step = settle(world, governor, step)
    assert governor.window_tokens == minimum
    assert all(minimum <= change.window_tokens <= 5000 for change in governor.changes)


def test_windows_count_as_full() -> None:
    """Windows count as full: a short context leaves much free that a long prompt would take within one pass."""
    world = World(context_tokens=100)
    governor = make_governor(world)
    step = settle(world, governor)
    assert world.free > 0.9
    world.context_tokens = 1 << 40
    world.step(governor, step)
    assert 0.10 <= world.free <= 0.15


def test_more_requests_in_the_same_step() -> None:
    world = World()
    governor = make_governor(world)
    step = settle(world, governor)
    before, probes = governor.window_tokens, world.probes
    assert world.observe(governor, step) == world.observe(governor, step) == before
    after = world.observe(governor, step, requests=2)
    assert 0.48 * before < after < 0.52 * before
    assert world.probes == probes + 1, "once per step"


def test_the_tightest_device_decides() -> None:
    wide, tight = World(CPU), World(OTHER)
    worlds = {CPU: wide, OTHER: tight}
    tight.others = 0.6
    governor = make_governor(wide)
    governor._probe = lambda device: worlds[device].probe(device)
    for step in range(1, 400):
        for world in (wide, tight):
            world.step(governor, step)
    assert 0.10 <= tight.free <= 0.15 and wide.free > 0.5
    before = governor.window_tokens
    governor.observe(OTHER, step=400, bytes_per_token=0, largest_bytes_per_token=0, held_bytes=0)
    for step in range(400, 800):
        wide.step(governor, step)
    assert governor.window_tokens > 2 * before and 0.10 <= wide.free <= 0.15


def test_starts_anew_when_nothing_is_left() -> None:
    world = World()
    governor = make_governor(world)
    settle(world, governor)
    assert governor.window_tokens > FIRST_GROWTH_TOKENS
    governor.observe(CPU, step=500, bytes_per_token=0, largest_bytes_per_token=0, held_bytes=0)
    assert governor.window_tokens == BLOCK
    world.held_bytes = 0
    assert world.step(governor, 501) == FIRST_GROWTH_TOKENS


def test_fixed_window_asks_nobody() -> None:
    world = World()
    governor = make_governor(world, window_tokens=2048)
    assert world.step(governor, 1) == world.step(governor, 2) == governor.window_tokens == 2048
    assert world.probes == 0


def test_changes_are_remembered_to_a_limit() -> None:
    world = World()
    governor = make_governor(world)
    for step in range(1, 600):
        world.others = 0.5 if step % 50 == 49 else 0.0
        world.step(governor, step)
    changes = governor.changes
    assert changes[0] == (0, BLOCK) and changes[1].step == 1
    assert [change.step for change in changes] == sorted(change.step for change in changes)
    for step in range(600, 20_000):
        world.others = 0.5 if step % 50 == 49 else 0.0
        world.step(governor, step)
    assert len(governor.changes) == 256 and governor.changes[-1].step > 19_000


def test_memory_of_the_host() -> None:
    state = probe_memory(CPU)
    assert state.total_bytes == psutil.virtual_memory().total
    assert 0 < state.free_bytes < state.total_bytes


@pytest.mark.parametrize(("fraction", "free_bytes", "total_bytes"), [(1.0, 300 + 200, 1000), (0.7, 300, 700)])
def test_memory_of_cuda(
    monkeypatch: pytest.MonkeyPatch, fraction: float, free_bytes: int, total_bytes: int
) -> None:
    """The driver sees 300 bytes free of 1000; PyTorch has reserved 600, of which tensors occupy 400."""
    statistics = {"reserved_bytes.all.current": 600, "allocated_bytes.all.current": 400}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (300, 1000))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: statistics)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction)
    assert probe_memory(torch.device("cuda", 0)) == MemoryState(free_bytes, total_bytes)
