"""R27: with streaming attention, accelerator memory is planned and accounted, and does not grow with length."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from hf_tiered_cache import ConfigError, KVCacheManager, TieredCacheConfig
from hf_tiered_cache.attention.online import AttentionRule
from hf_tiered_cache.integration.plan import plan_streaming
from hf_tiered_cache.transfer.engine import CpuCopyEngine

LAYERS, HEADS, KV_HEADS, DIM = 3, 8, 2, 32


class Allocations(TorchDispatchMode):
    """Adds up the memory of all tensors that operations return while it is on, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = self._live_bytes = 0
        self._bytes: dict[int, int] = {}
        self._tensors: Counter[int] = Counter()
        self._foreign: set[int] = set()
        self._host: list[torch.Tensor] = []

    @contextmanager
    def watch(self, *foreign: torch.Tensor) -> Iterator[None]:
        """Add up allocations in this context, except these tensors and their views: they are not the package's."""
        self._foreign = {tensor.untyped_storage().data_ptr() for tensor in [*foreign, *self._host]}
        with self:
            yield
        self._foreign = set()

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Do not count this tensor: it is not on the accelerator."""
        self._host.append(tensor)  # kept, so that its address is not reused
        address = tensor.untyped_storage().data_ptr()
        self._foreign.add(address)
        self._live_bytes -= self._bytes.pop(address, 0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                address = storage.data_ptr()
                if storage.nbytes() and address not in self._foreign:
                    self._live_bytes += storage.nbytes() - self._bytes.get(address, 0)
                    self._bytes[address] = storage.nbytes()
                    self._tensors[address] += 1
                    weakref.finalize(tensor, self._gone, address)
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        return result

    def _gone(self, address: int) -> None:
        self._tensors[address] -= 1
        if self._tensors[address] == 0:
            self._live_bytes -= self._bytes.pop(address, 0)


@contextmanager
def watched_manager(config: TieredCacheConfig) -> Iterator[tuple[KVCacheManager, Allocations]]:
    """Make a manager whose allocations are added up, except those for the host."""
    allocations = Allocations()

    class Engine(CpuCopyEngine):
        def allocate_host(self, nbytes: int) -> torch.Tensor:
            buffer = super().allocate_host(nbytes)
            allocations.leave_out(buffer)
            return buffer

    with KVCacheManager(config, engine_factory=Engine) as manager:
        manager.allocate("a")
        yield manager, allocations


def forward(
    manager: KVCacheManager, allocations: Allocations, tokens: int, dtype: torch.dtype, rule: AttentionRule
) -> None:
    """Compute streaming attention for all layers; the model's own tensors do not count."""
    for layer_id in range(LAYERS):
        query = torch.randn(1, HEADS, tokens, DIM).to(dtype)
        key, value = (torch.randn(1, KV_HEADS, tokens, DIM).to(dtype) for _ in range(2))
        with allocations.watch(query, key, value):
            manager.attend("a", layer_id, query, key, value, rule)


def fill(manager: KVCacheManager, allocations: Allocations, tokens: int, dtype: torch.dtype) -> None:
    """Append tokens to all layers, without attention."""
    for layer_id in range(LAYERS):
        key, value = (torch.randn(1, KV_HEADS, tokens, DIM).to(dtype) for _ in range(2))
        with allocations.watch(key, value):
            manager.append("a", layer_id, key, value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("chunk", [1, 64, 300])
def test_planned_accounted_allocated(dtype: torch.dtype, softcap: float | None, chunk: int) -> None:
    """Allocated memory is accounted and within the plan, at 800 tokens as at 2,400."""
    config = TieredCacheConfig(window_tokens=128, block_tokens=32, stream_buffer_size="64KiB")
    model_config = LlamaConfig(
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        num_hidden_layers=LAYERS,
    )
    if softcap is not None:
        model_config.attn_logit_softcapping = softcap
    plan = plan_streaming(model_config, config, query_tokens=chunk, dtype=dtype)
    rule = AttentionRule(softcap=softcap)
    with watched_manager(config) as (manager, allocations), torch.inference_mode():
        peaks = []
        for tokens in (800, 2400):
            while manager.tokens("a", LAYERS - 1) < tokens:
                if chunk == 1:
                    fill(manager, allocations, 200, dtype)
                for _ in range(1 if chunk > 1 else 4):
                    forward(manager, allocations, chunk, dtype, rule)
            peaks.append((manager.stats().peak_l0_bytes, allocations.peak_bytes))
    for accounted, allocated in peaks:
        assert 0.97 * allocated <= accounted <= allocated
        assert 0.5 * plan.total_bytes <= allocated <= plan.total_bytes
    assert peaks[1][1] <= 1.1 * peaks[0][1]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"config": {}}, "model.config"),
        ({"cache_config": {"window_tokens": 64}}, "TieredCacheConfig"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"query_tokens": "long"}, "query_tokens='long'"),
        ({"dtype": "float16"}, "torch.dtype"),
    ],
)
def test_a_plan_of_nonsense_is_refused(wrong: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"config": LlamaConfig(), "cache_config": TieredCacheConfig()}
    with pytest.raises(ConfigError, match=words):
        plan_streaming(**arguments | wrong)
    assert plan_streaming(**arguments, batch_size=2.0) == plan_streaming(**arguments, batch_size=2)
