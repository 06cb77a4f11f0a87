"""Whether the samples of a point can be trusted, and when to take more of them.

Every sample is kept; `judge` says what is wrong with them, in the words that `labkit run`, the verdict and `compare`
show. Nothing here needs torch.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from labkit.device_state import DeviceState

# A median must be this many noise floors; at most this share may exceed this multiple of the median.
NOISE_FLOOR_MULTIPLE = 10.0
OUTLIER_MULTIPLE, OUTLIER_SHARE = 1.5, 0.10
# The clock may move by this share between rounds; other processes may have this share of the device.
CLOCK_TOLERANCE, SHARED_TOLERANCE = 0.05, 0.10
# Drift: the last third of the rounds against the first, beyond this share and beyond chance (p < 0.001).
DRIFT_TOLERANCE, _DRIFT_DEVIATIONS = 0.05, 3.29
# 95 %: half the interval of a median is about 1.96 x 1.2533 standard errors of the mean (normal samples).
_MEDIAN_HALF_WIDTH = 1.96 * 1.2533
_MAD_TO_DEVIATION = 1.4826

# The judgements that only say that samples spread, which an interval holds already.
SPREAD = ("unstable", "wide interval")


def judge(
    samples: Mapping[int, Sequence[float]] | Sequence[float],
    *,
    noise_floor_us: float | None = None,
    states: Sequence[DeviceState] = (),
    widest: float | None = None,
) -> str:
    """``ok``, or everything that is doubtful about samples of one quantity, joined by ``; ``.

    samples : All samples, ms; without rounds each is a round of its own.
    noise_floor_us : Time of timing nothing (`labkit.calibrate.calibrate`), us; without it that rule is not applied.
    states : The device beside each round (`labkit.device_state.monitor`).
    widest : The 95 % interval of the median, as a share of it, above which it is called wide.

    below noise floor: the median is less than 10 times the noise floor, so that the timer is over 10 % of it.
    throttled (why): the device reported so beside at least one round.
    clock changed (from to): its clock moved by more than 5 % between rounds.
    device shared (why): other processes had more than 10 % of it.
    drifting (by how much): the last third of the rounds differs from the first by more than 5 %, and the rounds are
    ordered beyond chance. Pairs of one round stay comparable; the time itself is doubtful.
    unstable: more than 10 % of the samples exceed 1.5 times the median. One sample alone is never unstable.
    wide interval (how wide): still wider than ``widest`` after the most rounds.
    """
    rounds = samples if isinstance(samples, Mapping) else {i: [value] for i, value in enumerate(samples)}
    values = [value for own in rounds.values() for value in own]
    if not values:
        raise ValueError("samples: wanted at least one sample, got none")
    median = statistics.median(values)
    found = []
    if noise_floor_us is not None and median * 1e3 < NOISE_FLOOR_MULTIPLE * noise_floor_us:
        found.append("below noise floor")
    found += _of_device(states)
    medians = [statistics.median(own) for _, own in sorted(rounds.items())]
    if drift := _drift(medians):
        found.append(f"drifting ({drift:+.0%} from first to last rounds)")
    if sum(value > OUTLIER_MULTIPLE * median for value in values) > OUTLIER_SHARE * len(values):
        found.append("unstable")
    if widest is not None and (width := relative_width(medians)) > widest:
        found.append("wide interval (" + (f"{width:.1%} of the median)" if len(medians) > 1 else "one round)"))
    return "; ".join(found) or "ok"


def kinds(quality: str) -> list[str]:
    """The judgements in a quality, without their numbers: ``clock changed (1980 to 1410 MHz)`` -> ``clock changed``."""
    return [part.partition(" (")[0] for part in quality.split("; ")]


def _of_device(states: Sequence[DeviceState]) -> Iterator[str]:
    if why := sorted({state.throttled for state in states if state.throttled}):
        yield f"throttled ({', '.join(why)})"
    clocks = [state.sm_clock_mhz for state in states if state.sm_clock_mhz]
    if clocks and max(clocks) - min(clocks) > CLOCK_TOLERANCE * max(clocks):
        yield f"clock changed ({clocks[0]:.0f} to {(min if clocks[0] == max(clocks) else max)(clocks):.0f} MHz)"
    shares = [state.others_share for state in states if state.others_share is not None]
    if shares and (share := statistics.fmean(shares)) > SHARED_TOLERANCE:
        yield f"device shared (other processes had {share:.0%} of it)"


def _drift(medians: Sequence[float]) -> float:
    """Change from the first third of the rounds to the last as a share, 0 where it is small or chance explains it."""
    third = len(medians) // 3
    if third < 2:
        return 0.0
    first, last = statistics.median(medians[:third]), statistics.median(medians[-third:])
    change = last / first - 1 if first else 0.0
    ranks = np.argsort(np.argsort(medians, kind="stable"), kind="stable")
    order = np.corrcoef(ranks, np.arange(len(medians)))[0, 1]  # Spearman's; its deviation by chance is 1/sqrt(n-1)
    by_chance = abs(order) * (len(medians) - 1) ** 0.5 < _DRIFT_DEVIATIONS
    return 0.0 if by_chance or abs(change) < DRIFT_TOLERANCE else change


def relative_width(medians: Sequence[float]) -> float:
    """Width of the 95 % interval of the median of rounds, as a share of it; infinite for fewer than two rounds.

    From the median absolute deviation, so that single outliers do not ask for more rounds.
    """
    if len(medians) < 2:
        return float("inf")
    median = statistics.median(medians)
    deviation = _MAD_TO_DEVIATION * statistics.median(abs(value - median) for value in medians)
    return 2 * _MEDIAN_HALF_WIDTH * deviation / len(medians) ** 0.5 / median if median else float("inf")


def round_indices(num_rounds: int, max_rounds: int, is_wide: Callable[[], bool]) -> Iterator[int]:
    """0, 1, ...: ``num_rounds`` of them, then as many again while ``is_wide()``, up to ``max_rounds`` in all."""
    done = 0
    while done < num_rounds or (done < max_rounds and is_wide()):
        end = num_rounds if done < num_rounds else min(done + num_rounds, max_rounds)
        yield from range(done, end)
        done = end


class Limits:
    """When to go on measuring a cell, from the axes of its points, and how its rows are judged at the end.

    ``max_interval_percent``: a 95 % interval of a median that is wider is wide. ``max_repeats``: while one is, the
    rounds are repeated, at most so many times ``num_rounds`` in all.
    """

    def __init__(self, point: Mapping[str, Any]):
        self.num_rounds: int = point["num_rounds"]
        self.max_rounds: int = self.num_rounds * point["max_repeats"]
        self.widest: float = point["max_interval_percent"] / 100
        self._noise_floor_us: float | None = point.get("noise_floor_us")

    @property
    def of_rounds(self) -> dict[str, Any]:
        """As `labkit.timing.sample_rounds` takes them."""
        return {"num_rounds": self.num_rounds, "max_rounds": self.max_rounds, "widest": self.widest}

    def rounds(self, arms: Sequence[Sequence[Mapping[str, Any]]], time: str, alike: Sequence[str]) -> Iterator[int]:
        """Indices of the rounds to run; the rows of the ``arms`` grow meanwhile and are looked at after each lot."""
        return round_indices(self.num_rounds, self.max_rounds, lambda: any(self._is_wide(a, time, alike) for a in arms))

    def _is_wide(self, rows: Sequence[Mapping[str, Any]], time: str, alike: Sequence[str]) -> bool:
        samples = (_by_round(own, time) for own in _groups(rows, alike))
        return any(relative_width([statistics.median(own) for own in r.values()]) > self.widest for r in samples)

    def mark(self, rows: Sequence[dict[str, Any]], time: str, alike: Sequence[str] = ()) -> None:
        """Write ``quality`` into rows with a ``round`` and a ``state``, which is taken out, judged group by group.

        time : the column with the ms. alike : columns that tell the groups apart.
        """
        for own in _groups(rows, alike):
            states = {row["round"]: row["state"] for row in own if row.get("state") is not None}
            limits = {"noise_floor_us": self._noise_floor_us, "widest": self.widest}
            quality = judge(_by_round(own, time), states=list(states.values()), **limits)
            for row in own:
                row["quality"] = quality
        for row in rows:
            row.pop("state", None)


def _groups(rows: Iterable[Any], alike: Sequence[str]) -> list[list[Any]]:
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in alike), []).append(row)
    return list(groups.values())


def _by_round(rows: Iterable[Mapping[str, Any]], time: str) -> dict[int, list[float]]:
    rounds: dict[int, list[float]] = {}
    for row in rows:
        rounds.setdefault(row["round"], []).append(row[time])
    return rounds
