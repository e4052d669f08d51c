"""The ring of newest tokens, against plain concatenation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_tiered_cache.core.geometry import Geometry
from hf_tiered_cache.core.metrics import Metrics
from hf_tiered_cache.sequence.window import WindowBuffer, ring_tokens

from ...fakes import LateEngine

BLOCK = 16


def make_window(metrics: Metrics, window_tokens: int, sink_tokens: int) -> WindowBuffer:
    engine = LateEngine(torch.device("cpu"), metrics)
    return WindowBuffer(engine, Geometry(2, 1, 3, 2, 1, torch.float32), sink_tokens, window_tokens, BLOCK)


def numbered(first: int, count: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens whose content is their number and batch row."""
    token = torch.arange(first, first + count, dtype=torch.float32).view(1, 1, count, 1)
    row = torch.arange(batch, dtype=torch.float32).view(batch, 1, 1, 1) / 8
    return (token + row).expand(batch, 1, count, 3), -(token + row).expand(batch, 2, count, 1)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 200)),
        st.tuples(st.just("crop"), st.integers(0, 80)),
        st.tuples(st.just("rows"), st.lists(st.integers(0, 9), min_size=1, max_size=3)),
        st.tuples(st.just("resize"), st.sampled_from([16, 17, 32, 40, 100, 160])),
        st.tuples(st.just("release surplus"), st.none()),
        st.tuples(st.just("take back"), st.integers(1, 12)),
        st.tuples(st.just("shrink"), st.none()),
        st.tuples(st.just("copy"), st.none()),
    ),
    max_size=25,
)


class Model:
    """A window, and its expected content as plain tensors; `sealed` are the blocks that left it."""

    def __init__(self, window: WindowBuffer, sink_tokens: int) -> None:
        self.window = window
        self.sink_tokens = sink_tokens
        self.keys, self.values = numbered(0, 0, 2)
        self.sealed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.appended = 0

    @property
    def sink(self) -> int:
        return min(self.sink_tokens, self.keys.shape[2])

    def append(self, tokens: int) -> None:
        while tokens:
            count = min(tokens, self.window.room())
            new_keys, new_values = numbered(self.appended, count, self.keys.shape[0])
            self.appended, tokens = self.appended + count, tokens - count
            self.window.append(new_keys, new_values)
            self.keys = torch.cat([self.keys, new_keys], 2)
            self.values = torch.cat([self.values, new_values], 2)
            self.seal_surplus()

    def seal_surplus(self) -> None:
        while self.window.has_block_to_seal:
            first, end = self.sink, self.sink + BLOCK
            keys, values = (tensor.clone() for tensor in self.window.oldest_block())
            assert torch.equal(keys, self.keys[:, :, first:end])
            assert torch.equal(values, self.values[:, :, first:end])
            self.window.drop_oldest_block()
            self.sealed.append((keys, values))
            self.keys = torch.cat([self.keys[:, :, :first], self.keys[:, :, end:]], 2)
            self.values = torch.cat([self.values[:, :, :first], self.values[:, :, end:]], 2)
            assert self.window.held_tokens > self.window.window_tokens

    def release_surplus(self) -> None:
        self.seal_surplus()
        self.window.release_surplus()
        most = self.sink_tokens + ring_tokens(self.window.window_tokens, BLOCK)
        assert self.window.nbytes <= self.window.geometry.nbytes(most)

    def take_back(self, blocks: int) -> None:
        while blocks and self.sealed and self.window.takes_block_back:
            keys, values = self.sealed.pop()
            self.window.prepend_block(keys, values)
            self.keys = torch.cat([self.keys[:, :, : self.sink], keys, self.keys[:, :, self.sink :]], 2)
            self.values = torch.cat([self.values[:, :, : self.sink], values, self.values[:, :, self.sink :]], 2)
            assert not self.window.has_block_to_seal
            blocks -= 1

    def crop(self, tokens: int) -> None:
        tokens = min(tokens, self.window.held_tokens if self.sealed else self.window.tokens)
        self.window.crop(tokens)
        keep = self.keys.shape[2] - tokens
        self.keys, self.values = self.keys[:, :, :keep], self.values[:, :, :keep]

    def select_rows(self, choice: list[int]) -> None:
        rows = torch.tensor([row % self.keys.shape[0] for row in choice])
        self.window.become(self.window.with_rows(rows.numpy()))
        self.keys, self.values = self.keys[rows], self.values[rows]
        self.sealed = [(keys[rows], values[rows]) for keys, values in self.sealed]

    def copy(self) -> None:
        old = self.window
        self.window = old.copy()
        old.free()

    def check(self) -> None:
        window, sink, tokens = self.window, self.sink, self.keys.shape[2]
        assert window.tokens == tokens and window.sink_held == sink
        total = len(self.sealed) * BLOCK + tokens
        out_keys = torch.full((self.keys.shape[0], 1, total, 3), torch.nan)
        out_values = torch.full((self.keys.shape[0], 2, total, 1), torch.nan)
        window.copy_to(out_keys, out_values, end=total)
        held = total - window.held_tokens
        assert torch.equal(out_keys[:, :, :sink], self.keys[:, :, :sink])
        assert torch.equal(out_keys[:, :, held:], self.keys[:, :, sink:])
        assert torch.equal(out_values[:, :, held:], self.values[:, :, sink:])
        assert out_keys[:, :, sink:held].isnan().all(), "wrote where blocks belong"
        picked = torch.arange(-sink, window.held_tokens).flip(0)
        assert torch.equal(window.select_tokens(picked)[0], self.keys.flip(2))
        for keys, values, start in window.splits(len(self.sealed) * BLOCK):
            place = slice(start, start + keys.shape[2])
            assert torch.equal(keys, out_keys[:, :, place]) and torch.equal(values, out_values[:, :, place])
            out_keys[:, :, place] = torch.nan
        assert out_keys.isnan().all(), "a part is missing"
        if not self.sealed:
            assert torch.equal(window.views()[0], self.keys) and torch.equal(window.views()[1], self.values)


@settings(deadline=None)
@given(STEPS, st.sampled_from([16, 17, 32, 40]), st.sampled_from([0, 5, 16]))
def test_against_concatenation(steps: list[tuple[str, Any]], window_tokens: int, sink_tokens: int) -> None:
    metrics = Metrics()
    model = Model(make_window(metrics, window_tokens, sink_tokens), sink_tokens)
    calls = {
        "append": model.append,
        "crop": model.crop,
        "rows": model.select_rows,
        "resize": lambda window_tokens: model.window.resize(window_tokens),
        "release surplus": lambda _: model.release_surplus(),
        "take back": model.take_back,
        "shrink": lambda _: model.window.shrink(),
        "copy": lambda _: model.copy(),
    }
    for name, argument in steps:
        calls[name](argument)
        model.check()
        assert metrics.l0_bytes == model.window.nbytes
    model.window.free()
    assert metrics.l0_bytes == 0


def test_memory_grows_with_the_tokens() -> None:
    metrics = Metrics()
    window = make_window(metrics, 4096, 0)
    window.append(*numbered(0, 20, 2))
    per_token = 2 * (3 + 2) * 4
    assert metrics.l0_bytes <= 48 * per_token + 512, "a short context does not pay for the whole window"
    window.free()


def test_smaller_window_gives_memory_back_and_a_larger_one_takes_blocks_back() -> None:
    metrics = Metrics()
    model = Model(make_window(metrics, 1024, 4), 4)
    model.append(1000)
    large = metrics.l0_bytes
    model.window.resize(64)
    assert model.window.has_block_to_seal and model.window.room() == 0
    model.window.release_surplus()
    assert metrics.l0_bytes == large, "what is held does not fit into less yet"
    model.seal_surplus()
    model.window.release_surplus()
    assert metrics.l0_bytes == model.window.geometry.nbytes(4 + 64 + 2 * BLOCK)
    model.check()
    assert not model.window.takes_block_back
    model.window.resize(1024)
    assert model.window.takes_block_back
    model.take_back(100)
    assert not model.sealed and model.window.tokens == 1000
    model.check()
    model.window.free()


def test_no_memory_for_a_larger_ring_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(make_window(Metrics(), 64, 0), 0)
    model.append(200)
    model.window.resize(256)

    def full(self: LateEngine, nbytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(LateEngine, "_allocate", full)
        with pytest.raises(torch.OutOfMemoryError):
            for keys, values in reversed(model.sealed):
                model.window.prepend_block(keys, values)
                model.sealed.pop()
                model.keys = torch.cat([keys, model.keys], 2)
                model.values = torch.cat([values, model.values], 2)
        model.check()
    model.take_back(100)
    model.check()
    model.window.free()
