"""Threads that cannot fail silently, and tokens that identify their writer."""

from __future__ import annotations

import functools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_tiered_cache import KVCacheManager, TieredCacheConfig

from ..fakes import LateEngine

STALL_SECONDS = 30.0

BLOCK_TOKENS = 16
SETTINGS = {"window_tokens": 32, "block_tokens": BLOCK_TOKENS, "host_capacity": 0}
SHAPES = ((2, 8), (2, 4))
QUERY_HEADS = 4
Layer = tuple[torch.Tensor, torch.Tensor]


class Crew:
    """Watched threads: `join` raises what any of them raised, and all stacks if one makes no progress.

    Args:
        story: returns what to add to error messages.
    """

    left_hanging = False

    def __init__(self, story: Callable[[], str] = lambda: "") -> None:
        self.stop = threading.Event()
        self._story = story
        self._threads: list[threading.Thread] = []
        self._progress: dict[threading.Thread, float] = {}
        self._errors: list[tuple[str, BaseException]] = []

    def start(self, target: Callable[..., object], *arguments: object) -> threading.Thread:
        """Run a function in a new thread."""
        name = f"crew-{len(self._threads)}"
        thread = threading.Thread(target=self._run, args=(target, arguments), name=name, daemon=True)
        self._threads.append(thread)
        self._progress[thread] = time.monotonic()
        thread.start()
        return thread

    def loop(self, step: Callable[[], object]) -> None:
        """Repeat a step in a thread of the crew until it must stop; each step counts as progress."""
        while not self.stop.is_set():
            step()
            self._progress[threading.current_thread()] = time.monotonic()

    def join(self, stop_after_seconds: float | None = None) -> None:
        """Wait until all threads have ended; stop them after some seconds, or when one has failed."""
        started, hung = time.monotonic(), ""
        while alive := [thread for thread in self._threads if thread.is_alive()]:
            now = time.monotonic()
            if self._errors or (stop_after_seconds is not None and now > started + stop_after_seconds):
                self.stop.set()
            stuck = [thread.name for thread in alive if now > self._progress[thread] + STALL_SECONDS]
            if stuck:
                hung = f"no progress in {', '.join(stuck)}:\n\n{all_stacks()}"
                Crew.left_hanging = True
                break
            alive[0].join(0.02)
        # Formatted here, not where they were caught: CPython 3.11 parses sources for that, in one thread only.
        errors = [f"in {name}:\n\n{''.join(traceback.format_exception(error))}" for name, error in self._errors]
        if hung or errors:
            raise AssertionError("\n\n".join(filter(None, [*errors, hung, self._story()])))

    def _run(self, target: Callable[..., object], arguments: Sequence[object]) -> None:
        try:
            target(*arguments)
        except BaseException as error:
            self._errors.append((threading.current_thread().name, error))


def all_stacks() -> str:
    """Return the stacks of all threads of the process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def in_threads(*calls: Callable[[], object]) -> None:
    """Run functions in threads at the same time, and wait for all."""
    crew = Crew()
    for call in calls:
        crew.start(call)
    crew.join()


@contextmanager
def opened(base: Path, **options: Any) -> Iterator[KVCacheManager]:
    """Open a manager with late copies and poison, its files below `base`; check that nothing is left."""
    engine = functools.partial(options.pop("engine", LateEngine), max_delay_seconds=0.0005)
    others = set(threading.enumerate())
    config = TieredCacheConfig(**(SETTINGS | {"l1_path": base} | options))
    manager = KVCacheManager(config, engine_factory=engine)
    try:
        yield manager
    finally:
        in_threads(manager.close)
    assert manager.stats().l0_bytes == 0
    assert not [thread for thread in set(threading.enumerate()) - others if thread.name.startswith("hf-tiered")]
    assert list(base.iterdir()) == []


def assert_holds_nothing(manager: KVCacheManager) -> None:
    """Fail if a manager whose requests were all freed still holds something."""
    in_threads(manager.flush)
    tiers = manager.stats().tiers
    left = {name: (tier.blocks, tier.used_bytes) for name, tier in tiers.items()}
    assert all(blocks == 0 for blocks, _ in left.values()), left
    assert all(nbytes == 0 for name, (_, nbytes) in left.items() if name != "L0"), left


# -- tokens ---------------------------------------------------------------------------------------------------

UNIT = 4096  # fractions of it are exact, and small enough that attention does not saturate


def tokens_of(codes: torch.Tensor, swapped: torch.Tensor | None = None) -> Layer:
    """Return K `[2, 2, T, 8]` and V `[2, 2, T, 4]` of tokens that show their codes.

    Args:
        codes: `[T]`, `writer * UNIT + number`.
        swapped: `[T]`, 1 for tokens whose two batch rows are swapped.
    """
    rows = torch.arange(2)[:, None] if swapped is None else torch.arange(2)[:, None] ^ swapped  # [2, T or 1]
    row = rows.expand(2, len(codes))[:, None, :, None]
    results = []
    for heads, dim in SHAPES:
        head, lane = torch.arange(heads)[None, :, None, None], torch.arange(dim)
        results.append(((codes[:, None] * (2 * lane + 3) + 977 * row + 1543 * head + 389 * lane) % UNIT) / UNIT)
    values = results[1]
    for place, shown in enumerate((codes % UNIT, codes // UNIT, row[:, 0, :, 0])):
        values[..., place] = (shown / UNIT).unsqueeze(-2) if shown.ndim == 2 else shown / UNIT
    return results[0], values


def codes_of(found: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes `[T]` of tokens, and which have their rows swapped; fail unless all are intact."""
    shown = (found[1][0, 0] * UNIT).long()
    codes, swapped = shown[:, 1] * UNIT + shown[:, 0], shown[:, 2]
    assert_same(found, tokens_of(codes, swapped))
    return codes, swapped


def codes_from(writer: int, first: int, count: int) -> torch.Tensor:
    """Return the codes of consecutive tokens of one writer."""
    return torch.arange(count) + writer * UNIT + first


def assert_same(found: Layer, expected: Layer) -> None:
    """Fail unless both are bit-equal; the message names the tokens that differ."""
    for name, mine, theirs in zip(("K", "V"), found, expected, strict=True):
        assert mine.shape == theirs.shape, f"{name} is {tuple(mine.shape)}, and should be {tuple(theirs.shape)}"
        if not torch.equal(mine, theirs):
            wrong = (mine != theirs).any(3).any(1).any(0).nonzero().flatten().tolist()
            where = f"{len(wrong)} of {mine.shape[2]} tokens, the first {wrong[:3]}, the last {wrong[-3:]}"
            nan = int(mine.isnan().any(3).any(1).any(0).sum())
            raise AssertionError(f"{name} is wrong in {where}; {nan} of them are NaN, poison that is")


def assert_attention(output: torch.Tensor, query: torch.Tensor, layer: Layer) -> None:
    """Compare `output` `[B, T, Hq, Dv]` with attention in float64 of the newest tokens' queries."""
    count, tokens = query.shape[2], layer[0].shape[2]
    keys, values = (states.double().repeat_interleave(QUERY_HEADS // SHAPES[0][0], 1) for states in layer)
    expected = scaled_dot_product_attention(
        query.double(),
        keys,
        values,
        attn_mask=torch.ones(count, tokens, dtype=torch.bool).tril(tokens - count),
    )
    deviation = (output.transpose(1, 2) - expected).abs().max()
    assert deviation < 1e-5, f"attention of {count} tokens over {tokens} is off by {deviation:.2g}"


def joined(held: Layer | None, new: Layer) -> Layer:
    """Return a layer with more tokens appended."""
    return new if held is None else (torch.cat([held[0], new[0]], 2), torch.cat([held[1], new[1]], 2))
