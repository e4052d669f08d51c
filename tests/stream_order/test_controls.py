"""Without an ordering rule, the use that needs it reports violations. This shows that `test_order` can fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_tiered_cache.core.blocks import Block
from hf_tiered_cache.loading.buffers import GatherBuffers, LoadBuffer
from hf_tiered_cache.loading.pipeline import DevicePipeline, Source
from hf_tiered_cache.loading.prefetch import Load, Prefetcher
from hf_tiered_cache.residency.table import ResidencyTable
from hf_tiered_cache.sequence.window import WindowBuffer
from hf_tiered_cache.tiers import host
from hf_tiered_cache.transfer import cuda as engines
from hf_tiered_cache.transfer.engine import Event

from .model import GPU, CudaModel, ModelEngine, Violation
from .scenarios import Form, Scenario

FORMS: list[Form] = ["gather", "stream"]

# Runs of a use until the model reports it. All of 192 did at once; on a loaded machine one did not.
_ATTEMPTS = 8


@pytest.fixture
def cuda() -> Iterator[CudaModel]:
    with pytest.MonkeyPatch.context() as patch:
        yield CudaModel(patch)


def _is_missed(
    cuda: CudaModel,
    path: Path,
    engine: type[ModelEngine] | None,
    use: Callable[[Scenario], object],
    what: str,
    where: str,
) -> None:
    """Check that a use without a rule reports violations of a kind, in a named function.

    Threads of the host may run in an order that needs no rule, so a use without a report is repeated.
    """
    for attempt in range(_ATTEMPTS):
        storage = path / str(attempt)
        storage.mkdir()
        use(Scenario(cuda, storage, engine))
        if any(_fits(violation, what, where) for violation in cuda.violations):
            return
    pytest.fail(cuda.report() or "nothing is missed")


def _fits(violation: Violation, what: str, where: str) -> bool:
    return what in violation.what and any(where in site for site in (*violation.here, *violation.before))


class ComputeWaitsForNothing(ModelEngine):
    def compute_waits(self, event: Event) -> None:
        return


class CopyInDoesNotWait(ModelEngine):
    """Copies in do not wait until their targets are released."""

    def copy_in(self, source: Any, scatter: Any, after: Event, ready: Event | None = None) -> Event:
        return super().copy_in(source, scatter, self.record_copy_in(), ready)


class CopyInWholeDoesNotWait(ModelEngine):
    def copy_in_whole(self, source: Any, target: Any, after: Event, ready: Event | None = None) -> Event:
        return super().copy_in_whole(source, target, self.record_copy_in(), ready)


class CopyOutDoesNotWait(ModelEngine):
    """Copies out do not wait until the block is packed."""

    def copy_out(self, source: Any, target: Any, after: Event) -> Event:
        return super().copy_out(source, target, self._events.record(self._out))


class ResidentBlocksAreReadAtOnce(ModelEngine):
    """Resident blocks are copied like those in host memory, which do not wait for the targets at first."""

    def copy_in(self, source: Any, scatter: Any, after: Event, ready: Event | None = None) -> Event:
        return super().copy_in(source, scatter, after)


class ResidentBlocksAreReadWhole(ModelEngine):
    def copy_in_whole(self, source: Any, target: Any, after: Event, ready: Event | None = None) -> Event:
        return super().copy_in_whole(source, target, self.record_copy_in() if ready is not None else after)


class NothingIsRecordedForCopies(ModelEngine):
    def _copies_use(self, buffer: torch.Tensor) -> None:
        return


class NothingIsRecordedForOtherThreads(ModelEngine):
    def computes_with(self, buffer: torch.Tensor) -> None:
        return


class CopiesInAreNotFinished(ModelEngine):
    """The host does not wait before it releases blocks that are read in place."""

    def finish_copies_in(self) -> None:
        return


class EventsAreUsedAgainAtOnce(ModelEngine):
    """Events are recorded again while another wait for them may still come."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        pool = self._events
        record = pool.record

        def record_and_give_back(stream: Any, host_waits: bool = False) -> Any:
            event = record(stream, host_waits)
            pool._idle[host_waits].append(event.event)
            return event

        pool.record = record_and_give_back  # type: ignore[method-assign]


def _generation(form: Form, **options: Any) -> Callable[[Scenario], object]:
    return lambda scenario: scenario.generation(form, **options)


# For reads from host memory, the host waits itself.
FROM_STORAGE = {"tiers": {"host_capacity": 0, "resident_capacity": 0}}

ENGINES: dict[str, tuple[type[ModelEngine], Callable[[Scenario], object], str, str]] = {
    "compute waits, gather": (
        ComputeWaitsForNothing,
        _generation("gather", **FROM_STORAGE),
        "read after",
        "copy_in",
    ),
    "compute waits, stream": (
        ComputeWaitsForNothing,
        _generation("stream", **FROM_STORAGE),
        "read after",
        "copy_in_whole",
    ),
    "after in copy_in": (CopyInDoesNotWait, _generation("gather"), "write after", "copy_in:"),
    "after in copy_in_whole": (CopyInWholeDoesNotWait, _generation("stream"), "write after", "copy_in_whole"),
    "after in copy_out, gather": (CopyOutDoesNotWait, _generation("gather"), "read after", "copy_out"),
    "after in copy_out, stream": (CopyOutDoesNotWait, _generation("stream"), "read after", "copy_out"),
    "ready in copy_in": (
        ResidentBlocksAreReadAtOnce,
        lambda use: use.fresh_blocks("gather"),
        "read after",
        "copy_in",
    ),
    "ready in copy_in_whole": (
        ResidentBlocksAreReadWhole,
        lambda use: use.fresh_blocks("stream"),
        "read after",
        "copy_in_whole",
    ),
    "record_stream, gather": (NothingIsRecordedForCopies, _generation("gather"), "freed", ""),
    "record_stream, stream": (NothingIsRecordedForCopies, _generation("stream"), "freed", ""),
    "computes_with, gather": (NothingIsRecordedForOtherThreads, lambda use: use.threads("gather"), "freed", ""),
    "computes_with, stream": (NothingIsRecordedForOtherThreads, lambda use: use.handover("stream"), "freed", ""),
    "events in use, gather": (EventsAreUsedAgainAtOnce, _generation("gather"), "unordered", ""),
    "events in use, stream": (EventsAreUsedAgainAtOnce, _generation("stream"), "unordered", ""),
}


@pytest.mark.parametrize(("engine", "use", "what", "where"), ENGINES.values(), ids=ENGINES.keys())
def test_engine(
    engine: type[ModelEngine],
    use: Callable[[Scenario], object],
    what: str,
    where: str,
    cuda: CudaModel,
    tmp_path: Path,
) -> None:
    _is_missed(cuda, tmp_path, engine, use, what, where)


@pytest.mark.parametrize("form", FORMS)
def test_host_waits(form: Form, cuda: CudaModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines._CudaEvent, "wait", lambda event: None)
    _is_missed(cuda, tmp_path, None, _generation(form), "unordered write", "copy_out")


@pytest.mark.parametrize("form", FORMS)
def test_event_of_the_allocator(
    form: Form, cuda: CudaModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer with new memory keeps the event of the old memory."""
    reallocate = LoadBuffer.reallocate

    def reallocate_only(buffer: LoadBuffer, nbytes: int) -> None:
        released = buffer.released
        reallocate(buffer, nbytes)
        buffer.released = released

    monkeypatch.setattr(LoadBuffer, "reallocate", reallocate_only)
    _is_missed(cuda, tmp_path, None, _generation(form), "write after", "copy_in")


@pytest.mark.parametrize("form", FORMS)
def test_follow(form: Form, cuda: CudaModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowBuffer, "follow", lambda window: None)
    _is_missed(cuda, tmp_path, None, lambda use: use.handover(form), "unordered", "window")


def test_stream_of_the_reader(cuda: CudaModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread releases a buffer on its current stream instead of the one that read it."""
    give_back = GatherBuffers.give_back
    monkeypatch.setattr(GatherBuffers, "give_back", lambda buffers, buffer, compute: give_back(buffers, buffer))
    _is_missed(cuda, tmp_path, None, lambda use: use.streams("gather"), "write after an unordered read", "copy_in")


def test_release_of_a_buffer_into_which_nothing_is_loaded(
    cuda: CudaModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is loaded into a buffer, so no copy waits for its previous readers."""
    finish = Prefetcher.finish

    def finish_at_once(prefetcher: Prefetcher, load: Load, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        load.after = load.pipeline.engine.record_compute()
        return finish(prefetcher, load, tokens)

    monkeypatch.setattr(Prefetcher, "finish", finish_at_once)
    _is_missed(cuda, tmp_path, None, lambda use: use.streams("gather"), "write after", "gather:")


class TestPinsOfHostBlocks:
    """Blocks are evicted from host memory as soon as their copies to the device are enqueued."""

    @pytest.fixture
    def thrown_out(self, monkeypatch: pytest.MonkeyPatch) -> list[Block]:
        blocks: list[Block] = []
        keep = DevicePipeline.keep

        def keep_and_throw_out(pipeline: DevicePipeline, block: Block, source: Source) -> None:
            keep(pipeline, block, source)
            if source.ready is None:
                residency = pipeline._residency
                lower = residency.tiers["L1"]
                if "L1" not in block.copies:
                    bits = block.layout.over(source.data, 1)[0].numpy().view("u4")
                    lower.write(block.key, block.layout, bits).result()
                    with residency.changed:
                        residency.arrive_locked(block, lower)
                with residency.changed:
                    copy = block.copies["host"]
                    residency.remove_copy_locked(block, "host")
                # Unless it is pinned, it is deleted here, or by the background thread if that is faster.
                while not copy.pins and "host" in block.leaving:
                    residency.garbage.collect((residency.tiers["host"], block))
                blocks.append(block)

        monkeypatch.setattr(DevicePipeline, "keep", keep_and_throw_out)
        monkeypatch.setattr(host, "_KEPT_SHARE", 0)  # memory of evicted blocks returns to the system
        return blocks

    @staticmethod
    def use(scenario: Scenario, form: Form) -> None:
        tiers = {"eviction": "pinned", "resident_capacity": 0, "l1_capacity": None}
        assert scenario.generation(form, tiers)

    @pytest.mark.parametrize("form", FORMS)
    def test_with_pins(self, form: Form, thrown_out: list[Block], cuda: CudaModel, tmp_path: Path) -> None:
        self.use(Scenario(cuda, tmp_path), form)
        assert thrown_out and not cuda.violations, cuda.report()

    @pytest.mark.parametrize("form", FORMS)
    def test_without(
        self, form: Form, thrown_out: list[Block], cuda: CudaModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        @contextmanager
        def in_memory(residency: ResidencyTable, blocks: Sequence[Block]) -> Iterator[list[torch.Tensor | None]]:
            tier = residency.tiers["host"]
            with residency.changed:
                there = [next(iter(block.copies)) == "host" for block in blocks]
            yield [tier.tensor(block.key) if here else None for block, here in zip(blocks, there, strict=True)]

        monkeypatch.setattr(ResidencyTable, "in_memory", in_memory)
        _is_missed(cuda, tmp_path, None, lambda scenario: self.use(scenario, form), "unordered read", "copy_in")
        assert {violation.memory for violation in cuda.violations} == {"host tier"}


@pytest.mark.parametrize("form", FORMS)
def test_device_of_a_thread(form: Form, cuda: CudaModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With streams but no device contexts, the first device takes memory, and the calling thread is left on it."""

    @contextmanager
    def on(engine: ModelEngine, stream: Any) -> Iterator[None]:
        with torch.cuda.stream(stream), torch.inference_mode(False):
            yield

    monkeypatch.setattr(ModelEngine, "_on", on)
    Scenario(cuda, tmp_path).generation(form)
    assert cuda.contexts == {0, GPU}
