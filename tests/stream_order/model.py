"""CUDA without a device: finds accesses to memory that happened in the right order only by chance.

The package's own CUDA engine runs on CPU tensors, where everything is executed at once. In addition, each stream
has a vector clock, and every access to memory that the package allocates is compared with those that conflict:

    one stream              orders its work as it was enqueued
    the host                precedes what it enqueues afterwards; all of its threads count as one
    record, wait_event      what was recorded precedes what the waiting stream does from then on
    synchronize             ... precedes what the host does from then on
    new memory              may have been freed a moment ago by the stream on which it is allocated: it counts as
                            written there
    freed memory            is allocated again on the same stream, once the streams that were recorded for it have
                            passed the point where it was freed: all others must have been waited for

Accesses are compared word by word. Conflicting accesses of two streams without such an order are a `Violation`.
Devices are modelled in two respects: a thread has a current one, and the first use of one takes memory.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_tiered_cache
from hf_tiered_cache.core.metrics import Metrics
from hf_tiered_cache.loading import pipeline
from hf_tiered_cache.transfer import staging
from hf_tiered_cache.transfer.cuda import CudaCopyEngine
from hf_tiered_cache.transfer.engine import CopyEngine

GPU = 1
"""The device for which CPU tensors stand. Not the first one, so that stray uses of the first are detected."""

_WORD_BYTES = 4
_MOST_STREAMS = 128
_PACKAGE = str(Path(hf_tiered_cache.__file__).parent)

Site = tuple[str, ...]


class Violation(NamedTuple):
    """Two unordered accesses and their places in the code: the second, then the first."""

    what: str
    memory: str
    here: Site
    before: Site


class Stream:
    """A stream, or the host. `clock[i]` is how much of stream `i` precedes the next operation of this one."""

    def __init__(self, model: CudaModel, device: int, name: str) -> None:
        with model.lock:
            self.number = len(model.streams)
            model.streams.append(self)
        self.device = device
        self.name = name
        self.clock = np.zeros(_MOST_STREAMS, np.int64)
        self._model = model

    def tick(self) -> int:
        """Return the time of one more operation."""
        if self is not self._model.host:
            self.follow(self._model.host.clock)
        self.clock[self.number] += 1
        return int(self.clock[self.number])

    def follow(self, clock: np.ndarray[Any, Any]) -> None:
        """Order everything before this clock before the next operation."""
        np.maximum(self.clock, clock, out=self.clock)

    def wait_event(self, event: Event) -> None:
        """As of `torch.cuda.Stream`."""
        with self._model.lock:
            if event.clock is not None:
                self.follow(event.clock)
            self.follow(self._model.host.clock)

    def synchronize(self) -> None:
        """As of `torch.cuda.Stream`."""
        with self._model.lock:
            self._model.host.follow(self.clock)


class Event:
    """As `torch.cuda.Event`: a wait refers to the last record before it."""

    def __init__(self, model: CudaModel, blocking: bool = False) -> None:
        model.counts["events"] += 1
        self.blocking = blocking
        self.clock: np.ndarray[Any, Any] | None = None
        self._model = model

    def record(self, stream: Stream) -> None:
        """As of `torch.cuda.Event`."""
        with self._model.lock:
            self._model.counts["recorded"] += 1
            stream.follow(self._model.host.clock)
            self.clock = stream.clock.copy()

    def synchronize(self) -> None:
        """As of `torch.cuda.Event`."""
        with self._model.lock:
            self._model.counts["waits that spin"] += not self.blocking
            self._model.contexts.add(self._model.current_device)
            if self.clock is not None:
                self._model.host.follow(self.clock)


class Memory:
    """The accesses to each word of some memory: its last writer, its readers since then, and their times."""

    def __init__(self, kind: str, address: int, nbytes: int, owner: Stream) -> None:
        words = -(-nbytes // _WORD_BYTES)
        self.kind, self.address, self.nbytes, self.owner = kind, address, nbytes, owner
        self.recorded: set[Stream] = set()
        self.writer = np.full(words, owner.number, np.int16)
        self.written = np.full(words, owner.tick(), np.int64)
        self.read: dict[int, np.ndarray[Any, Any]] = {}
        self.sites: dict[tuple[int, int], Site] = {}

    def last_accesses(self) -> Iterator[tuple[int, int]]:
        """Yield each stream and the time of its last access."""
        for number in np.unique(self.writer):
            yield int(number), int(self.written[self.writer == number].max())
        for number, times in self.read.items():
            yield number, int(times.max())


class CudaModel:
    """Streams, events, allocator, page-locked memory and devices that replace those of `torch.cuda`.

    Args:
        monkeypatch: replaces `torch.cuda`'s functions.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.violations: Counter[Violation] = Counter()
        self.counts: Counter[str] = Counter()
        self.contexts: set[int] = set()
        self.locked: dict[int, int] = {}
        self.refuses_to_lock = False
        self._memory: dict[int, Memory] = {}
        self._here = threading.local()
        self.host = Stream(self, -1, "host")
        self._default = {0: Stream(self, 0, "default 0"), GPU: Stream(self, GPU, "default")}
        self._install(monkeypatch)

    # -- what tests use -------------------------------------------------------------------------------------------

    def engine(self, kind: type[ModelEngine] | None = None) -> Callable[[torch.device, Metrics], CopyEngine]:
        """Make an engine; an engine factory for a manager."""
        return lambda device, metrics: (kind or ModelEngine)(device, metrics, self)

    def watch(self) -> TorchDispatchMode:
        """Return a context in which the model sees the calling thread's operations on tensors."""
        return _Watch(self)

    @contextlib.contextmanager
    def computing_on(self, stream: Stream) -> Iterator[None]:
        """Let the calling thread compute on this stream, as user code would."""
        with torch.cuda.device(GPU), torch.cuda.stream(stream):  # type: ignore[arg-type]
            yield

    def new_stream(self, name: str = "user's") -> Stream:
        """Make a stream of the GPU."""
        return Stream(self, GPU, name)

    @property
    def current_device(self) -> int:
        """The calling thread's current device."""
        return int(getattr(self._here, "device", 0))

    def report(self) -> str:
        """Return the violations found, as text for messages."""
        return "\n".join(f"{count} x {violation}" for violation, count in self.violations.most_common(8))

    # -- memory ---------------------------------------------------------------------------------------------------

    def track(self, tensor: torch.Tensor, kind: str, owner: Stream) -> torch.Tensor:
        """Track new memory until it is freed."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            with self.lock:
                memory = self._add(kind, storage.data_ptr(), storage.nbytes(), owner)
            weakref.finalize(storage, self._freed, memory)
        return tensor

    def tensor_accessed(self, tensor: torch.Tensor, stream: Stream, write: bool) -> None:
        """Record that a stream or the host reads or writes a tensor."""
        memory = self._memory.get(tensor.untyped_storage().data_ptr())
        if memory is not None and tensor.numel():
            self._accessed(memory, stream, write, lambda words: _words_of(tensor, words))

    def array_accessed(self, array: np.ndarray[Any, Any], write: bool) -> None:
        """Record that the host reads or writes a contiguous array."""
        first = array.__array_interface__["data"][0]
        for memory in list(self._memory.values()):
            offset = first - memory.address
            if 0 <= offset < memory.nbytes:
                place = slice(offset // _WORD_BYTES, -(-(offset + array.nbytes) // _WORD_BYTES))
                self._accessed(memory, self.host, write, lambda words, place=place: words[place])  # type: ignore[misc]

    def _add(self, kind: str, address: int, nbytes: int, owner: Stream) -> Memory:
        self._memory[address] = memory = Memory(kind, address, nbytes, owner)
        self.counts[f"{kind} memory"] += 1
        return memory

    def _accessed(
        self,
        memory: Memory,
        stream: Stream,
        write: bool,
        words: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]],
    ) -> None:
        with self.lock:
            now, clock = stream.tick(), stream.clock
            self.counts["writes" if write else "reads"] += 1
            memory.sites[stream.number, now] = _site()
            what = "write" if write else "read"
            writers, written = words(memory.writer), words(memory.written)
            unordered = written > clock[writers]
            if unordered.any():
                first = (int(writers[unordered].flat[0]), int(written[unordered].flat[0]))
                self._violated(f"{what} after an unordered write", memory, first)
            if not write:
                read = memory.read.setdefault(stream.number, np.zeros(len(memory.writer), np.int64))
                words(read)[...] = now
                return
            for number, read in memory.read.items():
                latest = words(read).max()
                if latest > clock[number]:
                    self._violated("write after an unordered read", memory, (number, int(latest)))
            writers[...] = stream.number
            written[...] = now

    def _freed(self, memory: Memory) -> None:
        with self.lock:
            if self._memory.get(memory.address) is memory:
                del self._memory[memory.address]
            if memory.kind != "device":  # the host's allocator tracks copies by itself
                return
            passed = [memory.owner, self.host, *memory.recorded]
            for number, time in memory.last_accesses():
                if self.streams[number] not in passed and not any(time <= by.clock[number] for by in passed):
                    self._violated("freed in unordered use", memory, (number, time))

    def _violated(self, what: str, memory: Memory, first: tuple[int, int]) -> None:
        self.violations[Violation(what, memory.kind, _site(), memory.sites.get(first, ("new",)))] += 1

    # -- in place of torch.cuda -----------------------------------------------------------------------------------

    def _install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "Stream", lambda device=None: Stream(self, self._index(device), "package's"))
        monkeypatch.setattr(cuda, "Event", lambda **options: Event(self, **options))
        monkeypatch.setattr(cuda, "current_stream", self.current_stream)
        monkeypatch.setattr(cuda, "stream", lambda stream: _StreamContext(self, stream))
        monkeypatch.setattr(cuda, "device", self._device)
        monkeypatch.setattr(cuda, "set_device", self.set_device)
        monkeypatch.setattr(cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self._record(tensor, stream))
        # Functions with which the host accesses memory that streams access, too.
        copyto, as_bits = np.copyto, staging.as_bits

        def watched_copyto(target: Any, source: Any, **options: Any) -> None:
            self.array_accessed(source, write=False)
            self.array_accessed(target, write=True)
            copyto(target, source, **options)

        def watched_as_bits(write: bool) -> Callable[[torch.Tensor], Any]:
            def watched(tensor: torch.Tensor) -> Any:
                self.tensor_accessed(tensor, self.host, write)
                return as_bits(tensor)

            return watched

        monkeypatch.setattr(np, "copyto", watched_copyto)
        monkeypatch.setattr(staging, "as_bits", watched_as_bits(write=False))
        monkeypatch.setattr(pipeline, "as_bits", watched_as_bits(write=True))

    def current_stream(self, device: Any = None) -> Stream:
        """As of `torch.cuda`."""
        index = self._index(device)
        return self._streams.get(index, self._default[index])

    def set_stream(self, stream: Stream) -> None:
        """As in `torch.cuda`: the stream's device becomes the current one, too."""
        if self.current_device != stream.device:
            self.set_device(stream.device)
        self._streams[stream.device] = stream

    def set_device(self, device: Any) -> None:
        """As in `torch.cuda`: makes a context, which takes memory, on a device that has none yet."""
        self._here.device = self._index(device)
        self.contexts.add(self._here.device)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        """As in CUDA's runtime. Locked memory is tracked."""
        with self.lock:
            assert address % 4096 == nbytes % 4096 == 0 and flags == 1
            assert not any(address < at + size and at < address + nbytes for at, size in self.locked.items())
            self.contexts.add(self.current_device)
            if self.refuses_to_lock:
                return 2  # out of memory
            self._add("host tier", address, nbytes, self.host)
            self.locked[address] = nbytes
            return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """As in CUDA's runtime. The memory returns to the system."""
        with self.lock:
            self.contexts.add(self.current_device)
            self._accessed(self._memory[address], self.host, True, lambda words: words)
            del self.locked[address], self._memory[address]
            return 0

    @contextlib.contextmanager
    def _device(self, device: Any) -> Iterator[None]:
        previous = self.current_device
        if self._index(device) != previous:
            self.set_device(device)
        try:
            yield
        finally:
            self._here.device = previous  # without a context, if it has none

    @property
    def _streams(self) -> dict[int, Stream]:
        if not hasattr(self._here, "streams"):
            self._here.streams = {}
        streams: dict[int, Stream] = self._here.streams
        return streams

    def _index(self, device: Any) -> int:
        if isinstance(device, torch.device):
            return GPU if device.type == "cpu" else int(device.index)
        return self.current_device if device is None else int(device)

    def _record(self, tensor: torch.Tensor, stream: Stream) -> None:
        with self.lock:
            memory = self._memory.get(tensor.untyped_storage().data_ptr())
            if memory is not None:
                memory.recorded.add(stream)


class ModelEngine(CudaCopyEngine):
    """The package's engine for CUDA, on memory that the model tracks."""

    def __init__(self, device: torch.device, metrics: Metrics, model: CudaModel) -> None:
        self.model = model
        super().__init__(device, metrics)

    def enter_thread(self) -> None:
        super().enter_thread()
        self.model.watch().__enter__()  # until the thread ends

    def _empty(self, nbytes: int) -> torch.Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        return self.model.track(buffer, "device", self.model.current_stream(self.device))

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            buffer = torch.empty(nbytes, dtype=torch.uint8)
        return self.model.track(buffer, "staging", self.model.host)


class _StreamContext:
    """As `torch.cuda.StreamContext`, including its treatment of devices."""

    def __init__(self, model: CudaModel, stream: Stream) -> None:
        self._model, self._stream = model, stream

    def __enter__(self) -> None:
        self._before = self._model.current_stream()
        self._there_before = self._model.current_stream(self._stream.device)
        self._model.set_stream(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before.device != self._stream.device:
            self._model.set_stream(self._there_before)
        self._model.set_stream(self._before)


class _Watch(TorchDispatchMode):
    """Reports every operation of the calling thread to the model, on its current stream."""

    # Operations that use their arguments only for shape and type.
    _READ_NOTHING = ("new_", "empty", "zeros", "ones", "full", "sym_", "detach", "alias", "fill_", "zero_")
    # Operations for whose result the host waits.
    _SYNCHRONISE = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")

    def __init__(self, model: CudaModel) -> None:
        super().__init__()
        self._model = model

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema, stream = func._schema, self._model.current_stream(GPU)
        name = schema.name.split("::")[1]
        if not any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns):
            reads, writes = [], []
            for argument, value in [
                *zip(schema.arguments, args, strict=False),
                *((argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs),
            ]:
                written = argument.alias_info is not None and argument.alias_info.is_write
                for item in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(item, torch.Tensor):
                        (writes if written else reads).append(item)
            for tensor in reads if not name.startswith(self._READ_NOTHING) else []:
                self._model.tensor_accessed(tensor, stream, write=False)
            for tensor in writes:
                self._model.tensor_accessed(tensor, stream, write=True)
        result = func(*args, **kwargs)
        if name in self._SYNCHRONISE:
            stream.synchronize()
        return result


def _words_of(tensor: torch.Tensor, words: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the part of a storage's record `words` that belongs to a tensor, as a view."""
    offset, width = tensor.storage_offset(), tensor.element_size()
    if tensor.is_contiguous():
        first, end = offset * width, (offset + tensor.numel()) * width
        return words[first // _WORD_BYTES : -(-end // _WORD_BYTES)]
    assert width == _WORD_BYTES, f"{tensor.dtype} in pieces is not modelled"
    strides = [stride * words.itemsize for stride in tensor.stride()]
    return np.lib.stride_tricks.as_strided(words[offset:], tensor.shape, strides)


def _site() -> Site:
    """Return the place of the calling code in the package, the innermost function first."""
    frame: FrameType | None = sys._getframe(2)
    places: list[str] = []
    while frame is not None and len(places) < 3:
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE):
            places.append(f"{Path(code.co_filename).stem}.{code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(places)
