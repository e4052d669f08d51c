"""The ring of newest tokens, against plain concatenation."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_tiered_cache.metrics import Metrics
from hf_tiered_cache.window import Geometry, WindowBuffer

from ..fakes import LateEngine

BLOCK = 16


def make_window(metrics: Metrics, window_tokens: int, sink_tokens: int) -> WindowBuffer:
    engine = LateEngine(torch.device("cpu"), metrics)
    return WindowBuffer(engine, Geometry(2, 1, 3, 2, 1, torch.float32), sink_tokens, window_tokens, BLOCK)


def numbered(first: int, count: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens whose content is their number and batch row."""
    token = torch.arange(first, first + count, dtype=torch.float32).view(1, 1, count, 1)
    row = torch.arange(batch, dtype=torch.float32).view(batch, 1, 1, 1) / 8
    return (token + row).expand(batch, 1, count, 3), -(token + row).expand(batch, 2, count, 1)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 200)),
        st.tuples(st.just("crop"), st.integers(0, 80)),
        st.tuples(st.just("rows"), st.lists(st.integers(0, 9), min_size=1, max_size=3)),
        st.tuples(st.just("shrink"), st.none()),
        st.tuples(st.just("copy"), st.none()),
    ),
    max_size=25,
)


@settings(deadline=None)
@given(STEPS, st.sampled_from([16, 17, 32, 40]), st.sampled_from([0, 5, 16]))
def test_against_concatenation(steps: list[tuple[str, object]], window_tokens: int, sink_tokens: int) -> None:
    metrics = Metrics()
    window = make_window(metrics, window_tokens, sink_tokens)
    keys, values = numbered(0, 0, 2)
    sealed = number = 0

    def check() -> None:
        assert window.tokens == keys.shape[2]
        total = sealed * BLOCK + window.tokens
        out_keys = torch.full((keys.shape[0], 1, total, 3), torch.nan)
        out_values = torch.full((keys.shape[0], 2, total, 1), torch.nan)
        window.copy_to(out_keys, out_values, end=total)
        sink = window.sink_held
        assert torch.equal(out_keys[:, :, :sink], keys[:, :, :sink])
        assert torch.equal(out_keys[:, :, total - window.held_tokens :], keys[:, :, sink:])
        assert torch.equal(out_values[:, :, total - window.held_tokens :], values[:, :, sink:])
        assert out_keys[:, :, sink : total - window.held_tokens].isnan().all(), "wrote where blocks belong"
        picked = torch.arange(-sink, window.held_tokens).flip(0)
        assert torch.equal(window.select_tokens(picked)[0], keys.flip(2))
        if sealed == 0:
            assert torch.equal(window.views()[0], keys) and torch.equal(window.views()[1], values)

    for name, argument in steps:
        if name == "append":
            assert isinstance(argument, int)
            left = argument
            while left:
                count = min(left, window.room())
                new_keys, new_values = numbered(number, count, keys.shape[0])
                number, left = number + count, left - count
                window.append(new_keys, new_values)
                keys, values = torch.cat([keys, new_keys], 2), torch.cat([values, new_values], 2)
                while window.has_block_to_seal:
                    sink = window.sink_held
                    assert torch.equal(window.oldest_block()[0], keys[:, :, sink : sink + BLOCK])
                    window.drop_oldest_block()
                    sealed += 1
                    keys = torch.cat([keys[:, :, :sink], keys[:, :, sink + BLOCK :]], 2)
                    values = torch.cat([values[:, :, :sink], values[:, :, sink + BLOCK :]], 2)
                    assert window.held_tokens > window_tokens
        elif name == "crop":
            assert isinstance(argument, int)
            held = window.held_tokens if sealed else window.tokens
            window.crop(min(argument, held))
            keep = keys.shape[2] - min(argument, held)
            keys, values = keys[:, :, :keep], values[:, :, :keep]
        elif name == "rows":
            assert isinstance(argument, list)
            rows = torch.tensor([row % keys.shape[0] for row in argument])
            window.select_rows(rows.numpy())
            keys, values = keys[rows], values[rows]
        elif name == "shrink":
            window.shrink()
        else:
            old = window
            window = window.copy()
            old.free()
        check()
    window.free()
    assert metrics.l0_bytes == 0


def test_memory_grows_with_the_tokens() -> None:
    metrics = Metrics()
    window = make_window(metrics, 4096, 0)
    window.append(*numbered(0, 20, 2))
    per_token = 2 * (3 + 2) * 4
    assert metrics.l0_bytes <= 48 * per_token + 512, "a short context does not pay for the whole window"
    window.free()
