"""Replays of traces: Belady against all possible choices, and the defaults against Belady."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_tiered_cache import ConfigError, TieredCacheConfig
from hf_tiered_cache.bench import policies
from hf_tiered_cache.bench._traces import Skewed, decode, everything, mix
from hf_tiered_cache.residency.eviction import POLICIES
from hf_tiered_cache.residency.heat import HeatTable
from hf_tiered_cache.residency.replay import Call, RecordingTable, Trace, replay

AT_ONCE = TieredCacheConfig(protection_steps=0, warmup_steps=0)


def a_trace(calls: list[tuple[str, list[int]]]) -> Trace:
    """Draw a trace of one group, in which blocks are added, read and removed."""
    table = RecordingTable()
    group = table.new_group()
    living: list[int] = []
    for name, choices in calls:
        slots = sorted({living[choice % len(living)] for choice in choices} if living else set())
        if name == "add" and len(living) < 6:
            living.append(table.add(group, len(living)))
        elif name == "remove" and slots:
            table.remove(np.array(slots))
            living = [slot for slot in living if slot not in slots]
        elif name == "touch" and slots:
            table.tick()
            table.touch(np.array(slots))
    return table.trace


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "touch", "touch", "touch", "touch", "remove"]),
        st.lists(st.integers(0, 5), min_size=1, max_size=3),
    ),
    max_size=24,
)


def most_hits(trace: Trace, capacity: int) -> int:
    """Return the most hits possible, by trying every set of blocks that the tier could hold after each call."""
    hits_of = {frozenset[int](): 0}
    for call, arguments in trace.calls:
        slots = frozenset(arguments[2:].tolist() if call is Call.ADD else arguments.tolist())
        if call not in (Call.ADD, Call.REMOVE, Call.TOUCH):
            continue
        after: dict[frozenset[int], int] = {}
        for held, hits in hits_of.items():
            hits += len(held & slots) if call is Call.TOUCH else 0
            possible = held - slots if call is Call.REMOVE else held | slots
            for size in range(min(capacity, len(possible)) + 1):
                for kept in itertools.combinations(sorted(possible), size):
                    after[frozenset(kept)] = max(hits, after.get(frozenset(kept), 0))
        hits_of = after
    return max(hits_of.values())


@settings(deadline=None)
@given(CALLS, st.integers(0, 4))
def test_belady_is_the_optimum(calls: list[tuple[str, list[int]]], capacity: int) -> None:
    trace = a_trace(calls)
    best = most_hits(trace, capacity)
    assert replay(trace, "belady", capacity).hits == best
    for name in POLICIES:
        assert replay(trace, name, capacity, AT_ONCE).hits <= best


@settings(deadline=None, max_examples=30)
@given(calls=CALLS)
def test_save_and_load(calls: list[tuple[str, list[int]]], tmp_path_factory: pytest.TempPathFactory) -> None:
    trace = a_trace(calls)
    path = tmp_path_factory.mktemp("trace") / "trace.npz"
    trace.save(path)
    loaded = Trace.load(path)
    assert [(call, arguments.tolist()) for call, arguments in loaded.calls] == [
        (call, arguments.tolist()) for call, arguments in trace.calls
    ]
    assert replay(loaded, "heat", 2) == replay(trace, "heat", 2)


def test_empty_traces(tmp_path: Path) -> None:
    Trace().save(tmp_path / "trace.npz")
    trace = Trace.load(tmp_path / "trace.npz")
    assert trace.calls == [] and trace.steps == trace.most_blocks == 0
    result = replay(trace, "lru", 1)
    assert result.hit_rate == result.moves_per_step == 0


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no trace")
    np.savez(tmp_path / "other.npz", calls=np.zeros(3))
    (tmp_path / "torn.npz").write_bytes((tmp_path / "other.npz").read_bytes()[:100])
    for name in ("text.npz", "other.npz", "torn.npz"):
        with pytest.raises(ConfigError, match=name):
            Trace.load(tmp_path / name)
    with pytest.raises(OSError):
        Trace.load(tmp_path / "nothing.npz")


def test_all_calls_are_recorded() -> None:
    """A second table that gets the recorded calls has the same content."""
    recording = RecordingTable()
    forks = [recording.new_group(), recording.new_group()]
    slots = [recording.add(forks[0], position) for position in range(4)]
    recording.tick()
    recording.touch(np.array([slots[2], slots[0], slots[2]]))
    recording.truncate(forks[0], 3)
    recording.free_group(forks[1])
    recording.remove(np.array(slots[3:]))
    assert recording.new_group() == forks[1]
    assert {call for call, _ in recording.trace.calls} == set(Call)
    again = RecordingTable()
    for call, arguments in recording.trace.calls:
        getattr(again, call.name.lower())(*_arguments(call, arguments))
    living = np.array(slots[:3])
    assert np.array_equal(again.access_probability(living), recording.access_probability(living))
    assert isinstance(recording, HeatTable) and again.now == 1


def _arguments(call: Call, arguments: np.ndarray) -> list[object]:
    if call in (Call.TOUCH, Call.REMOVE):
        return [arguments]
    return [] if call in (Call.TICK, Call.NEW_GROUP) else arguments[:2].tolist()


def test_what_a_replay_counts() -> None:
    trace = a_trace([("add", [0]), ("add", [0]), ("touch", [0, 1]), ("touch", [1]), ("touch", [1])])
    result = replay(trace, "lru", 1, AT_ONCE)  # block 1 is promoted for block 0, once
    assert (result.accesses, result.hits, result.moves, result.steps) == (4, 2, 2, 3)
    assert result.hit_rate == 0.5 and result.moves_per_step == pytest.approx(2 / 3)
    static = replay(trace, "pinned", 1)
    assert (static.hits, static.moves) == (1, 0)


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match="belady, fifo"):
        replay(Trace(), "oracle", 1)


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_pinned_is_the_optimum_on_a_cycle(share: float) -> None:
    trace = decode(everything, blocks=16, steps=80)
    capacity = round(share * trace.most_blocks)
    best = replay(trace, "belady", capacity).hits
    assert replay(trace, "pinned", capacity).hits >= 0.95 * best
    if share < 0.5:
        assert replay(trace, "lru", capacity, AT_ONCE).hits <= 0.05 * best


@pytest.mark.parametrize("share", [0.15, 0.3])
def test_heat_on_skewed_reads(share: float) -> None:
    trace = decode(Skewed(np.random.default_rng(7)), blocks=64, steps=300)
    capacity = round(share * trace.most_blocks)
    assert replay(trace, "heat", capacity).hits >= 0.85 * replay(trace, "belady", capacity).hits


@pytest.mark.parametrize("name", ["pinned", "heat"])
def test_defaults_on_mixes(name: str) -> None:
    random = np.random.default_rng(7)
    trace = mix(random, everything if name == "pinned" else Skewed(random), rounds=300)
    capacity = round(0.25 * trace.most_blocks)
    assert replay(trace, name, capacity).hits >= 0.85 * replay(trace, "belady", capacity).hits


def test_skewed_reads_overlap_as_was_measured() -> None:
    trace = decode(Skewed(np.random.default_rng(0)))
    reads = [set(arguments.tolist()) for call, arguments in trace.calls if call is Call.TOUCH]
    layers = 4
    pairs = list(zip(reads[:-layers], reads[layers:], strict=True))
    overlap = sum(len(before & after) for before, after in pairs) / sum(len(after) for _, after in pairs)
    assert overlap == pytest.approx(0.83, abs=0.01)


def test_the_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decode(everything, blocks=4, steps=20).save(tmp_path / "mine.npz")
    parser = argparse.ArgumentParser()
    policies.add_arguments(parser)
    trace = ["--trace", str(tmp_path / "mine.npz")]
    policies.run(parser.parse_args([*trace, "--blocks", "8000", "--layers", "8"]))
    output = capsys.readouterr().out
    result = json.loads(output.splitlines()[-1])
    assert {row["trace"] for row in result["rows"]} == {"mine"} and result["missed"] == []
    assert set(result["rows"][0]["policies"]) >= {"belady", "pinned", "heat", "lru", "lfu", "random"}
    assert [cost["layers"] for cost in result["heat"]] == [8, 1]


def test_the_benchmark_fails_below_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = policies.Case(lambda random: decode(everything, blocks=4, steps=40), (0.5,), "lru", 0.85)
    monkeypatch.setattr(policies, "CASES", {"hopeless": case})
    parser = argparse.ArgumentParser()
    policies.add_arguments(parser)
    with pytest.raises(SystemExit, match=r"hopeless, 50\.0%"):
        policies.run(parser.parse_args(["--seeds", "1", "--blocks", "800", "--layers", "8"]))
