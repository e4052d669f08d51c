"""The promises of the CPU tests, on a CUDA device. Run these under `TORCH_CUDA_SANITIZER=1` as well."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from hf_tiered_cache import AttentionRule, KVCacheManager, TieredCache, TieredCacheConfig
from hf_tiered_cache.attention.kernels import Problem, Scoring, attend, kernel_for
from hf_tiered_cache.core.blocks import BlockKey, BlockLayout
from hf_tiered_cache.core.metrics import L0Account, Metrics
from hf_tiered_cache.tiers.host import HostTier
from hf_tiered_cache.transfer.cuda import CudaCopyEngine

from ..fakes import POISON, pieces, random_kv
from ..models import generate, prompt_ids, tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# About a millisecond on a current GPU: long enough that a missing wait is seen.
_DELAY_CYCLES = 2_000_000


class LateCudaEngine(CudaCopyEngine):
    """An engine whose copies start late on their streams; it poisons memory on the stream that frees it."""

    def recycled(self, buffer: torch.Tensor) -> None:
        buffer.fill_(POISON)

    def copy_in(self, *arguments: Any, **options: Any) -> Any:
        with torch.cuda.stream(self._in):
            torch.cuda._sleep(_DELAY_CYCLES)
        return super().copy_in(*arguments, **options)

    def copy_in_whole(self, *arguments: Any, **options: Any) -> Any:
        with torch.cuda.stream(self._in):
            torch.cuda._sleep(_DELAY_CYCLES)
        return super().copy_in_whole(*arguments, **options)

    def copy_out(self, *arguments: Any, **options: Any) -> Any:
        with torch.cuda.stream(self._out):
            torch.cuda._sleep(_DELAY_CYCLES)
        return super().copy_out(*arguments, **options)


class UnorderedCudaEngine(LateCudaEngine):
    """The control: the compute stream waits for nothing."""

    def compute_waits(self, event: Any) -> None:
        return


def _small_tiers(path: Path) -> dict[str, Any]:
    """Return settings that keep blocks moving between the device, page-locked host memory, L1 and L2."""
    return {
        "resident_capacity": 6 * 16384,
        "host_capacity": 6 * 16384,
        "l1_capacity": 20 * 16384,
        "l2_url": path,
        "eviction": "random",
        "protection_steps": 0,
        "high_watermark": 0.8,
        "low_watermark": 0.5,
    }


def _matches(engine: type[CudaCopyEngine], dtype: torch.dtype, tmp_path: Path, **generation: Any) -> bool:
    model = copy.deepcopy(tiny_llama()).to("cuda", dtype)
    input_ids = prompt_ids(300, batch=2).cuda()
    expected = generate(model, input_ids, DynamicCache(config=model.config), **generation)
    settings = TieredCacheConfig(window_tokens=64, block_tokens=32, **_small_tiers(tmp_path))
    with (
        KVCacheManager(settings, engine_factory=engine) as manager,
        TieredCache(config=model.config, manager=manager) as cache,
    ):
        found = generate(model, input_ids, cache, **generation)
        assert manager.stats().blocks_sealed > 0
    return torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "generation",
    [{}, {"num_beams": 3, "num_return_sequences": 2}, {"prefill_chunk_size": 70}],
    ids=["greedy", "beams", "chunked"],
)
@pytest.mark.parametrize("engine", [CudaCopyEngine, LateCudaEngine])
def test_same_as_dynamic_cache(
    engine: type[CudaCopyEngine], generation: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    assert _matches(engine, dtype, tmp_path, **generation)


def test_control_without_waits(tmp_path: Path) -> None:
    assert not _matches(UnorderedCudaEngine, torch.float32, tmp_path)


def _streaming_deviation(engine: type[CudaCopyEngine], tmp_path: Path, **generation: Any) -> float:
    """Return the largest difference of streaming logits from those of sdpa with everything in memory; infinite if
    tokens differ."""
    model = copy.deepcopy(tiny_llama()).to("cuda")
    input_ids = prompt_ids(300, batch=2).cuda()
    expected = generate(model, input_ids, DynamicCache(config=model.config), **generation)
    settings = TieredCacheConfig(
        window_tokens=64, block_tokens=32, stream_buffer_size="16KiB", **_small_tiers(tmp_path)
    )
    with (
        KVCacheManager(settings, engine_factory=engine) as manager,
        TieredCache.for_model(model, manager=manager) as cache,
    ):
        found = generate(model, input_ids, cache, **generation)
        assert manager.stats().blocks_sealed > 0
    if not torch.equal(found[0], expected[0]):
        return float("inf")
    return (found[1] - expected[1]).abs().max().nan_to_num(float("inf")).item()


@pytest.mark.parametrize(
    "generation",
    [{}, {"num_beams": 3, "num_return_sequences": 2}, {"prefill_chunk_size": 70}],
    ids=["greedy", "beams", "chunked"],
)
@pytest.mark.parametrize("engine", [CudaCopyEngine, LateCudaEngine])
def test_streaming(engine: type[CudaCopyEngine], generation: dict[str, Any], tmp_path: Path) -> None:
    assert _streaming_deviation(engine, tmp_path, **generation) < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padding_over_whole_blocks(dtype: torch.dtype) -> None:
    """Left padding masks whole blocks; their biases must not become infinite in a kernel."""
    torch.manual_seed(0)
    with KVCacheManager(TieredCacheConfig(window_tokens=64, block_tokens=64)) as manager:
        manager.allocate("a")
        key, value = (part.cuda() for part in random_kv(600, batch=2, dtype=dtype))
        manager.append("a", 0, key[:, :, :-1], value[:, :, :-1])
        query = torch.randn(2, 4, 1, 8, device="cuda").to(dtype)
        mask = torch.ones(2, 1, 1, 600, dtype=torch.bool, device="cuda")
        mask[0, ..., :400] = False
        output = manager.attend("a", 0, query, key[:, :, -1:], value[:, :, -1:], AttentionRule(mask=mask))
        expected = torch.nn.functional.scaled_dot_product_attention(
            query.double(), *(part.double().repeat_interleave(2, 1) for part in (key, value)), attn_mask=mask
        )
        assert (output.transpose(1, 2) - expected).abs().max() < (1e-5 if dtype is torch.float32 else 2e-2)


def test_control_streaming_without_waits(tmp_path: Path) -> None:
    assert _streaming_deviation(UnorderedCudaEngine, tmp_path) == float("inf")


@pytest.mark.parametrize(
    ("name", "dtype", "dims", "biased"),
    [
        ("cuda flash", torch.bfloat16, (128, 128), False),
        ("cuda flash", torch.float16, (64, 64), False),
        ("cuda efficient", torch.float32, (64, 64), False),
        ("cuda efficient", torch.bfloat16, (64, 64), True),
        ("cuda efficient", torch.bfloat16, (192, 128), False),
        ("matmul", torch.float32, (70, 70), True),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_kernels(name: str, dtype: torch.dtype, dims: tuple[int, int], biased: bool, causal: bool) -> None:
    """Output and log-sum-exp of the kernel that is chosen for each problem, against float64."""
    torch.manual_seed(0)
    tokens = 77
    query, key = (torch.randn(3, 4, tokens, dims[0], device="cuda").to(dtype) for _ in range(2))
    value = torch.randn(3, 4, tokens, dims[1], device="cuda").to(dtype)
    bias = torch.randn(3, 1, 1, tokens, device="cuda").to(dtype) if biased else None
    scoring = Scoring(0.1, None, bias, causal)
    assert kernel_for(Problem.of(query, value, scoring)).name == name
    output, lse = attend(query, key, value, scoring, L0Account())
    scores = query.double() @ key.double().transpose(-1, -2) * 0.1
    scores = scores if bias is None else scores + bias.double()
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0]).tril() == 0, -torch.inf)
    tolerance = 2e-5 if dtype is torch.float32 else 2e-2
    assert (output.double() - scores.softmax(-1) @ value.double()).abs().max() < tolerance
    assert (lse.double() - scores.logsumexp(-1)).abs().max() < 1e-4


def test_manager_on_a_side_stream() -> None:
    """The compute stream is the caller's current stream, whichever that is."""
    config = TieredCacheConfig(window_tokens=32, block_tokens=16)
    layers = [[part.cuda() for part in random_kv(300)] for _ in range(4)]
    with KVCacheManager(config, engine_factory=LateCudaEngine) as manager, torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        manager.allocate("a")
        for piece in pieces(300, [90, 1, 17]):
            for layer_id, (key, value) in enumerate(layers):
                keys, values = manager.update("a", layer_id, key[:, :, piece], value[:, :, piece])
                assert torch.equal(keys, key[:, :, : piece.stop])
                assert torch.equal(values, value[:, :, : piece.stop])


def test_accounting_matches_the_allocator() -> None:
    """`l0_bytes` is the memory that the process took from the device, up to the allocator's rounding."""
    config = TieredCacheConfig(window_tokens=1024, block_tokens=256)
    key, value = (part.cuda() for part in random_kv(20_000, key_shape=(8, 64), value_shape=(8, 64)))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with KVCacheManager(config) as manager:
        manager.allocate("a")
        for layer_id in range(6):
            manager.append("a", layer_id, key, value)
        for layer_id in (0, 1, 2, 3, 4, 5, 0, 1):
            manager.update("a", layer_id, key[:, :, :1], value[:, :, :1])
        torch.cuda.synchronize()
        taken = torch.cuda.memory_allocated() - before
        assert abs(taken - manager.stats().l0_bytes) < 0.02 * taken + (1 << 20)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 1 << 20


def test_the_landing_buffer_goes_with_the_engine() -> None:
    size, rounding = 8 << 20, 2 << 20
    metrics = Metrics()
    before = torch.cuda.memory_allocated()
    engine = CudaCopyEngine(torch.device("cuda", 0), metrics)
    source, target = engine.allocate_host(size).random_(), engine.allocate(size)
    engine.copy_in(source, lambda landed: [(target, landed)], engine.record_compute())
    engine.finish_copies_in()
    assert torch.equal(target.cpu(), source)
    assert metrics.l0_bytes == 2 * size
    assert abs(torch.cuda.memory_allocated() - before - 2 * size) < rounding
    engine.close()
    assert metrics.l0_bytes == size
    assert abs(torch.cuda.memory_allocated() - before - size) < rounding


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_source_on_the_device_is_read_when_it_is_complete(whole: bool, waits: bool) -> None:
    """The control, which does not wait for the source, reads its previous content."""
    engine = CudaCopyEngine(torch.device("cuda", 0), Metrics())
    source, target = engine.allocate(1 << 20).zero_(), engine.allocate(1 << 20).zero_()
    after = engine.record_compute()
    torch.cuda._sleep(50 * _DELAY_CYCLES)
    source.fill_(7)
    ready = engine.record_compute() if waits else after
    if whole:
        engine.copy_in_whole(source, target, after, ready)
    else:
        engine.copy_in(source, lambda landed: [(target, landed)], after, ready)
    engine.compute_waits(engine.record_copy_in())
    assert bool((target == 7).all()) is waits
    engine.close()


def test_events_are_used_again() -> None:
    engine = CudaCopyEngine(torch.device("cuda", 0), Metrics())
    for _ in range(100):
        engine.compute_waits(engine.record_copy_in())
    assert sum(map(len, engine._events._idle.values())) == 1
    engine.close()


def test_host_memory_is_page_locked() -> None:
    tier = HostTier("host", None, 1 << 20, TieredCacheConfig())
    layout = BlockLayout(1, 2, 8, 2, 8, 16, torch.float32)
    payload = np.ones((layout.rows, layout.row_elements), np.uint32)
    for index in range(2):
        tier.write(BlockKey("a", 0, index, 0), layout, payload).result()
        tier.lock_pages(torch.device("cuda", 0))
    unlocked, locked = (tier.tensor(BlockKey("a", 0, index, 0)) for index in range(2))
    assert locked.is_pinned() and not unlocked.is_pinned()
    for tensor in (unlocked, locked):
        assert torch.equal(tensor.to("cuda", non_blocking=True).cpu(), tensor)
    del unlocked, locked, tensor
    tier.close()


def test_one_thread_on_two_streams() -> None:
    """Buffers pass between two requests whose streams do not wait for each other."""
    config = TieredCacheConfig(window_tokens=32, block_tokens=16, prefetch_layers=1)
    requests = {name: [[part.cuda() for part in random_kv(300)] for _ in range(2)] for name in "ab"}
    streams = {name: torch.cuda.Stream() for name in requests}
    torch.cuda.synchronize()
    results = []
    with KVCacheManager(config, engine_factory=LateCudaEngine) as manager:
        for piece in pieces(300, [90, 1, 17]):
            for name, layers in requests.items():
                with torch.cuda.stream(streams[name]):
                    if not piece.start:
                        manager.allocate(name)
                    for layer_id, (key, value) in enumerate(layers):
                        found = manager.update(name, layer_id, key[:, :, piece], value[:, :, piece])
                        torch.cuda._sleep(_DELAY_CYCLES)
                        results += [
                            (states.clone(), whole[:, :, : piece.stop])
                            for states, whole in zip(found, (key, value), strict=True)
                        ]
        torch.cuda.synchronize()
        assert all(torch.equal(found, expected) for found, expected in results)


_ON_THE_SECOND_GPU = """
import torch
from hf_tiered_cache import KVCacheManager, TieredCacheConfig
with KVCacheManager(TieredCacheConfig(window_tokens=32, block_tokens=16, host_capacity="1MiB")) as manager:
    manager.allocate("a")
    key = torch.randn(1, 2, 300, 8, device="cuda:1")
    for first in (0, 100, 200):
        for layer in range(3):
            manager.update("a", layer, key[:, :, first : first + 100], key[:, :, first : first + 100])
    manager.flush()
assert torch.cuda.current_device() == 0
assert not torch._C._cuda_hasPrimaryContext(0), "the first device is in use"
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nothing_is_done_on_the_first_gpu() -> None:
    """Run in a separate process, in which nothing else has used the first GPU."""
    subprocess.run([sys.executable, "-c", _ON_THE_SECOND_GPU], check=True, timeout=200)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_layers_on_two_gpus() -> None:
    config = TieredCacheConfig(window_tokens=32, block_tokens=16)
    devices = ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    layers = [[part.to(device) for part in random_kv(300)] for device in devices]
    with KVCacheManager(config, engine_factory=LateCudaEngine) as manager:
        manager.allocate("a")
        for piece in pieces(300, [90, 1, 17]):
            for layer_id, (key, value) in enumerate(layers):
                keys, values = manager.update("a", layer_id, key[:, :, piece], value[:, :, piece])
                assert keys.device == key.device
                assert torch.equal(keys, key[:, :, : piece.stop])
                assert torch.equal(values, value[:, :, : piece.stop])
