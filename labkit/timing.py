"""Timing: interleaved samples of calls, and clocks for the draft/verify loop.

Every sample is kept. What a number is made of (median, interval) is decided where it is used; which samples are
doubtful, in `labkit.quality`.
"""

import itertools
import random
import re
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, Protocol

from labkit.errors import InputError
from labkit.quality import relative_width, round_indices

PARTS = ("draft", "verify", "accept")
CPU_TIMER_RESOLUTION_MS = 1e-4  # perf_counter_ns steps by tens of ns
EVENT_RESOLUTION_MS = 2e-3  # CUDA events, and the skew of the host's clock against the device's over one step
_DEFAULT_CACHE_BYTES = 32 << 20
_HOLD_CYCLES = 400_000  # 0.2 ms at 2 GHz: a graph of hundreds of kernels is launched in less


def cache_bytes(device: str) -> int:
    """Size of the device's last-level cache, bytes; 32 MiB where the system does not tell."""
    if device != "cpu":
        import torch

        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [_DEFAULT_CACHE_BYTES]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        number = re.fullmatch(r"(\d+)([KM])", path.read_text().strip())
        if number:
            sizes.append(int(number[1]) << {"K": 10, "M": 20}[number[2]])
    return max(sizes[1:] or sizes)


def _displacer(device: str) -> tuple[Callable[[], object], int]:
    """A call that displaces the caches, and the bytes it reads.

    It reads instead of writing: written lines would have to be written back during the sample that follows.
    """
    import torch

    num_bytes = max(2 * cache_bytes(device), 64 << 20)
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    return buffer.sum, num_bytes


def _holder(device: str) -> Callable[[], object]:
    """A call that keeps the device busy while the host queues what follows.

    A device that has nothing to do starts the clock at once, and the host's launch is then part of the time: some 20 us
    in one sample of four on an H200.
    """
    if device == "cpu":
        return lambda: None
    import torch

    return lambda: torch.cuda._sleep(_HOLD_CYCLES)


def _current(device: str) -> AbstractContextManager[object]:
    """The device as torch's current one, for events and streams."""
    if device == "cpu":
        return nullcontext()
    import torch

    return torch.cuda.device(device)


def _wait_for(device: str) -> None:
    import torch

    torch.cuda.synchronize(device)


def captured(call: Callable[[], object], **options: Any) -> Callable[[], object]:
    """The call as a CUDA graph, replayed once, since the first replay also uploads it; options go to `torch`."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        call()
    graph.replay()
    return graph.replay


def host_timer(call: Callable[[], object]) -> Callable[[], float]:
    """Run a call that has ended when it returns; what comes back tells its ms."""
    begin = time.perf_counter_ns()
    call()
    elapsed = time.perf_counter_ns() - begin
    return lambda: elapsed / 1e6


def event_timer(call: Callable[[], object]) -> Callable[[], float]:
    """Queue a call between two CUDA events; what comes back tells its ms once the device is done."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    return lambda: begin.elapsed_time(end)


def sample_rounds(
    calls: dict[str, Callable[[], object]],
    *,
    num_rounds: int,
    num_warmup: int = 2,
    device: str = "cpu",
    l2: Literal["cold", "warm"] = "cold",
    graph: bool = False,
    seed: int = 0,
    max_rounds: int = 0,
    widest: float = 0.0,
    monitor: Callable[[], object] | None = None,
) -> list[dict[str, Any]]:
    """Time calls against one another: each round runs all of them, in a shuffled order of its own.

    calls : What to time, by name. Only the call is timed; prepare before.
    num_rounds, num_warmup : Rounds, one sample of each call in each; untimed runs of each call before the first round.
    device : ``cpu`` (perf_counter) or a CUDA device (events on the current stream, which is held until the call is
        queued; launches that take the host longer than that show up in the time unless ``graph``).
    l2 : cold: the last-level cache is displaced before each sample, by reading at least twice its size. warm: it is
        not.
    graph : Capture each call as a CUDA graph and time the replay.
    seed : Of the shuffling.
    max_rounds, widest : After ``num_rounds``, go on by as many while the 95 % interval of any call's median is wider
        than this share of it, up to ``max_rounds`` in all. The rule looks at widths alone, never at which call is
        faster.
    monitor : Read once per round, on CUDA while the device works on it, outside the times; its result is ``state``.

    Returns name, round, sample (index in its round: 0), ms, displaced_bytes (0 when warm) and state, in the order of
    running.

    Raises InputError: bad arguments; a graph on the CPU.
    """
    if not calls or num_rounds < 1:
        raise InputError("sample_rounds: wanted at least one call and round")
    if l2 not in ("cold", "warm"):
        raise InputError(f"l2: wanted cold or warm, got {l2!r}")
    if graph and device == "cpu":
        raise InputError("graph: wanted False on the cpu, got True")
    with _current(device):
        for call in calls.values():
            for _ in range(num_warmup):
                call()
        timed = {name: captured(call) for name, call in calls.items()} if graph else calls
        displace, displaced_bytes = _displacer(device) if l2 == "cold" else (lambda: None, 0)
        timer, hold = host_timer if device == "cpu" else event_timer, _holder(device)
        names, order, rows = list(calls), random.Random(seed), list[dict[str, Any]]()
        times: dict[str, list[float]] = {name: [] for name in calls}

        def is_wide() -> bool:
            return max(map(relative_width, times.values())) > widest

        for index in round_indices(num_rounds, max_rounds, is_wide):
            order.shuffle(names)
            pending = []
            for name in names:
                hold()
                displace()
                pending.append((name, timer(timed[name])))
            same = {"round": index, "displaced_bytes": displaced_bytes, "state": monitor() if monitor else None}
            if device != "cpu":
                _wait_for(device)
            for name, read in pending:
                times[name].append(read())
                rows.append({"name": name, "sample": 0, "ms": times[name][-1], **same})
    return rows


StepTimes = dict[str, float | None]  # draft_ms, verify_ms, accept_ms, gap_ms, step_ms; null: not timed


class Clock(Protocol):
    """Times the parts of a step: ``start_step``, ``lap(part)`` at the end of each part, ``end_step``.

    A part may end more than once in a step: its times add up. A part that never ends is null.
    """

    def start_step(self) -> None: ...

    def lap(self, part: str) -> None: ...

    def end_step(self) -> StepTimes: ...


def _step_times(parts: Iterable[tuple[str, float]], step_ms: float, resolution_ms: float) -> StepTimes:
    """The ms of the ended parts in their order, added up by name, and what the step took beside them."""
    times: StepTimes = dict.fromkeys(f"{part}_ms" for part in PARTS)
    for part, ms in parts:
        times[f"{part}_ms"] = (times[f"{part}_ms"] or 0.0) + ms
    gap_ms = step_ms - sum(ms or 0.0 for ms in times.values())
    if gap_ms < -resolution_ms:
        raise RuntimeError(f"clock: the parts of a step exceed its wall time of {step_ms:.6f} ms by {-gap_ms:.6f} ms")
    return {**times, "gap_ms": max(gap_ms, 0.0), "step_ms": step_ms}


class NullClock:
    """Times nothing and costs nothing."""

    def start_step(self) -> None:
        """Nothing to do."""

    def lap(self, part: str) -> None:
        """Nothing to do."""

    def end_step(self) -> StepTimes:
        """All null."""
        return dict.fromkeys([*(f"{part}_ms" for part in PARTS), "gap_ms", "step_ms"])


class HostClock:
    """The host's perf_counter: for the CPU, where a call has ended when it returns."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, int]] = []
        self._begin = 0

    def start_step(self) -> None:
        self._marks = []
        self._begin = time.perf_counter_ns()

    def lap(self, part: str) -> None:
        self._marks.append((part, time.perf_counter_ns()))

    def end_step(self) -> StepTimes:
        """The times of the step; its gap is what came after the last part."""
        end = time.perf_counter_ns()
        marks = [("", self._begin), *self._marks]
        parts = ((part, (mark - before) / 1e6) for (_, before), (part, mark) in itertools.pairwise(marks))
        return _step_times(parts, (end - self._begin) / 1e6, CPU_TIMER_RESOLUTION_MS)


class EventClock:
    """CUDA events on the current stream; nothing waits for the device until the step ends.

    Parts are device time from one event to the next, the step is wall time of the host, waiting for the
    device included; the gap is the difference: launching before the first and waiting after the last part.
    """

    def __init__(self, device: str = "cuda") -> None:
        import torch

        self._torch, self._device = torch, device
        self._events: list[Any] = []
        self._parts: list[str] = []
        self._begin = 0

    def _mark(self, index: int) -> None:
        if index == len(self._events):  # made once, used in every step
            self._events.append(self._torch.cuda.Event(enable_timing=True))
        self._events[index].record()

    def start_step(self) -> None:
        """Begin a step, once the device has nothing left to do."""
        self._torch.cuda.synchronize(self._device)
        self._parts = []
        self._begin = time.perf_counter_ns()
        self._mark(0)

    def lap(self, part: str) -> None:
        """End a part of the step, at this place of the stream."""
        self._parts.append(part)
        self._mark(len(self._parts))

    def end_step(self) -> StepTimes:
        """Wait for the device; the times of the step."""
        self._torch.cuda.synchronize(self._device)
        step_ms = (time.perf_counter_ns() - self._begin) / 1e6
        ends = itertools.pairwise(self._events)
        parts = ((part, begin.elapsed_time(end)) for part, (begin, end) in zip(self._parts, ends, strict=False))
        return _step_times(parts, step_ms, EVENT_RESOLUTION_MS)
