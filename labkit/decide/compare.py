"""Two runs side by side: every field that differs, and whether each difference was asked for.

`compare_runs` works on sidecars as plain dicts and on frames, so it needs no file format. A ratio is given only when
nothing that could explain it was left to chance: one difference is meant, further ones are allowed by name, and the
rest either cannot change a number or makes the comparison refuse.
"""

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit.decide.ratios import MATCHED, ONE_LAUNCH, ratio_table, time_column
from labkit.engines.roles import version_key
from labkit.engines.tables import read_table
from labkit.errors import InputError
from labkit.quality import SPREAD, kinds
from labkit.rows import distinct, json_value

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
# Conditions of the rows that a sidecar need not name.
ROW_FIELDS = (
    *MATCHED,
    *("linear_backend", "weight_dtype", "q_dtype", "kv_dtype", "launch_mode", "l2_state", "page_order", "page_size"),
    *("backend_digest", "resolved_kernel", "temperature", "top_p", "prompt_digest", "origin", "quality"),
    *("prompt_id", "request_digest", "num_cached_tokens", "num_output_tokens", "num_prompt_tokens"),
)
# Calibration is measured anew by each run. Of its numbers only these rates tell another machine state (throttled,
# shared), when they differ by more than the tolerance; spreads and resolutions are noise.
CALIBRATED_RATES = ("read_gb_per_s", "matrix_tflops_per_s")
CALIBRATION_TOLERANCE = 0.1


@dataclass(frozen=True)
class Difference:
    """One field that differs. `kind`: asked_for, implied, allowed, incidental or unexplained; `why` says what decided.

    Implied is what an engine changes by itself when speculation is switched on, by the table
    ``data/reference/engine_implied_changes.csv``.
    """

    field: str
    a: Any
    b: Any
    kind: str
    why: str


@dataclass(frozen=True)
class Comparison:
    """Differences, what else forbids a ratio, and the ratio per cell.

    `ratios` is None unless the runs are comparable and rows with a time were given on both sides.
    """

    differences: tuple[Difference, ...]
    problems: tuple[str, ...]
    ratios: pd.DataFrame | None

    def of_kind(self, kind: str) -> tuple[Difference, ...]:
        """The differences of one kind."""
        return tuple(difference for difference in self.differences if difference.kind == kind)

    @property
    def unexplained(self) -> tuple[Difference, ...]:
        """The differences that refuse the comparison."""
        return self.of_kind("unexplained")

    @property
    def comparable(self) -> bool:
        """Nothing unexplained and no problem."""
        return not self.unexplained and not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; null where unknown."""
        ratios = [] if self.ratios is None else self.ratios.astype(object).to_dict("records")
        return {
            "comparable": self.comparable,
            "problems": list(self.problems),
            "differences": [asdict(difference) for difference in self.differences],
            "ratios": [{str(name): json_value(value) for name, value in row.items()} for row in ratios],
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False, default=str)

    def to_text(self) -> str:
        """Differences by kind, problems, and the ratios or why there are none."""
        lines = []
        for kind in ("asked_for", "implied", "allowed", "unexplained", "incidental"):
            for item in self.of_kind(kind):
                values = " -> ".join(textwrap.shorten(str(side), 60, placeholder=" ...") for side in (item.a, item.b))
                lines.append(f"{kind.replace('_', ' '):12} {item.field}: {values} ({item.why})")
        lines += [f"problem      {problem}" for problem in self.problems]
        if not self.comparable:
            lines.append("not comparable: the differences marked unexplained and the problems forbid a ratio")
        elif self.ratios is not None:
            lines.append(self.ratios.to_string(index=False, float_format=lambda value: f"{value:.4g}"))
            if (self.ratios["claim"] == ONE_LAUNCH).any() and not self.ratios["paired"].all():
                lines.append("unpaired: drift, and what differs between two launches as such, are not in the interval")
                lines.append("within one launch: undecided between launches; measure each side in two or more")
        else:
            lines.append("nothing to compare: no time that both sides hold")
        return "\n".join(lines)


def compare_runs(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    *,
    rows_a: pd.DataFrame | None = None,
    rows_b: pd.DataFrame | None = None,
    varying: str | None = None,
    allow: Sequence[str] = (),
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Comparison:
    """List and sort every difference between two runs; give the ratio B over A when none is unexplained.

    a, b : sidecars as dicts.
    rows_a, rows_b : rows of the runs, or two selections of one run (then the ratio is paired). Optional: without them
        only the sidecars are compared.
    varying : the one field that is meant to differ: a sidecar path such as ``grid.verify_backend``, any part of one
        (``verify_backend``, ``versions.torch``), or a column of the rows.
    allow : further fields that may differ, named in the same way.

    Raises InputError: `varying` or `allow` names no field, only one of `rows_a` and `rows_b` is given, or the rows
    share no cell.
    """
    if (rows_a is None) != (rows_b is None):
        raise InputError("rows_a and rows_b must be given together")
    fields_a, fields_b = _flat(a), _flat(b)
    if rows_a is not None and rows_b is not None:
        fields_a |= _row_fields(rows_a)
        fields_b |= _row_fields(rows_b)
    names = sorted(set(fields_a) | set(fields_b))
    named = {varying: "asked_for"} if varying else {}
    named |= {name: "allowed" for name in allow if name != varying}
    for name in named:
        if not any(_covers(name, field) for field in names):
            axes = ", ".join(field for field in names if field.startswith(("grid.", "rows.")))
            raise InputError(f"{name!r} is no field of these runs; the axes are {axes or 'none'}")
    pairs = {name: (fields_a.get(name, ABSENT), fields_b.get(name, ABSENT)) for name in names}
    differing = {name: pair for name, pair in pairs.items() if not _equal(*pair)}
    code_a, code_b = pairs.get("code_digest", (None, ABSENT))
    engine, version = (_told(name, fields_b) for name in ("engine", "engine_version"))
    sort = _Sorter(named, differing, code_a == code_b, engine, version)
    differences = tuple(Difference(name, *pair, *sort.kind(name, *pair)) for name, pair in differing.items())
    varies = not varying or any(item.kind == "asked_for" for item in differences)
    comparison = Comparison(differences, () if varies else (f"{varying} is the same on both sides",), None)
    if rows_a is None or rows_b is None or not comparison.comparable or time_column(rows_a, rows_b) is None:
        return comparison
    ignoring = [name for name in MATCHED if any(_covers(given, f"rows.{name}") for given in named)]
    options: dict[str, Any] = {"confidence": confidence, "resamples": resamples, "seed": seed}
    return Comparison(differences, (), ratio_table(rows_a, rows_b, ignoring=ignoring, **options))


def compare_files(path_a: Path, path_b: Path, **options: Any) -> Comparison:
    """`compare_runs` of two stored runs, each a run's file or a folder; options are passed on.

    A folder may hold several runs of the same thing: launches, whose spread is then in the interval.

    Raises InputError: as `compare_runs`; or a path holds no run, a broken one, or runs that differ in more than chance.
    """
    from labkit.results import load_runs, read_sidecar, run_files

    sides = []
    for path in (Path(path_a), Path(path_b)):
        files = run_files(path)
        if not files:
            raise InputError(f"{path}: wanted a run to compare, found none")
        first, *others = [read_sidecar(file) for file in files]
        for other in others:
            if found := compare_runs(first, other).unexplained:
                raise InputError(f"{path}: wanted launches of one run to compare; they differ in {found[0].field}")
        sides.append((first, load_runs(first["experiment"], *files)))
    (a, rows_a), (b, rows_b) = sides
    return compare_runs(a, b, rows_a=rows_a, rows_b=rows_b, **options)


@dataclass(frozen=True)
class _Sorter:
    named: Mapping[str, str]  # field -> asked_for or allowed
    differing: Mapping[str, tuple[Any, Any]]
    same_code: bool
    engine: str | None
    version: str | None

    def kind(self, field: str, a: Any, b: Any) -> tuple[str, str]:
        """Kind of a difference and the reason for it."""
        for name, kind in self.named.items():
            if _covers(name, field):
                return kind, f"{kind.replace('_', ' ')}: {name}"
            if self._comes_with(name, field, a, b):
                return kind, f"comes with {name}"
            if kind == "asked_for" and (why := self._implied(name, field, a, b)):
                return "implied", why
        last = field.rsplit(".", 1)[-1]
        if any(_covers(name, field) for name in INCIDENTAL):
            return "incidental", "differs between any two runs or follows from other fields"
        if last in ("commit", "dirty") and self.same_code:
            return "incidental", "the measuring code is the same"
        if last == "quality" and _doubts(a) == _doubts(b):
            return "incidental", "spread of the samples, which the interval holds, or the same doubts on both sides"
        if _covers("calibration", field):
            if not any(_covers(rate, field) for rate in CALIBRATED_RATES):
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
        if any(_covers(implied, field) for implied in IMPLIED.get(name.rsplit(".", 1)[-1], ())):
            return True
        if "digest" not in field or ABSENT not in (a, b):
            return False
        sides = [side for other, pair in self.differing.items() if _covers(name, other) for side in pair]
        values = {str(value) for side in sides for value in (side if isinstance(side, list) else [side])}
        return bool(values & set(field.split(".")))

    def _implied(self, name: str, field: str, a: Any, b: Any) -> str | None:
        """What the table says of a field that an engine changes by itself; None where it says nothing of the kind.

        Side b is the one that speculates, unless the named field is empty there and not in a.
        """
        if name.rsplit(".", 1)[-1] not in SPECULATION:
            return None
        sides = [pair for other, pair in self.differing.items() if _covers(name, other)]
        swapped = any(_empty(pair[1]) and not _empty(pair[0]) for pair in sides)
        plain, speculative = (b, a) if swapped else (a, b)
        for row in read_table("engine_implied_changes.csv"):
            version = version_key(self.version)
            low, high = version_key(row["version_from"]), version_key(row["version_to"])
            known = row["engine"] == self.engine and (not version or low <= version <= high)
            if known and _covers(row["field"], field) and _as_expected(row["expects"], plain, speculative):
                return f"{row['why']} ({row['source'].split(';')[0]})"
        return None


def _told(name: str, fields: Mapping[str, Any]) -> str | None:
    """The engine or its version, wherever the sidecar or the rows have it."""
    found = [value for path, value in fields.items() if path.rsplit(".", 1)[-1] == name and value]
    first = found[0][0] if found and isinstance(found[0], list) else found[0] if found else None
    return None if first is None else str(first)


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


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted path -> value; lists stay whole."""
    fields: dict[str, Any] = {}
    for name, item in value.items():
        path = f"{prefix}{name}"
        fields |= _flat(item, f"{path}.") if isinstance(item, Mapping) and item else {path: item}
    return fields


def _row_fields(rows: pd.DataFrame) -> dict[str, list[Any]]:
    ok = rows[rows["status"] == "ok"] if "status" in rows else rows
    return {f"rows.{name}": distinct(ok, name) for name in ROW_FIELDS if name in ok and ok[name].notna().any()}


def _doubts(values: Sequence[str]) -> set[str]:
    return {kind for value in values for kind in kinds(value)} - {"ok", *SPREAD}


def _covers(name: str, field: str) -> bool:
    """Whether the parts of `name` occur in a row in the path `field`."""
    return f".{name}." in f".{field}."


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return sorted(map(repr, a)) == sorted(map(repr, b))
    return bool(a == b)


def _close(a: Any, b: Any) -> bool:
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (a, b))
    return numbers and bool(np.isclose(a, b, rtol=CALIBRATION_TOLERANCE))
