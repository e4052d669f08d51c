"""Ctrl-C at random moments: real signals, anywhere in the package or in the model.

After an interrupt the cache either goes on as if nothing had happened, or raises one of the package's errors; then
`crop(0)` or `reset()` makes it usable again. A wrong result, or any other error, fails the test. CI sends few
signals; `HF_TIERED_INTERRUPTS=500` sends more.
"""

from __future__ import annotations

import copy
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from hf_tiered_cache import TieredCache, TieredCacheError
from hf_tiered_cache.integration.passes import ForwardPasses

from ..models import CACHE_NAME, generate, prompt_ids, tiny_llama

SIGNALS = int(os.environ.get("HF_TIERED_INTERRUPTS", "60"))
ROWS = 2
TOKENS = 260
TOLERANCE = 1e-4
BLOCK_BYTES = ROWS * 2 * 2 * 16 * 16 * 4  # K and V, two heads of 16, 16 tokens of float32
# Small tiers, so that every tier has blocks, and blocks move all the time.
SMALL = {
    "window_tokens": 32,
    "block_tokens": 16,
    "host_capacity": 6 * BLOCK_BYTES,
    "l1_capacity": 10 * BLOCK_BYTES,
    "resident_capacity": 4 * BLOCK_BYTES,
    "stream_buffer_size": 2 * BLOCK_BYTES,
    "eviction": "random",
    "protection_steps": 0,
}


class CtrlC:
    """Sends one SIGINT at a random moment within some phase of the program, and records where it arrived."""

    def __init__(self) -> None:
        self.struck: str | None = None
        self._phase = "outside"
        self._usual_seconds: dict[str, float] = {}
        self._aim: tuple[str, float] | None = None
        self._passes: ForwardPasses | None = None
        self._skip = 0
        self._armed = False
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None

    def aim_at(self, phase: str, chance: random.Random, cache: TieredCache) -> None:
        """Prepare a signal for one of the next times that the program is in this phase."""
        self._passes = cache._binding.passes
        self._aim = (phase, chance.random() * self._usual_seconds.get(phase, 0.005))
        self._skip = chance.randrange(3) if phase == "pass" else 0
        self.struck = None

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A context in which the program is in this phase."""
        began = time.perf_counter()
        if self._aim is not None and self._aim[0] == phase:
            if self._skip:
                self._skip -= 1
            else:
                self._arm(self._aim[1])
                self._aim = None
        self._phase = phase
        yield
        self._phase = "outside"
        self._usual_seconds.setdefault(phase, time.perf_counter() - began)

    def _arm(self, delay_seconds: float) -> None:
        self._armed = True
        self._cancelled = cancelled = threading.Event()

        def strike() -> None:
            if not cancelled.wait(delay_seconds):
                os.kill(os.getpid(), signal.SIGINT)

        self._thread = threading.Thread(target=strike)
        self._thread.start()

    def disarm(self) -> None:
        """Send no signal any more."""
        self._armed, self._aim, self._phase = False, None, "outside"
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal: raise if it was armed."""
        if self._armed:
            self._armed = False
            running = self._passes._pass if self._passes is not None else None
            layers = tiny_llama().config.num_hidden_layers
            between = running is not None and bool(running.before) and len(running.updated) < layers
            self.struck = f"{self._phase}, between updates" if between else self._phase
            raise KeyboardInterrupt


@pytest.fixture
def ctrl_c() -> Iterator[CtrlC]:
    sender = CtrlC()
    before = signal.signal(signal.SIGINT, sender.handle)
    yield sender
    sender.disarm()
    signal.signal(signal.SIGINT, before)


class Conversation:
    """A model, a cache that it fills, and two rows of tokens; the model without a cache is the reference."""

    def __init__(self, form: str, directory: Path, ctrl_c: CtrlC) -> None:
        self.model = copy.deepcopy(tiny_llama())
        self.ids = prompt_ids(TOKENS, batch=ROWS)
        self._ctrl_c = ctrl_c
        options = SMALL | {"l2_url": str(directory)}
        self.cache = (
            TieredCache.for_model(self.model, **options)
            if form == "streaming"
            else TieredCache(config=self.model.config, **options)
        )

    @torch.no_grad()
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Feed some tokens and return the logits of the last one."""
        with self._ctrl_c.during("pass" if self.cache.get_seq_length() else "prefill"):
            logits: torch.Tensor = self.model(ids, **{CACHE_NAME: self.cache}).logits[:, -1]
        return logits

    def run(self) -> None:
        """Run prefill, steps, a crop into sealed blocks, a longer pass, a reorder, a step."""
        for end in (90, 170, 171, 172, 173):
            self.forward(self.ids[:, self.cache.get_seq_length() : end])
        with self._ctrl_c.during("crop"):
            self.cache.crop(-60)
        self.forward(self.ids[:, 113:150])
        with self._ctrl_c.during("reorder"):
            self.cache.reorder_cache(torch.tensor([1, 0]))
        self.forward(self.ids[[1, 0], 150:151])

    @torch.no_grad()
    def probe(self) -> None:
        """Feed seven more tokens, and fail unless the answer is right for the tokens that the cache reports. The
        order of the rows is open only after an interrupted reorder."""
        held, more = self.cache.get_seq_length(), prompt_ids(7).expand(ROWS, -1)
        answer = self.forward(more)
        expected = self.model(torch.cat([self.ids[:, :held], more], dim=1), use_cache=False).logits[:, -1]
        error = min(float((answer - expected[order]).abs().max()) for order in ([0, 1], [1, 0]))
        assert error < TOLERANCE, f"silently wrong with {held} tokens, by {error:.2g}"

    def recover(self, remedy: str) -> str:
        """Go on after an interrupt and return the outcome; fail on a wrong result or an unexpected error."""
        try:
            if remedy == "crop(0)":
                self.cache.crop(0)
            self.probe()
            return f"right after {remedy}"
        except TieredCacheError:
            self.cache.reset()
            assert self.cache.get_seq_length() == 0
            self.probe()
            return f"refused after {remedy}, right after reset()"


def interrupt(
    form: str, aim: str, remedy: str, directory: Path, ctrl_c: CtrlC, chance: random.Random
) -> str | None:
    """Interrupt a conversation; return the place and the outcome, or `None` if the signal came too late."""
    conversation = Conversation(form, directory, ctrl_c)
    with conversation.cache:
        try:
            ctrl_c.aim_at(aim, chance, conversation.cache)
            conversation.run()
            ctrl_c.disarm()
            return None
        except KeyboardInterrupt:
            ctrl_c.disarm()
        return f"{ctrl_c.struck}: {conversation.recover(remedy)}"


# Python itself reports an interrupt in a weak reference's callback, or while a file is open.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def swept(cache_directory: Path) -> Iterator[None]:
    """Remove locks without a directory: an interrupt between the two may leave one, which a later start sweeps."""
    yield
    for lock in cache_directory.glob("*.lock"):
        if not lock.with_suffix("").exists():
            lock.unlink()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("form", ["gather", "streaming"])
def test_interrupts(form: str, tmp_path: Path, ctrl_c: CtrlC) -> None:
    chance, outcomes = random.Random(form), Counter[str]()
    while outcomes.total() < SIGNALS // 2:
        aim = chance.choices(["pass", "prefill", "crop", "reorder"], [5, 2, 1, 1])[0]
        remedy = chance.choice(["nothing", "crop(0)"])
        outcome = interrupt(form, aim, remedy, tmp_path, ctrl_c, chance)
        if outcome is not None:
            outcomes[outcome] += 1
    counts = "\n".join(f"{times:6} {outcome}" for outcome, times in sorted(outcomes.items()))
    sys.stdout.write(f"\n{form}:\n{counts}\n")
    assert sum(times for outcome, times in outcomes.items() if "between updates" in outcome) >= SIGNALS // 8


def test_control_without_the_check(tmp_path: Path, ctrl_c: CtrlC, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check that passes are complete, going on gives a wrong result, or fails somewhere inside."""
    monkeypatch.setattr(ForwardPasses, "check", lambda self, layers: None)
    chance = random.Random(0)
    with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)) as error:
        for _ in range(100):
            interrupt("streaming", "pass", "nothing", tmp_path, ctrl_c, chance)
    assert not isinstance(error.value, TieredCacheError)


class Shown(BaseStreamer):
    """The ids that a user has seen."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Record the prompt, then each token."""
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        """Do nothing at the end."""


@pytest.mark.parametrize("form", ["gather", "streaming"])
def test_what_was_shown_can_be_continued(form: str, tmp_path: Path, ctrl_c: CtrlC) -> None:
    """The ids that an interrupted generation has shown are a prefix of the right ones, and can be continued."""
    chance, interrupted = random.Random(form), 0
    expected, _ = generate(tiny_llama(), prompt_ids(100), DynamicCache(config=tiny_llama().config))
    options = SMALL | {"l2_url": str(tmp_path), "host_capacity": 0, "resident_capacity": 0}
    for _ in range(max(4, SIGNALS // 10)):
        model, shown = copy.deepcopy(tiny_llama()), Shown()
        cache = (
            TieredCache.for_model(model, **options)
            if form == "streaming"
            else TieredCache(config=model.config, **options)
        )
        with cache:
            try:
                ctrl_c.aim_at("generate", chance, cache)
                with ctrl_c.during("generate"):
                    generate(model, prompt_ids(100), cache, streamer=shown)
                ctrl_c.disarm()
            except KeyboardInterrupt:
                ctrl_c.disarm()
                interrupted += 1
            seen = torch.tensor([shown.ids or prompt_ids(100).flatten().tolist()])
            assert torch.equal(seen, expected[:, : seen.shape[1]])
            try:
                cache.crop(0)
            except TieredCacheError:
                cache.reset()
            rest = expected.shape[1] - seen.shape[1]
            if rest:
                tokens, _ = generate(model, seen, cache, max_new_tokens=rest)
                assert torch.equal(tokens, expected)
    assert interrupted
