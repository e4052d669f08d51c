"""Small uses of the package under the model of CUDA, with blocks in every tier that move all the time."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from transformers import DynamicCache

from hf_tiered_cache import CacheStats, KVCacheManager, TieredCache, TieredCacheConfig
from hf_tiered_cache.residency.writeback import WriteBack
from hf_tiered_cache.sequence import window_sizing

from ..fakes import RandomGovernor, random_kv
from ..models import CACHE_NAME, generate, prompt_ids, tiny_llama
from .model import CudaModel, ModelEngine

Form = Literal["gather", "stream"]
Layers = list[tuple[torch.Tensor, torch.Tensor]]

BLOCK_TOKENS, LAYERS = 16, 2
# Two rows, two heads of 16, K and V: as `tiny_llama` has them.
BLOCK_BYTES = 2 * 2 * BLOCK_TOKENS * 16 * 2 * 4


class Scenario:
    """A manager on the model's engine, with small tiers of every kind.

    Args:
        cuda: the model.
        path: the directory of L2.
        engine: the engine, for controls.
    """

    def __init__(self, cuda: CudaModel, path: Path, engine: type[ModelEngine] | None = None) -> None:
        self.cuda = cuda
        self.hits: Counter[str] = Counter()
        self._path = path
        self._engine = engine

    @contextmanager
    def manager(self, **options: Any) -> Iterator[KVCacheManager]:
        """Make a manager with blocks on the device, in host memory, in L1 and in L2, which move all the time."""
        before_close = options.pop("before_close", lambda: None)
        settings: dict[str, Any] = {
            "window_tokens": 2 * BLOCK_TOKENS,
            "block_tokens": BLOCK_TOKENS,
            "stream_buffer_size": 2 * BLOCK_BYTES,
            "resident_capacity": 4 * BLOCK_BYTES,
            "host_capacity": 6 * BLOCK_BYTES,
            "l1_capacity": 8 * BLOCK_BYTES,
            "l2_url": self._path,
            "eviction": "random",
            "protection_steps": 0,
            "warmup_steps": 0,
            "high_watermark": 0.8,
            "low_watermark": 0.5,
            "staging_blocks": 3,
        }
        config = TieredCacheConfig(**settings | options)
        with KVCacheManager(config, engine_factory=self.cuda.engine(self._engine)) as manager:
            try:
                yield manager
            finally:
                before_close()
            self._count(manager.stats())

    def _count(self, stats: CacheStats) -> None:
        self.hits.update({name: tier.blocks_served for name, tier in stats.tiers.items()})

    def generation(self, form: Form, tiers: dict[str, Any] | None = None, **options: Any) -> bool:
        """Run `model.generate`, with other settings of the tiers if given; return true if the tokens are those of
        DynamicCache."""
        model = copy.deepcopy(tiny_llama(LAYERS))
        input_ids = prompt_ids(150, batch=2)
        options = {"max_new_tokens": 8} | options
        expected, _ = generate(model, input_ids, DynamicCache(config=model.config), **options)
        with self.cuda.watch(), self.manager(**tiers or {}) as manager, _cache(model, manager, form) as cache:
            found, _ = generate(model, input_ids, cache, **options)
        return torch.equal(found, expected)

    def threads(self, form: Form) -> None:
        """Run three threads, each with its own request and stream, and with another stream in its second turn."""

        def work(manager: KVCacheManager, request: str) -> None:
            manager.allocate(request)
            layers = [_random_kv(160) for _ in range(LAYERS)]
            for first, sizes in ((0, (90, 30, 1, 1)), (122, (1, 20, 1))):
                with self.cuda.computing_on(self.cuda.new_stream()), self.cuda.watch():
                    read = _steps(manager, request, form, layers, first, sizes)
                    if first:
                        for layer_id in range(LAYERS):
                            manager.crop(request, layer_id, 70)
                        manager.evict(request)
                        manager.fetch(request, 1, range(3, 60, 7))
                _check(read, layers)

        with self.manager() as manager:
            _in_threads(*(lambda name=name: work(manager, name) for name in "abc"))  # type: ignore[misc]

    def handover(self, form: Form) -> None:
        """Make each call on a request in another thread, which computes on another stream. In between, add tokens
        without attention."""
        layers = [_random_kv(200) for _ in range(LAYERS)]
        calls: list[tuple[int, Form | Literal["append"]]] = [
            (90, form), (1, "append"), (1, form), (40, "append"), (1, form), (1, "append"), (30, form), (1, form)
        ]  # fmt: skip
        first = 0
        with self.manager() as manager:
            manager.allocate("a")
            for size, way in calls:

                def call(first: int = first, size: int = size, way: Any = way) -> None:
                    with self.cuda.computing_on(self.cuda.new_stream()), self.cuda.watch():
                        read = _steps(manager, "a", way, layers, first, (size,))
                    _check(read, layers)

                _in_threads(call)
                first += size

    def streams(self, form: Form) -> None:
        """Run one thread that alternates between two streams, each for its own request."""
        requests = {name: [_random_kv(200) for _ in range(LAYERS)] for name in "ab"}
        streams = {name: self.cuda.new_stream() for name in requests}
        read = []
        with self.manager() as manager, self.cuda.watch():
            first = 0
            for size in (90, 1, 30, 1, 1):
                for name, layers in requests.items():
                    with self.cuda.computing_on(streams[name]):
                        if not first:
                            manager.allocate(name)
                        read.append((layers, _steps(manager, name, form, layers, first, (size,))))
                first += size
        for layers, found in read:
            _check(found, layers)

    def fresh_blocks(self, form: Form) -> bool:
        """Feed a prompt in chunks. All its blocks stay on the device, too, and are read there before write-back
        has waited for any."""
        gate, store = threading.Event(), WriteBack._store

        def store_late(write_back: WriteBack, batch: Any) -> None:
            gate.wait()
            store(write_back, batch)

        tiers = {
            "resident_capacity": 64 * BLOCK_BYTES,
            "staging_blocks": 64,
            "eviction": "pinned",
            "stream_buffers": 6,
            "before_close": gate.set,
        }
        with mock.patch.object(WriteBack, "_store", store_late):
            return self.generation(form, tiers, prefill_chunk_size=40)

    def moving_windows(self, form: Form) -> None:
        """Use windows that grow and shrink from step to step; fork, crop, select rows and reset in between."""
        model = copy.deepcopy(tiny_llama(LAYERS))
        input_ids = prompt_ids(150, batch=2)
        with (
            mock.patch.object(window_sizing, "WindowGovernor", RandomGovernor),
            self.cuda.watch(),
            torch.no_grad(),
            self.manager(window_tokens="auto") as manager,
            _cache(model, manager, form) as cache,
        ):

            def run(tokens: torch.Tensor, held: TieredCache) -> torch.Tensor:
                result = model(tokens, **{CACHE_NAME: held}, use_cache=True).logits[:, -1:].argmax(-1)
                return torch.as_tensor(result)

            tokens = input_ids
            for _ in range(12):
                tokens = run(tokens, cache)
            assert len(manager.stats().window_changes) > 3
            with copy.deepcopy(cache) as twin:
                cache.crop(-60)
                run(tokens, cache)
                run(tokens, twin)
                twin.batch_select_indices(torch.tensor([1]))
                run(tokens[:1], twin)
            cache.reset()
            run(input_ids, cache)


def _random_kv(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random_kv(tokens, batch=2, key_shape=(2, 16), value_shape=(2, 16))


def _steps(
    manager: KVCacheManager,
    request: str,
    form: Form | Literal["append"],
    layers: Layers,
    first: int,
    sizes: tuple[int, ...],
) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Add tokens from `first` on, in pieces. The stream reads the results; the returned copies, each with its
    layer, are for `_check`: a comparison here would make the host wait."""
    read = []
    for size in sizes:
        for layer_id, (key, value) in enumerate(layers):
            new = slice(first, first + size)
            if form == "gather":
                keys, values = manager.update(request, layer_id, key[:, :, new], value[:, :, new])
                read.append((layer_id, keys.clone(), values.clone()))
            elif form == "append":
                manager.append(request, layer_id, key[:, :, new], value[:, :, new])
            else:
                query = torch.randn(2, 4, size, 16)
                manager.attend(request, layer_id, query, key[:, :, new], value[:, :, new])
        first += size
    return read


def _check(read: list[tuple[int, torch.Tensor, torch.Tensor]], layers: Layers) -> None:
    """Fail unless the results are the tokens that were added."""
    for layer_id, *found in read:
        for states, expected in zip(found, layers[layer_id], strict=True):
            assert torch.equal(states, expected[:, :, : states.shape[2]])


@contextmanager
def _cache(model: Any, manager: KVCacheManager, form: Form) -> Iterator[TieredCache]:
    made = (
        TieredCache.for_model(model, manager=manager)
        if form == "stream"
        else TieredCache(config=model.config, manager=manager)
    )
    with made as cache:
        yield cache


def _in_threads(*work: Callable[[], None]) -> None:
    """Run functions in threads at the same time; raise what any of them raised."""
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(task,)) for task in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
