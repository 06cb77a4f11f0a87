"""From a grid to what is left to measure: keys, the header of a run, batches, and a budget of time."""

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from labkit.errors import InputError
from labkit.executor import Batch, Point
from labkit.journal import RESERVED, Journal
from labkit.provenance import digest, environment_digest, plain, redact
from labkit.results import new_run_id

_ENCODER = json.JSONEncoder(allow_nan=False, default=plain)  # json.dumps makes one per call


def grid(**axes: Any) -> list[Point]:
    """Every combination of the axes' values, the last axis fastest.

    **axes : a list, tuple or range of values, or one value.

    Raises InputError: an axis without values.
    """
    values = {n: list(v) if isinstance(v, list | tuple | range) else [v] for n, v in axes.items()}
    for name, options in values.items():
        if not options:
            raise InputError(f"{name}: wanted at least one value, got none")
    return [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]


def _is_plain(value: Any) -> bool:
    """Whether JSON gives the value back as it is."""
    return value is None or type(value) in (int, str, bool) or (type(value) is float and math.isfinite(value))


def _is_number(value: Any) -> bool:
    return value is None or type(value) in (int, float, bool)


def point_key(point: Point, backend_digest: str = "") -> str:
    """Every parameter of a point as one stable string, in any order: ``k=4,name="sdpa"@1a2b``."""
    # Whole numbers are most of 100,000 points.
    texts = {name: str(value) if type(value) is int else _ENCODER.encode(value) for name, value in point.items()}
    parts = [f"{name}={texts[name]}" for name in sorted(texts)]
    return ",".join(parts) + (f"@{backend_digest}" if backend_digest else "")


def keyed_points(points: Iterable[Point], seed: int, backend_digest: str | Callable[[Point], str]) -> dict[str, Point]:
    """point_key -> point, with the seed in it, as JSON gives it back: lists, no tuples."""
    keyed: dict[str, Point] = {}
    texts: set[tuple[str, str]] = set()
    for given in points:
        try:
            point = {"seed": seed, **given}
            if not all(map(_is_plain, point.values())):
                point = json.loads(_ENCODER.encode(point))
        except (TypeError, ValueError) as error:
            raise InputError(f"points: wanted numbers, texts, lists and null, got {given!r}: {error}") from error
        strings = ((n, v if isinstance(v, str) else _ENCODER.encode(v)) for n, v in point.items() if not _is_number(v))
        texts.update(strings)
        taken = [name for name in RESERVED if name in point]
        if taken:
            raise InputError(f"points: {', '.join(taken)} cannot be an axis; the sweep fills it in")
        key = point_key(point, backend_digest(given) if callable(backend_digest) else backend_digest)
        if key in keyed:
            raise InputError(f"points: the same point twice: {key}")
        keyed[key] = point
    if not keyed:
        raise InputError("points: wanted at least one, got none")
    if private := sorted({name for name, text in texts if redact(text) != text}):
        raise InputError(
            f"points: {private[0]} holds a home folder, a name or a secret; hand such values over by local="
        )
    return keyed


def _axes(points: Iterable[Point]) -> dict[str, list[Any]]:
    """Axis -> its values in the order they come, for the sidecar."""
    axes: dict[str, dict[Any, Any]] = {}
    for point in points:
        for name, value in point.items():
            same = (type(value), value) if _is_plain(value) else _ENCODER.encode(value)  # 1, 1.0 and true differ
            axes.setdefault(name, {}).setdefault(same, value)
    return {name: list(values.values()) for name, values in axes.items()}


def run_header(
    keyed: dict[str, Point], experiment: str, measure: str, provenance: dict[str, Any], code_digest: str, seed: int
) -> dict[str, Any]:
    """What a journal starts with: the identity of the run, of its plan, and of the environment."""
    return {
        "run_id": new_run_id(),
        "experiment": experiment,
        "gpu": provenance["device"]["slug"],
        "plan_digest": digest([experiment, measure, sorted(keyed), seed]),
        "points_digest": digest([experiment, measure, sorted(map(point_key, keyed.values())), seed]),
        "environment_digest": environment_digest(provenance, code_digest),
        "code_digest": code_digest,
        "num_points": len(keyed),
        "grid": _axes(keyed.values()),
        "measure": measure,
        "seed": seed,
        "command": provenance["command"],
        "provenance": provenance,
    }


def batches_left(journal: Journal, keyed: dict[str, Point]) -> list[Batch]:
    """What is left to measure, in order. A group that is not whole is measured again as a whole.

    Its arms must have been interleaved to be compared; of those, only arms that cannot run are left out.
    """
    batches = []
    for _, batch in itertools.groupby(keyed.items(), lambda item: item[1].get("group", item[0])):
        points = list(batch)
        if not all(journal.is_final(key) for key, _ in points):
            batches.append(
                [(key, point) for key, point in points if not journal.is_final(key) or journal.status(key) == "ok"]
            )
    return batches


class Budget:
    """Stops before a point that is not expected to fit into the time left."""

    def __init__(self, budget_s: float | None, journal: Journal, *, spent_counts: bool):
        earlier = journal.attempts.values()
        spent_s = sum(attempt.seconds for attempt in earlier) if spent_counts else 0.0
        self._deadline = None if budget_s is None else time.monotonic() + budget_s - spent_s
        self._seconds: dict[str, list[float]] = {}
        self.stopped = False
        for attempt in earlier:
            self.add(attempt.point, attempt.seconds)

    @staticmethod
    def _kind(point: Point) -> str:
        """Points are alike when they differ in numbers only."""
        return json.dumps({n: v for n, v in sorted(point.items()) if not isinstance(v, int | float | list)})

    def add(self, point: Point, seconds: float) -> None:
        """Remember how long a point took."""
        if self._deadline is not None:
            self._seconds.setdefault(self._kind(point), []).append(seconds)

    def _expected_s(self, point: Point) -> float:
        alike = self._seconds.get(self._kind(point)) or [s for part in self._seconds.values() for s in part]
        return statistics.median(alike) if alike else 0.0

    def limit(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches that are expected to end in time."""
        for batch in batches:
            expected_s = sum(self._expected_s(point) for _, point in batch)
            if self._deadline is not None and time.monotonic() + expected_s >= self._deadline:
                self.stopped = True
                return
            yield batch
