"""Guarantees for many threads on one manager: several models, forks, closing and freeing during calls."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from hf_tiered_cache import CacheClosedError, ConfigError, KVCacheManager, TieredCache

from ..fakes import FAULTS, eventually, random_kv
from ..models import CACHE_NAME, generate, prompt_ids, tiny_llama
from .crew import (
    BLOCK_TOKENS,
    STALL_SECONDS,
    Crew,
    Layer,
    assert_holds_nothing,
    assert_same,
    codes_from,
    in_threads,
    joined,
    opened,
    tokens_of,
)

# -- 1. independence of threads -------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [20, 300])
def test_views_of_update_last_until_the_threads_own_next_call(tokens: int, tmp_path: Path) -> None:
    """Views stay valid with and without sealed blocks, whatever other threads do to other requests meanwhile."""

    def disturb() -> None:
        for _ in range(6):
            manager.update("b", 0, *random_kv(17))
            manager.attend("b", 0, torch.randn(1, 4, 1, 8), *random_kv(1))

    with opened(tmp_path) as manager:
        manager.allocate("a")
        manager.allocate("b")
        held, new = random_kv(tokens), random_kv(1)
        manager.append("a", 0, *held)
        found = manager.update("a", 0, *new)
        in_threads(disturb)
        assert_same(found, joined(held, new))


def test_requests_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """While one thread waits for stuck storage, others use requests whose blocks can be read."""
    with opened(tmp_path, l1_tier="faulty", staging_blocks=2) as manager:
        for request_id in ("stuck", "a"):
            manager.allocate(request_id)
        held = random_kv(200)
        manager.append("a", 0, *held)
        manager.flush()
        written = FAULTS.writes
        FAULTS.gate = threading.Event()
        crew = Crew()
        stuck = crew.start(manager.append, "stuck", 0, *random_kv(300))
        try:
            assert eventually(lambda: FAULTS.writes > written)
            time.sleep(0.1)

            def others() -> None:
                new, more = random_kv(1), random_kv(1)
                assert_same(manager.update("a", 0, *new), joined(held, new))
                manager.attend("a", 0, torch.randn(1, 4, 1, 8), *more)
                assert_same(manager.fetch("a", 0, range(200)), held)
                manager.prefetch("a", [0, 50])
                manager.fork("a", "b")
                manager.append("b", 1, *random_kv(20))
                manager.crop("b", 0, 40)
                manager.select_rows("b", 0, [0, 0])
                manager.free("b")
                assert manager.stats().sequence_tokens >= 200

            in_threads(others)
            assert stuck.is_alive(), "its append needs more staging buffers than there are"
        finally:
            FAULTS.gate.set()
            crew.join()
        assert manager.tokens("stuck", 0) == 300


def test_calls_while_the_tiers_are_being_opened(tmp_path: Path) -> None:
    """The first blocks of several threads leave their windows at the same moment, while others add tokens."""
    storing, adding = 3, 3

    def store(number: int) -> None:
        held, new = random_kv(50), random_kv(1)
        together.wait(STALL_SECONDS)
        manager.append(number, 0, *held)
        manager.attend(number, 1, torch.randn(1, 4, 1, 8), *new)
        assert_same(manager.update(number, 0, *new), joined(held, new))
        crew.stop.set()

    def add(number: int) -> None:
        manager.append(number, 0, *random_kv(1))
        manager.crop(number, 0, 1)
        manager.stats()

    for attempt in range(8):
        together = threading.Barrier(storing)
        base = tmp_path / str(attempt)
        base.mkdir()
        with opened(base, l1_capacity=5 * 4096, l2_url=base) as manager:
            crew = Crew()
            for number in range(storing + adding):
                manager.allocate(number)
            for number in range(storing, storing + adding):
                crew.start(crew.loop, functools.partial(add, number))
            for number in range(storing):
                crew.start(store, number)
            crew.join()


@pytest.mark.parametrize("asked", ["tokens", "stats"])
def test_no_block_is_counted_twice(asked: str, tmp_path: Path) -> None:
    """While a block moves from the window to the table, the number of tokens does not change."""
    appended = 0

    def grow() -> None:
        nonlocal appended
        while appended < 600:
            appended += 1
            manager.append("a", 0, *random_kv(1))
        crew.stop.set()

    def watch() -> None:
        least = appended - 1  # one call may be under way
        tokens = manager.tokens("a", 0) if asked == "tokens" else manager.stats().sequence_tokens
        most = appended
        assert least <= tokens <= most, f"{tokens} tokens, when {least} to {most} were appended"

    with opened(tmp_path) as manager:
        manager.allocate("a")
        crew = Crew()
        crew.start(grow)
        crew.start(crew.loop, watch)
        crew.join()


def test_waiting_for_a_request_is_counted(tmp_path: Path) -> None:
    with opened(tmp_path, l1_tier="faulty", staging_blocks=2) as manager:
        manager.allocate("a")
        assert manager.stats().lock_wait_seconds < 0.2
        FAULTS.gate = threading.Event()
        crew = Crew()
        crew.start(manager.append, "a", 0, *random_kv(300))
        try:
            assert eventually(lambda: FAULTS.writes > 0)
            time.sleep(0.1)
            crew.start(manager.crop, "a", 0, 1)
            time.sleep(0.4)
        finally:
            FAULTS.gate.set()
            crew.join()
        assert manager.tokens("a", 0) == 299
        assert manager.stats().lock_wait_seconds > 0.3


# -- 2. several models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("forms", [("sdpa",) * 4, ("tiered",) * 4, ("sdpa", "tiered") * 2], ids="/".join)
def test_models_share_a_manager(forms: Sequence[str], tmp_path: Path) -> None:
    """Several models generate, each with its own cache, as if alone."""
    prompts = [prompt_ids(80 + 13 * number, 1 + number % 2) for number in range(len(forms))]
    models = [copy.deepcopy(tiny_llama()) for _ in forms]
    expected = [
        generate(model, ids, DynamicCache(config=model.config), max_new_tokens=6)
        for model, ids in zip(models, prompts, strict=True)
    ]

    def cache_for(form: str, model: LlamaForCausalLM) -> TieredCache:
        if form == "tiered":
            return TieredCache.for_model(model, manager=manager)
        return TieredCache(model.config, manager=manager)

    def run(form: str, model: LlamaForCausalLM, ids: torch.Tensor, wanted: Layer) -> None:
        for _ in range(3):
            with cache_for(form, model) as cache:
                tokens, logits = generate(model, ids, cache, max_new_tokens=6)
            assert torch.equal(tokens, wanted[0])
            if form == "tiered":
                assert (logits - wanted[1]).abs().max() < 1e-5
            else:
                assert torch.equal(logits, wanted[1])

    with opened(tmp_path, l1_capacity=20 * 4096, l2_url=tmp_path) as manager:
        in_threads(*(functools.partial(run, *each) for each in zip(forms, models, prompts, expected, strict=True)))
        assert manager.stats().blocks_sealed > 100
        assert_holds_nothing(manager)


# -- 3. forks -------------------------------------------------------------------------------------------------


def test_fork_while_the_source_grows(tmp_path: Path) -> None:
    """A fork has the tokens of one moment, in all layers, and shares the blocks that were sealed then."""
    layers, rounds, twins_each = 3, 60, 6
    ends = [0, *itertools.accumulate(random.Random(0).choice((1, 1, 7, 16, 17)) for _ in range(rounds))]
    codes = codes_from(1, 0, ends[-1])
    twins: dict[str, list[int]] = {}

    def grow() -> None:
        for start, end in itertools.pairwise(ends):
            for layer_id in range(layers):
                manager.append("source", layer_id, *tokens_of(codes[start:end]))

    def fork(number: int) -> None:
        for twin in range(twins_each):
            name = f"twin-{number}-{twin}"
            manager.fork("source", name)
            tokens = [manager.tokens(name, layer_id) for layer_id in range(layers)]
            done = [ends.index(count) for count in tokens]  # appends that it has of each layer
            assert done[0] >= done[1] >= done[2] >= done[0] - 1, "layers are of different moments"
            for layer_id, count in enumerate(tokens):
                if count:
                    assert_same(manager.fetch(name, layer_id, range(count)), tokens_of(codes[:count]))
            if twin % 2:
                manager.append(name, 0, *tokens_of(codes_from(2, 0, 70)))
            twins[name] = tokens
            time.sleep(0.005)

    with opened(tmp_path) as manager:
        manager.allocate("source")
        in_threads(grow, functools.partial(fork, 0), functools.partial(fork, 1))
        manager.flush()
        stats = manager.stats()
        assert stats.tiers["L1"].blocks == stats.blocks_sealed, "each block is there once, whoever uses it"
        manager.free("source")
        for name, tokens in twins.items():
            for layer_id, count in enumerate(tokens):
                if count:
                    assert_same(manager.fetch(name, layer_id, range(count)), tokens_of(codes[:count]))
            manager.free(name)
        assert_holds_nothing(manager)


def test_branches_of_one_conversation_generate_at_the_same_time(tmp_path: Path) -> None:
    """Several threads make deep copies at once, then generate together with the original."""
    models = [copy.deepcopy(tiny_llama()) for _ in range(4)]
    prompt = prompt_ids(150)
    questions = [torch.cat([prompt, prompt_ids(5 + number)], 1) for number in range(4)]
    stock = DynamicCache(config=models[0].config)
    with torch.no_grad():
        models[0](prompt, **{CACHE_NAME: stock})
    expected = [generate(model, ids, copy.deepcopy(stock)) for model, ids in zip(models, questions, strict=True)]
    copied = threading.Barrier(len(models))

    def run(number: int) -> None:
        branch = cache if number == 0 else copy.deepcopy(cache)
        copied.wait(STALL_SECONDS)
        tokens, logits = generate(models[number], questions[number], branch)
        assert torch.equal(tokens, expected[number][0]) and torch.equal(logits, expected[number][1])
        branch.close()

    with opened(tmp_path, l1_capacity=20 * 4096, l2_url=tmp_path) as manager:
        cache = TieredCache(models[0].config, manager=manager)
        with torch.no_grad():
            models[0](prompt, **{CACHE_NAME: cache})
        sealed = manager.stats().blocks_sealed
        in_threads(*(functools.partial(run, number) for number in range(len(models))))
        assert sealed and manager.stats().blocks_sealed - sealed < 4 * sealed, "the prompt's blocks are shared"
        assert_holds_nothing(manager)


# -- 4. close -------------------------------------------------------------------------------------------------


def append_on(manager: KVCacheManager, name: str) -> None:
    manager.append(name, 0, *random_kv(40))
    manager.crop(name, 0, 24)


def update_on(manager: KVCacheManager, name: str) -> None:
    for layer_id in range(2):
        manager.update(name, layer_id, *random_kv(random.choice((1, 17))))


def attend_on(manager: KVCacheManager, name: str) -> None:
    for layer_id in range(2):
        manager.attend(name, layer_id, torch.randn(1, 4, 3, 8), *random_kv(3))


def anything_on(manager: KVCacheManager, name: str) -> None:
    twin = f"{name}-{threading.get_ident()}-twin"
    manager.append(name, 0, *random_kv(20))
    manager.evict(name)
    manager.fork(name, twin)
    manager.prefetch(twin, [0, 10])
    manager.fetch(twin, 0, [3, 15])
    manager.select_rows(twin, 0, [0, 0])
    manager.free_layer(twin, 0)
    manager.free(twin)
    manager.stats()
    manager.flush()


def all_calls(manager: KVCacheManager, name: str) -> dict[str, Callable[[], object]]:
    """Return every call of a manager, on one request or on all."""
    query, kv = torch.randn(1, 4, 1, 8), random_kv(1)
    return {
        "append": lambda: manager.append(name, 0, *kv),
        "update": lambda: manager.update(name, 0, *kv),
        "attend": lambda: manager.attend(name, 0, query, *kv),
        "fetch": lambda: manager.fetch(name, 0, [0]),
        "prefetch": lambda: manager.prefetch(name, [0]),
        "evict": lambda: manager.evict(name),
        "crop": lambda: manager.crop(name, 0, 1),
        "select_rows": lambda: manager.select_rows(name, 0, [0]),
        "fork": lambda: manager.fork(name, "new"),
        "fork_layer": lambda: manager.fork_layer(name, 0, 7),
        "free_layer": lambda: manager.free_layer(name, 0),
        "tokens": lambda: manager.tokens(name, 0),
        "batch_size": lambda: manager.batch_size(name, 0),
        "overflows": lambda: manager.overflows(name, 0, 1),
        "free": lambda: manager.free(name),
        "allocate": lambda: manager.allocate("new"),
        "flush": lambda: manager.flush(),
    }


def what_they_raise(calls: dict[str, Callable[[], object]]) -> dict[str, str]:
    raised = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            raised[name] = type(error).__name__
        else:
            raised[name] = "nothing"
    return raised


@pytest.mark.parametrize("delay_seconds", [0.0, 0.01])
@pytest.mark.parametrize("after_seconds", [0.0, 0.05, 0.3])
def test_close_while_others_call(after_seconds: float, delay_seconds: float, tmp_path: Path) -> None:
    FAULTS.delay_seconds = delay_seconds
    calling = threading.Barrier(5)

    def use(name: str, action: Callable[[KVCacheManager, str], None]) -> None:
        calling.wait(STALL_SECONDS)
        with suppress(CacheClosedError):
            while True:
                action(manager, name)

    with opened(tmp_path, l1_tier="faulty", l1_capacity=9 * 4096, l2_url=tmp_path, staging_blocks=2) as manager:
        crew = Crew()
        for action in (append_on, update_on, attend_on, anything_on):
            manager.allocate(action.__name__)
            manager.append(action.__name__, 0, *random_kv(100))
            crew.start(use, action.__name__, action)
        calling.wait(STALL_SECONDS)
        time.sleep(after_seconds)
        started = time.monotonic()
        in_threads(manager.close, manager.close)
        assert time.monotonic() - started < 10
        crew.join()
        assert manager.closed


def test_close_waits_for_a_call_that_runs(tmp_path: Path) -> None:
    """A call in the middle of its work finishes it before `close` returns."""
    FAULTS.gate = threading.Event()
    ends: list[str] = []

    def append() -> None:
        manager.append("a", 0, *random_kv(300))
        ends.append("append")

    def close() -> None:
        manager.close()
        ends.append("close")

    with opened(tmp_path, l1_tier="faulty", staging_blocks=2) as manager:
        manager.allocate("a")
        crew = Crew()
        crew.start(append)
        try:
            assert eventually(lambda: FAULTS.writes > 0)
            time.sleep(0.05)
            crew.start(close)
            time.sleep(0.2)
            assert ends == [], "the append waits for a staging buffer, and so does the end"
        finally:
            FAULTS.gate.set()
            crew.join()
        assert ends == ["append", "close"]


def test_every_call_on_a_closed_manager_says_so(tmp_path: Path) -> None:
    with opened(tmp_path) as manager:
        manager.allocate("a")
        manager.append("a", 0, *random_kv(100))
        manager.close()
        calls = all_calls(manager, "a")
        assert what_they_raise(calls) == dict.fromkeys(calls, "CacheClosedError")


# -- 5. free --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay_seconds", [0.0, 0.003])
def test_free_while_others_use_it(delay_seconds: float, tmp_path: Path) -> None:
    """Other threads get `ConfigError`, whatever they were about to do, and do not bring the request back."""
    FAULTS.delay_seconds = delay_seconds

    def use(name: str, action: Callable[[KVCacheManager, str], None]) -> None:
        with suppress(ConfigError):
            while True:
                action(manager, name)
        with pytest.raises(ConfigError, match="no request"):
            manager.append(name, 0, *random_kv(1))

    with opened(tmp_path, l1_tier="faulty", l1_capacity=9 * 4096, l2_url=tmp_path, staging_blocks=2) as manager:
        for attempt in range(6):
            name = f"request-{attempt}"
            manager.allocate(name)
            manager.append(name, 0, *random_kv(120))
            manager.append(name, 1, *random_kv(120))
            crew = Crew()
            for action in (append_on, update_on, attend_on, anything_on):
                crew.start(use, name, action)
            time.sleep(0.02 * attempt)
            in_threads(functools.partial(manager.free, name))
            crew.join()
        calls = all_calls(manager, name)
        del calls["allocate"], calls["flush"]
        assert what_they_raise(calls) == dict.fromkeys(calls, "ConfigError")
        assert_holds_nothing(manager)


def test_only_one_free_succeeds(tmp_path: Path) -> None:
    freed: list[str] = []

    def free(name: str) -> None:
        together.wait(STALL_SECONDS)
        with suppress(ConfigError):
            manager.free(name)
            freed.append(name)

    with opened(tmp_path) as manager:
        for attempt in range(10):
            together = threading.Barrier(4)
            manager.allocate(f"request-{attempt}")
            manager.append(f"request-{attempt}", 0, *random_kv(100))
            in_threads(*[functools.partial(free, f"request-{attempt}")] * 4)
        assert sorted(freed) == [f"request-{attempt}" for attempt in range(10)]
        assert_holds_nothing(manager)


# -- 6. threads that end --------------------------------------------------------------------------------------


SHORT_LIVED_THREADS = 20


def l0_bytes_of_layer(tokens: int) -> int:
    """Return the bytes of K and V of one layer, as `random_kv` makes them."""
    return 2 * 2 * 8 * 4 * tokens


def test_a_thread_that_ended_keeps_no_buffer(tmp_path: Path) -> None:
    """Threads that end one after the other leave no buffers."""
    held = random_kv(320)

    def update() -> None:
        nonlocal held
        new = random_kv(1)
        found = manager.update("a", 0, *new)
        held = joined(held, new)
        assert_same(found, held)

    with opened(tmp_path, prefetch_layers=1) as manager:
        manager.allocate("a", seq_len=400)
        manager.append("a", 0, *held)
        l0_bytes = []
        for _ in range(SHORT_LIVED_THREADS):
            in_threads(update)
            l0_bytes.append(manager.stats().l0_bytes)
        assert max(l0_bytes[4:]) <= l0_bytes[3] + l0_bytes_of_layer(400), l0_bytes
        manager.free("a")
        assert_holds_nothing(manager)


@pytest.mark.parametrize("next_call", ["update", "append"])
def test_threads_that_ended_together_keep_no_buffers(next_call: str, tmp_path: Path) -> None:
    """Threads are alive at once, each with its own views; once they have ended, any call frees their memory."""
    held = random_kv(320)
    turn, all_have_theirs = threading.Lock(), threading.Barrier(SHORT_LIVED_THREADS)

    def update() -> None:
        nonlocal held
        new = random_kv(1)
        with turn:
            found = manager.update("a", 0, *new)
            expected = held = joined(held, new)
        all_have_theirs.wait(STALL_SECONDS)
        assert_same(found, expected)

    with opened(tmp_path, prefetch_layers=1) as manager:
        manager.allocate("a", seq_len=400)
        manager.append("a", 0, *held)
        manager.update("a", 0, *random_kv(1))
        manager.crop("a", 0, 1)
        before = manager.stats().l0_bytes
        in_threads(*[update] * SHORT_LIVED_THREADS)
        {"update": manager.update, "append": manager.append}[next_call]("a", 0, *random_kv(1))
        assert manager.stats().l0_bytes <= before + 2 * l0_bytes_of_layer(400)
        manager.free("a")
        assert_holds_nothing(manager)


# -- 7. fairness ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks_at_once", [1, 20])
def test_a_greedy_thread_does_not_starve_others(blocks_at_once: int, tmp_path: Path) -> None:
    """One thread keeps slow storage busy; single blocks of another thread still take their turn."""
    appends, staging_blocks = 12, 4
    waited_blocks: list[int] = []

    def greedy() -> None:
        manager.append("greedy", 0, *random_kv(blocks_at_once * BLOCK_TOKENS))
        if FAULTS.writes > 600:  # far too many: end the test
            crew.stop.set()

    def modest() -> None:
        for _ in range(appends):
            written = FAULTS.writes
            manager.append("modest", 0, *random_kv(BLOCK_TOKENS))
            waited_blocks.append(FAULTS.writes - written)
        crew.stop.set()

    with opened(tmp_path, l1_tier="faulty", staging_blocks=staging_blocks) as manager:
        for request_id in ("greedy", "modest"):
            manager.allocate(request_id)
            manager.append(request_id, 0, *random_kv(32 + BLOCK_TOKENS))  # the next block needs a staging buffer
        FAULTS.delay_seconds = 0.01
        crew = Crew()
        crew.start(crew.loop, greedy)
        time.sleep(0.2)
        crew.start(modest)
        crew.join()
        assert sum(waited_blocks) <= 3 * staging_blocks * appends, waited_blocks
        assert max(waited_blocks) <= 10 * staging_blocks, waited_blocks
        assert FAULTS.writes > 2 * appends, "nobody was greedy"
        FAULTS.delay_seconds = 0.0
        manager.free("greedy")
        manager.free("modest")
        assert_holds_nothing(manager)
