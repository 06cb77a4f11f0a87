"""Two runs side by side: every field that differs, and whether each difference was asked for.

`compare_runs` works on sidecars as plain dicts and on frames, so it needs no file format. A ratio is given only when
nothing that could explain it was left to chance: one difference is meant, further ones are allowed by name, and the
rest either cannot change a number or makes the comparison refuse.
"""

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.decide.differences import ABSENT, Sorter, covers
from labkit.decide.ratios import MATCHED, ONE_LAUNCH, ratio_table, time_column
from labkit.errors import InputError
from labkit.results import load_runs, read_sidecar, run_files
from labkit.rows import distinct, plain_record

# Conditions of the rows that a sidecar need not name.
ROW_FIELDS = (
    *MATCHED,
    *("linear_backend", "weight_dtype", "q_dtype", "kv_dtype", "launch_mode", "l2_state", "page_order", "page_size"),
    *("backend_digest", "resolved_kernel", "temperature", "top_p", "prompt_digest", "origin", "quality"),
    *("prompt_id", "request_digest", "num_cached_tokens", "num_output_tokens", "num_prompt_tokens"),
)


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
            "ratios": [plain_record(row) for row in ratios],
        }

    def to_text(self) -> str:
        """Differences by kind, problems, and the ratios or why there are none."""
        lines = []
        common = [item for item in self.of_kind("incidental") if item.field.startswith("rows.")]
        for item in (
            *(i for kind in ("asked_for", "implied", "allowed", "unexplained") for i in self.of_kind(kind)),
            *common,
        ):
            lines.append(f"{item.kind.replace('_', ' '):12} {item.field}: {_sides(item.a, item.b)} ({item.why})")
        if others := [item.field.split(".")[0] for item in self.of_kind("incidental") if item not in common]:
            lines.append(f"incidental   {len(others)} more, of {', '.join(dict.fromkeys(others))} (--json lists them)")
        lines += [f"problem      {problem}" for problem in self.problems]
        if not self.comparable:
            why = [f"{len(self.unexplained)} unexplained differences"] * bool(self.unexplained)
            why += [f"{len(self.problems)} problems"] * bool(self.problems)
            lines.append(
                f"not comparable: {' and '.join(why)} forbid a ratio; --varying and --allow name what may differ"
            )
        elif self.ratios is not None:
            lines += _ratio_lines(self.ratios)
            if (self.ratios["claim"] == ONE_LAUNCH).any() and not self.ratios["paired"].all():
                lines.append("unpaired: drift, and what differs between two launches as such, are not in the interval")
                lines.append("within one launch: undecided between launches; measure each side in two or more")
        else:
            lines.append("nothing to compare: no time that both sides hold")
        return "\n".join(lines)


def _sides(a: Any, b: Any) -> str:
    """Both values in short; of lists with a common part, what only one of them has."""
    both = isinstance(a, list) and isinstance(b, list) and any(item in b for item in a)
    if both:
        only = [[item for item in side if item not in other] for side, other in ((a, b), (b, a))]
        return ", ".join(f"only {name}: {_short(items)}" for name, items in zip("AB", only, strict=True) if items)
    return f"{_short(a)} -> {_short(b)}"


def _ratio_lines(ratios: pd.DataFrame) -> list[str]:
    """The ratios as a table; what is the same in all its rows stands above it."""
    known = [name for name in (*MATCHED, "claim") if name in ratios]
    same = {name: ratios[name].iloc[0] for name in known if ratios[name].nunique(dropna=False) == 1}
    table = ratios.drop(columns=[*same, "column", "ratio_low", "ratio_high", "paired"])
    bounds = ratios[["ratio", "ratio_low", "ratio_high"]].itertuples(index=False)
    table["ratio"] = [f"{ratio:.3f} [{low:.3f}, {high:.3f}]" for ratio, low, high in bounds]
    told = ", ".join(f"{name} {value}" for name, value in same.items() if not pd.isna(value))
    text = table.to_string(index=False, na_rep="", float_format=lambda value: f"{value:.4g}")
    return [f"B over A of {ratios['column'].iloc[0]}, 95 % intervals ({told})", text]


def _short(value: Any) -> str:
    return textwrap.shorten(str(value), 60, placeholder=" ...")


def compare_runs(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    *,
    rows_a: pd.DataFrame | None = None,
    rows_b: pd.DataFrame | None = None,
    varying: str | None = None,
    allow: Sequence[str] = (),
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
        if not any(covers(name, field) for field in names):
            axes = ", ".join(field for field in names if field.startswith(("grid.", "rows.")))
            raise InputError(f"{name!r} is no field of these runs; the axes are {axes or 'none'}")
    pairs = {name: (fields_a.get(name, ABSENT), fields_b.get(name, ABSENT)) for name in names}
    differing = {name: pair for name, pair in pairs.items() if not _equal(*pair)}
    code_a, code_b = pairs.get("code_digest", (None, ABSENT))
    engine, version = (_told(name, fields_b) for name in ("engine", "engine_version"))
    sort = Sorter(named, differing, code_a == code_b, engine, version)
    differences = tuple(Difference(name, *pair, *sort.kind(name, *pair)) for name, pair in differing.items())
    varies = not varying or any(item.kind == "asked_for" for item in differences)
    comparison = Comparison(differences, () if varies else (f"{varying} is the same on both sides",), None)
    if rows_a is None or rows_b is None or not comparison.comparable or time_column(rows_a, rows_b) is None:
        return comparison
    ignoring = [name for name in MATCHED if any(covers(given, f"rows.{name}") for given in named)]
    return Comparison(differences, (), ratio_table(rows_a, rows_b, ignoring=ignoring))


def compare_files(path_a: Path, path_b: Path, **options: Any) -> Comparison:
    """`compare_runs` of two stored runs, each a run's file or a folder; options are passed on.

    A folder may hold several runs of the same thing: launches, whose spread is then in the interval.

    Raises InputError: as `compare_runs`; or a path holds no run, a broken one, or runs that differ in more than chance.
    """
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
    if a["experiment"] != b["experiment"]:
        kinds = f"{a['experiment']} and {b['experiment']}"
        raise InputError(f"runs to compare: wanted two of one experiment, got {kinds}")
    return compare_runs(a, b, rows_a=rows_a, rows_b=rows_b, **options)


def _told(name: str, fields: Mapping[str, Any]) -> str | None:
    """The engine or its version, wherever the sidecar or the rows have it."""
    found = [value for path, value in fields.items() if path.rsplit(".", 1)[-1] == name and value]
    first = found[0][0] if found and isinstance(found[0], list) else found[0] if found else None
    return None if first is None else str(first)


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


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return sorted(map(repr, a)) == sorted(map(repr, b))
    return bool(a == b)


def run_from_arguments(arguments: argparse.Namespace) -> tuple[dict[str, Any], str, int]:
    """`labkit compare`: 1 where the runs cannot be compared."""
    found = compare_files(*arguments.runs, varying=arguments.varying, allow=arguments.allow)
    return found.to_dict(), found.to_text(), int(not found.comparable)
