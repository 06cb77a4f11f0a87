"""The stored rows that the explorer chooses from: what there is, what one choice keeps, why it keeps nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

from labkit.decide import acceptance_join
from labkit.decide.best_k import cut_acceptance
from labkit.decide.composed import cost_rows
from labkit.decide.step_costs import PARTS
from labkit.decide.surface import read_rates
from labkit.errors import InputError
from labkit.results import experiments_in, find_runs, load_runs, load_sidecars
from labkit.rows import distinct, fullest, is_missing, matching

# Each is narrowed by those before it, in this order.
COST_FIELDS = ("gpu", "target", "drafter", "weight_dtype", "kv_dtype", "batch_size", "num_speculative_tokens")
_COST_COLUMNS = (
    *("run_id", "group", "round", "arm", "status", "quality", "origin", "gpu", "target", "drafter", "weight_dtype"),
    *("kv_dtype", "linear_backend", "launch_mode", "batch_size", "context_len", "num_speculative_tokens"),
    *("num_drafted_tokens", "verify_backend", "draft_backend", "decode_backend", "pairing"),
    *PARTS,
    "step_ms",
)
_ACCEPTANCE_COLUMNS = (*acceptance_join.GROUP, *acceptance_join.NEEDED[5:], "run_id", "status", "origin", "top_p")
_ACCEPTANCE_COLUMNS += ("weight_dtype", "kv_dtype")
Imposed = tuple[float, float, float]


@dataclass(frozen=True)
class Choice:
    """What is looked at. ``None`` in a dtype or workload stands for rows that do not name one.

    pairings : `pairing` of the verify (and draft) backends to draw.
    acceptance_length : typed length and its bounds, tokens per step; None takes the acceptance of ``workload``.
    context_len : where the read-outs are taken, tokens.
    context_range : contexts in which crossings are looked for, tokens; None is all of them.
    baseline : as in `labkit.breakeven.breakeven`.
    """

    gpu: str
    target: str
    drafter: str
    weight_dtype: str | None
    kv_dtype: str | None
    batch_size: int
    num_speculative_tokens: int
    pairings: tuple[str, ...]
    workload: str | None
    context_len: int
    acceptance_length: Imposed | None = None
    context_range: tuple[int, int] | None = None
    baseline: str = "fastest"


def pairing(rows: pd.DataFrame) -> pd.Series:
    """What verifies, and what drafts where that is another backend: ``fa3`` or ``fa3 + sdpa draft``."""
    drafts = rows["draft_backend"] if "draft_backend" in rows else [None] * len(rows)
    names = [
        verify if is_missing(verify) or is_missing(draft) or draft == verify else f"{verify} + {draft} draft"
        for verify, draft in zip(rows["verify_backend"], drafts, strict=True)
    ]
    return pd.Series(names, rows.index, dtype=object)


def usual_length(k: int) -> Imposed:
    """A typed length to begin with: half of ``k`` drafts kept, give or take a tenth."""
    middle = 1 + k / 2
    return (middle, max(1.0, round(0.9 * middle, 2)), round(1.1 * middle, 2))


class StoredRows:
    """Cost and acceptance rows of every device, of several temperatures those of 0. Raises InputError: no cost rows."""

    def __init__(
        self,
        rows: pd.DataFrame,
        acceptance: pd.DataFrame | None = None,
        files: Sequence[Path] = (),
        read_gb_per_s: Mapping[str, float] | None = None,
    ):
        costs = cost_rows(rows)
        costs = costs[costs["status"] == "ok"] if "status" in costs else costs
        if costs.empty:
            raise InputError("explorer: no cost rows with status ok; `labkit run loop` makes some")
        self.costs = _light(costs.assign(pairing=pairing(costs)), _COST_COLUMNS)
        self.acceptance = pd.DataFrame()
        if acceptance is not None:
            acceptance = fullest(acceptance, ["temperature"], acceptance)[0]
            ks = costs["num_speculative_tokens"].dropna().astype(int).unique()
            self.acceptance = _light(cut_acceptance(acceptance, [int(k) for k in ks]), _ACCEPTANCE_COLUMNS)
        self.files, self.read_gb_per_s = {file.stem: file for file in files}, read_gb_per_s
        # Masks over all rows, made once per value: narrowing is then a few logical ands.
        self._holds = lru_cache(maxsize=None)(lambda name, value: self.costs[name].isin([value]).to_numpy(bool))
        self._groups = self.costs.groupby(["run_id", "group"], dropna=False).ngroup().to_numpy()

    @classmethod
    def load(cls, *paths: Path | str) -> Self:
        """From stored runs, by default LABKIT_DATA or ``data/runs``: loop and step runs, acceptance if there is any.

        Raises InputError: no cost runs, or a broken one.
        """
        there = experiments_in(*paths)
        if not there & {"loop", "step"}:
            raise InputError("explorer: no loop or step runs; `labkit run loop` makes some")
        names = [name for name in ("loop", "step", "acceptance") if name in there]
        files = [run.path for name in names for run in find_runs(name, *paths)]
        rows = pd.concat([load_runs(name, *paths) for name in names if name != "acceptance"], ignore_index=True)
        sidecars = {run_id: sidecar for name in names for run_id, sidecar in load_sidecars(name, *paths).items()}
        acceptance = load_runs("acceptance", *paths) if "acceptance" in there else None
        return cls(rows, acceptance, files, read_rates(sidecars))

    def values(self, name: str) -> list[Any]:
        """What there is to choose from, whatever else is chosen; None last where some rows do not tell."""
        if name == "workload":
            return distinct(self.acceptance, "workload") or [None]
        rows = self.costs if name != "pairings" else self.costs.rename(columns={"pairing": "pairings"})
        rows = rows[rows["arm"] == "speculative"]
        found: list[Any] = distinct(rows, name)
        found = [int(value) if isinstance(value, float) else value for value in found]
        unnamed = name in ("weight_dtype", "kv_dtype") and (name not in rows or rows[name].isna().any())
        return [*found, None] if unnamed else found

    def first(self) -> Choice:
        """Where to begin: the fullest device, model, drafter and text, with acceptance if there is any."""
        rows = self.costs[self.costs["arm"] == "speculative"]
        names = ["target", "drafter", "num_speculative_tokens"]
        known = set(self.acceptance[names].itertuples(index=False, name=None)) if len(self.acceptance) else set()
        joins = pd.Series([key in known for key in rows[names].itertuples(index=False, name=None)], rows.index)
        rows = rows[joins] if joins.any() else rows
        chosen: dict[str, Any] = {}
        for name in COST_FIELDS:
            counts = rows[name].value_counts() if name in rows else pd.Series(dtype=int)
            chosen[name] = None if counts.empty else counts.index[0]
            # Of equals the largest k and the smallest batch: the usual case of a single user.
            if name in ("batch_size", "num_speculative_tokens"):
                values = counts[counts >= 0.5 * counts.max()].index
                chosen[name] = int(min(values) if name == "batch_size" else max(values))
            rows = rows if chosen[name] is None else rows[rows[name] == chosen[name]]
        contexts = distinct(rows, "context_len")
        own = matching(self.acceptance, {name: chosen[name] for name in names})
        texts = own["workload"].value_counts() if len(own) else pd.Series(dtype=int)
        choice = Choice(
            **chosen,
            pairings=tuple(distinct(rows, "pairing"))[:4],
            workload=min(texts.index, key=lambda name: (-texts[name], name), default=None),
            context_len=int(contexts[len(contexts) // 2]),
        )
        return choice if joins.any() else replace(choice, acceptance_length=usual_length(choice.num_speculative_tokens))

    def cost_rows(self, choice: Choice) -> pd.DataFrame:
        """The chosen speculative arms, and the plain arms of their groups. Raises as `chosen`."""
        kept = self.chosen(choice)
        same_groups = np.isin(self._groups, np.unique(self._groups[kept]))
        return self.costs[kept | (self._holds("arm", "plain") & same_groups)]

    def chosen(self, choice: Choice) -> np.ndarray:
        """Which cost rows are the chosen speculative arms, bool [num_rows].

        Raises InputError: nothing was measured there; the message names the first field that leaves nothing, and what
        there is instead.
        """
        kept = self._holds("arm", "speculative")
        told: list[str] = []
        for name in (*COST_FIELDS, "pairings"):
            wanted, column = getattr(choice, name), "pairing" if name == "pairings" else name
            if name == "pairings" and not wanted:
                raise InputError("no backend is chosen; choose at least one")
            if column not in self.costs or (wanted is None and self.costs[column][kept].isna().all()):
                continue
            fits = [self._holds(column, value) for value in (wanted if name == "pairings" else [wanted])]
            narrowed = kept & np.logical_or.reduce(fits)
            if not narrowed.any():
                where = f" with {', '.join(told[-3:])}" if told else ""
                there = _listed(self.costs[kept], column)
                raise InputError(f"{_said(name, wanted)} was not measured{where}; there: {there}")
            told.append(_said(name, wanted))
            kept = narrowed
        return kept

    def acceptance_rows(self, choice: Choice) -> pd.DataFrame:
        """Acceptance rows of a choice. Raises InputError: none were measured; what there is instead."""
        rows = self.acceptance
        if rows.empty:
            raise InputError("no acceptance was measured; type a length instead")
        rows = rows[rows["workload"] == choice.workload]
        for name in ("target", "drafter", "num_speculative_tokens"):
            kept = rows[rows[name] == getattr(choice, name)]
            if kept.empty:
                text = f"no acceptance of {_said(name, getattr(choice, name))} on {choice.workload or 'this text'}"
                raise InputError(f"{text} (measured: {_listed(rows, name) or 'none'}); type a length instead")
            rows = kept
        return rows


def _light(rows: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """The columns that verdicts need, texts as objects: half the time of every selection."""
    kept = rows[[name for name in names if name in rows]]
    for name in [str(name) for name in kept if isinstance(kept[name].dtype, pd.StringDtype)]:
        kept = kept.assign(**{name: kept[name].astype(object).where(kept[name].notna(), None)})
    return kept


def _listed(rows: pd.DataFrame, column: str) -> str:
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in distinct(rows, column))


def _said(name: str, value: Any) -> str:
    if name == "num_speculative_tokens":
        return f"k = {value}"
    if name == "batch_size":
        return f"batch {value}"
    return ", ".join(value) if name == "pairings" else str(value)
