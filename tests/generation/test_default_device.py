"""The cache works under `torch.set_default_device("cuda")` or another default dtype. Here the default device is
"meta", which has no data: a tensor that lands there is noticed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache

from hf_tiered_cache import KVCacheManager, TieredCache, TieredCacheConfig, TierError
from hf_tiered_cache.transfer.engine import CpuCopyEngine
from hf_tiered_cache.transfer.worker import Worker

from ..fakes import StagedLateEngine
from ..models import CACHE_NAME, prompt_ids, tiny_llama

SIZES = {"window_tokens": 32, "block_tokens": 16}


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


Habit = Callable[[], AbstractContextManager[Any]]
HABITS: list[Habit] = [default_device, lambda: torch.device("meta"), default_dtype, deterministic]
habits = pytest.mark.parametrize(
    "habit", HABITS, ids=["default device", "device context", "dtype", "deterministic"]
)


@pytest.fixture
def background_tasks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the tasks of background threads, all of which have another default device."""
    counted = [0]
    submit = Worker.submit

    def submit_elsewhere(worker: Worker, task: Callable[[], Any]) -> Future[Any]:
        def run() -> Any:
            counted[0] += 1
            with torch.device("meta"):
                return task()

        return submit(worker, run)

    monkeypatch.setattr(Worker, "submit", submit_elsewhere)
    return counted


class ForgetfulEngine(CpuCopyEngine):
    """The control: an engine that names no device for its buffers."""

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


def use_manager(manager: KVCacheManager, dtype: torch.dtype) -> list[torch.Tensor]:
    """Make all calls of a manager, on two layers, with tensors on the CPU; return copies of their results."""
    generator = torch.Generator("cpu").manual_seed(0)

    def states(batch: int, heads: int, tokens: int) -> torch.Tensor:
        shape = (batch, heads, tokens, 8)
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(dtype)

    def new(batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return states(batch, 2, tokens), states(batch, 2, tokens)

    results: list[torch.Tensor] = []

    def keep(*tensors: torch.Tensor) -> None:
        results.extend(tensor.clone() for tensor in tensors)

    manager.allocate("a", seq_len=400)
    for layer in range(2):
        manager.append("a", layer, *new(1, 150))
    manager.flush()
    for layer in range(2):
        keep(*manager.update("a", layer, *new(1, 3)))
        keep(*manager.fetch("a", layer, [0, 20, 140, 152, 20]))
    manager.prefetch("a", [5, 60])
    for layer in range(2):
        keep(*manager.update("a", layer, *new(1, 1)))
        manager.select_rows("a", layer, [0, 0, 0])
        keep(*manager.update("a", layer, *new(3, 20)))
        manager.select_rows("a", layer, [2, 0])
        manager.crop("a", layer, 70)
    manager.fork("a", "b")
    manager.prefetch("a")
    manager.evict("a")
    for tokens in (1, 7, 40, 1):
        for layer in range(2):
            keep(manager.attend("a", layer, states(2, 4, tokens), *new(2, tokens)))
    for request in "ab":
        for layer in range(2):
            keep(*manager.fetch("a", layer, range(manager.tokens(request, layer))))
    manager.stats()
    return results


def all_tiers(directory: Path, **options: Any) -> TieredCacheConfig:
    """Tiers with room for a few blocks each."""
    capacities = {"host_capacity": 4 * 4096, "resident_capacity": 3 * 4096, "l1_capacity": 8 * 4096}
    return TieredCacheConfig(**(SIZES | capacities | options), l2_url=directory)


@habits
@pytest.mark.parametrize(
    ("engine", "dtype", "window"),
    [(CpuCopyEngine, torch.float32, "auto"), (StagedLateEngine, torch.bfloat16, 32)],
    ids=["direct", "staged"],
)
def test_a_manager(
    habit: Habit,
    engine: type[CpuCopyEngine],
    dtype: torch.dtype,
    window: int | str,
    tmp_path: Path,
    background_tasks: list[int],
) -> None:
    config = all_tiers(tmp_path, window_tokens=window)
    with KVCacheManager(config, engine_factory=engine) as manager:
        expected = use_manager(manager, dtype)
    before = background_tasks[0]
    with habit(), KVCacheManager(config, engine_factory=engine) as manager:
        found = use_manager(manager, dtype)
    assert background_tasks[0] > before + 20
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype is theirs.dtype and mine.device.type == "cpu" and torch.equal(mine, theirs)


@pytest.mark.parametrize("habit", HABITS[:2], ids=["default device", "device context"])
def test_a_buffer_on_the_default_device_is_noticed(habit: Habit, tmp_path: Path) -> None:
    with (
        pytest.raises((TypeError, NotImplementedError, TierError), match="meta"),
        habit(),
        KVCacheManager(all_tiers(tmp_path), engine_factory=ForgetfulEngine) as manager,
    ):
        use_manager(manager, torch.float32)


def use_model(model: Any, cache: Cache, ids: torch.Tensor) -> torch.Tensor:
    """Run prefill in two pieces, steps, three reordered beams of which one is kept; return all logits."""
    logits: list[torch.Tensor] = []

    def forward(new: torch.Tensor) -> None:
        held, (batch, tokens) = cache.get_seq_length(), new.shape
        positions = torch.arange(held, held + tokens, device="cpu").expand(batch, -1)
        mask = torch.ones(batch, held + tokens, dtype=torch.long, device="cpu")
        output = model(new, position_ids=positions, attention_mask=mask, **{CACHE_NAME: cache})
        logits.extend(output.logits[:, -1:].clone())

    with torch.no_grad():
        forward(ids[:, :97])
        forward(ids[:, 97:140])
        for step in range(140, 144):
            forward(ids[:, step : step + 1])
        cache.batch_repeat_interleave(3)
        beams = torch.tensor([2, 0, 0], device="cpu")
        for step in range(144, 148):
            forward(ids[:, step : step + 1].expand(3, -1) + torch.arange(3, device="cpu")[:, None])
            cache.reorder_cache(beams)
        cache.batch_select_indices(torch.tensor([1], device="cpu"))
        cache.crop(-60)
        forward(ids[:, 20:40])
    return torch.cat(logits)


@habits
@pytest.mark.parametrize("streams", [False, True], ids=["gather", "streaming"])
def test_a_model(
    habit: Habit, streams: bool, background_tasks: list[int], streamed_layers: list[int], tmp_path: Path
) -> None:
    model = tiny_llama()
    config, ids = all_tiers(tmp_path), prompt_ids(150)

    def run() -> torch.Tensor:
        make = TieredCache.for_model(model, cache_config=config) if streams else None
        with make or TieredCache(config=model.config, cache_config=config) as cache:
            return use_model(model, cache, ids)

    try:
        reference = use_model(model, DynamicCache(config=model.config), ids)
        expected, streamed = run(), len(streamed_layers)
        tasks = background_tasks[0]
        with habit():
            found = run()
        assert (len(streamed_layers) > streamed > 0) is streams and background_tasks[0] > tasks + 20
        assert found.device.type == "cpu" and torch.equal(found, expected)
        if streams:
            assert (found - reference).abs().max() < 1e-4
        else:
            assert torch.equal(found, reference)
    finally:
        model.set_attn_implementation("sdpa")
