"""Why a field differs between two runs: asked for, implied by what was asked for, incidental, or unexplained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from labkit.decide.ratios import MATCHED
from labkit.engines.roles import holds_for
from labkit.engines.tables import read_table
from labkit.quality import SPREAD, kinds

ABSENT = "(absent)"
# Differ between any two runs, or are derived from fields that are compared themselves.
INCIDENTAL = (
    *("run_id", "command", "time", "started", "ended", "sessions", "counts", "complete", "num_points", "num_rows"),
    *("num_rounds", "journal_bytes", "sha256", "plan_digest", "environment_digest", "sm_clock_mhz", "temperature_c"),
    "group",
)
_OF_BACKEND = ("backend_digest", "resolved_kernel")
# Fields that come with an asked-for one. The driver is not among them: it can be the same on another GPU.
IMPLIED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("backend", "verify_backend", "decode_backend", "draft_backend"), _OF_BACKEND),
    "gpu": (
        "calibration",
        *(f"device.{name}" for name in ("slug", "name", "kind", "num_cores", "memory_mib", "power_limit_w")),
        *(f"device.{name}_mhz" for name in ("sm_clock_max", "memory_clock_max", "sm_clock_applied")),
    ),
}
# Fields whose change switches speculation on or off, or changes how it drafts.
SPECULATION = (
    *("arm", "speculative_algorithm", "speculative_config", "spec_type", "drafter", "speculation"),
    *("num_speculative_tokens", "speculative_num_draft_tokens", "speculative_num_steps"),
)
# Calibration is measured anew by each run. Of its numbers only these rates tell another machine state (throttled,
# shared), when they differ by more than the tolerance; spreads and resolutions are noise.
CALIBRATED_RATES = ("read_gb_per_s", "matrix_tflops_per_s")
CALIBRATION_TOLERANCE = 0.1


@dataclass(frozen=True)
class Sorter:
    """Sorts the differences of one pair of runs; ``differing``: field -> both values."""

    named: Mapping[str, str]  # field -> asked_for or allowed
    differing: Mapping[str, tuple[Any, Any]]
    same_code: bool
    engine: str | None
    version: str | None

    def kind(self, field: str, a: Any, b: Any) -> tuple[str, str]:
        """Kind of a difference and the reason for it."""
        for name, kind in self.named.items():
            if covers(name, field):
                return kind, f"{kind.replace('_', ' ')}: {name}"
            if self._comes_with(name, field, a, b):
                return kind, f"comes with {name}"
            if kind == "asked_for" and (why := self._implied(name, field, a, b)):
                return "implied", why
        last = field.rsplit(".", 1)[-1]
        if any(covers(name, field) for name in INCIDENTAL):
            return "incidental", "differs between any two runs or follows from other fields"
        if last in ("commit", "dirty") and self.same_code:
            return "incidental", "the measuring code is the same"
        if last == "quality" and _doubts(a) == _doubts(b):
            return "incidental", "spread of the samples, which the interval holds, or the same doubts on both sides"
        if covers("calibration", field):
            if not any(covers(rate, field) for rate in CALIBRATED_RATES):
                return "incidental", "measured anew, no rate"
            if field.replace("matrix_tflops_per_s", "matrix_spread") + ".size" in self.differing:
                return "incidental", "measured with matrices of another size"
            if _close(a, b):
                return "incidental", f"measured anew, within {CALIBRATION_TOLERANCE:.0%}"
        if last in MATCHED and isinstance(a, list) and isinstance(b, list) and set(map(repr, a)) & set(map(repr, b)):
            return "incidental", "only the common values are compared"
        return "unexplained", "neither asked for nor allowed"

    def _comes_with(self, name: str, field: str, a: Any, b: Any) -> bool:
        """Whether a field follows from a named one: by the table, or as the digest of a value only one side has."""
        if any(covers(implied, field) for implied in IMPLIED.get(name.rsplit(".", 1)[-1], ())):
            return True
        if "digest" not in field or ABSENT not in (a, b):
            return False
        sides = [side for other, pair in self.differing.items() if covers(name, other) for side in pair]
        values = {str(value) for side in sides for value in (side if isinstance(side, list) else [side])}
        return bool(values & set(field.split(".")))

    def _implied(self, name: str, field: str, a: Any, b: Any) -> str | None:
        """What the table says of a field that an engine changes by itself; None where it says nothing of the kind.

        Side b is the one that speculates, unless the named field is empty there and not in a.
        """
        if name.rsplit(".", 1)[-1] not in SPECULATION:
            return None
        sides = [pair for other, pair in self.differing.items() if covers(name, other)]
        swapped = any(_empty(pair[1]) and not _empty(pair[0]) for pair in sides)
        plain, speculative = (b, a) if swapped else (a, b)
        for row in read_table("engine_implied_changes.csv"):
            known = row["engine"] == self.engine and holds_for(self.version, row["version_from"], row["version_to"])
            if known and covers(row["field"], field) and _as_expected(row["expects"], plain, speculative):
                return f"{row['why']} ({row['source'].split(';')[0]})"
        return None


def _empty(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(item in (None, ABSENT, "", "none", "None", "null", "plain", 0) for item in values)


def _as_expected(expects: str, plain: Any, speculative: Any) -> bool:
    """Whether a value went where the table says: any, lower, or one value (a truth value in any spelling)."""
    if expects == "any":
        return True
    if expects == "lower":
        pair = pd.to_numeric(pd.Series([speculative, plain], dtype=object), errors="coerce")
        return bool(pair[0] < pair[1])
    return str(speculative).lower() == expects


def _doubts(values: Sequence[str]) -> set[str]:
    return {kind for value in values for kind in kinds(value)} - {"ok", *SPREAD}


def covers(name: str, field: str) -> bool:
    """Whether the parts of `name` occur in a row in the path `field`."""
    return f".{name}." in f".{field}."


def _close(a: Any, b: Any) -> bool:
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (a, b))
    return numbers and bool(np.isclose(a, b, rtol=CALIBRATION_TOLERANCE))
