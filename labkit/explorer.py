"""What the explorer shows: one choice of device, model, backends, text and sizes in, verdicts and a figure out.

No widgets here: `labkit.publish.explorer_widgets` puts controls around it, a batch draws the same figure once, and the
cell that the explorer exports calls the same functions. Everything comes from `labkit.breakeven.breakeven`, on the rows
that the choice leaves, so that a read-out equals `labkit breakeven --json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import log2
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from labkit.breakeven import Breakeven, breakeven
from labkit.decide import acceptance_join
from labkit.decide.best_k import best_k, cut_acceptance
from labkit.decide.cause import slope_causes, waterfall
from labkit.decide.composed import cost_rows
from labkit.decide.step_costs import PARTS, StepCosts, step_costs
from labkit.decide.surface import read_rates
from labkit.errors import InputError
from labkit.plots.canvas import add_header, freeze_layout, new_figure
from labkit.plots.explorer import plot_choice, plot_parts
from labkit.plots.panels import describe
from labkit.plots.style import TEXT_WIDTH_IN, format_tokens, styled
from labkit.progress import in_notebook
from labkit.results import experiments_in, find_runs, load_runs, load_sidecars
from labkit.rows import distinct, is_missing

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


class Explorer:
    """Cost and acceptance rows of every device, and what a `Choice` says about them.

    Answers are kept: going back to a choice costs nothing.

    Raises InputError: no cost rows.
    """

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
            ks = costs["num_speculative_tokens"].dropna().astype(int).unique()
            self.acceptance = _light(cut_acceptance(acceptance, [int(k) for k in ks]), _ACCEPTANCE_COLUMNS)
        self.files, self.read_gb_per_s = {file.stem: file for file in files}, read_gb_per_s
        self.result = lru_cache(maxsize=512)(self._result)
        self._kept_rows = lru_cache(maxsize=64)(self._rows)
        self._costs = lru_cache(maxsize=256)(self._step_costs)

    @classmethod
    def load(cls, *paths: Path | str) -> Explorer:
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
        """Where to begin: the fullest device, model and drafter, with acceptance if there is any."""
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
        choice = Choice(
            **chosen,
            pairings=tuple(distinct(rows, "pairing"))[:4],
            workload=self.values("workload")[0],
            context_len=int(contexts[len(contexts) // 2]),
        )
        return choice if joins.any() else replace(choice, acceptance_length=self.usual_length(choice))

    @staticmethod
    def usual_length(choice: Choice) -> Imposed:
        """A typed length to begin with: half of the drafts kept, give or take a tenth."""
        middle = 1 + choice.num_speculative_tokens / 2
        return (middle, max(1.0, round(0.9 * middle, 2)), round(1.1 * middle, 2))

    def rows(self, choice: Choice) -> pd.DataFrame:
        """Cost rows of a choice as `_rows` finds them; kept."""
        return self._kept_rows(_of_cost(choice))

    def _rows(self, choice: Choice) -> pd.DataFrame:
        """Cost rows of a choice: the chosen speculative arms, and the plain arms of their groups.

        Raises InputError: nothing was measured there; the message names the first field that leaves nothing, and what
        there is instead.
        """
        rows = self.costs[self.costs["arm"] == "speculative"]
        told: list[str] = []
        for name in (*COST_FIELDS, "pairings"):
            wanted, column = getattr(choice, name), "pairing" if name == "pairings" else name
            if name == "pairings" and not wanted:
                raise InputError("no backend is chosen; choose at least one")
            if column not in rows or (wanted is None and rows[column].isna().all()):
                continue
            kept = rows[rows[column].isin(wanted if name == "pairings" else [wanted])]
            if kept.empty:
                where = f" with {', '.join(told[-3:])}" if told else ""
                there = _listed(rows, column)
                raise InputError(f"{_said(name, wanted)} was not measured{where}; there: {there}")
            told.append(_said(name, wanted))
            rows = kept
        groups = pd.MultiIndex.from_frame(rows[["run_id", "group"]]).unique()
        plain = self.costs[self.costs["arm"] == "plain"]
        return pd.concat([rows, plain[pd.MultiIndex.from_frame(plain[["run_id", "group"]]).isin(groups)]])

    def _step_costs(self, choice: Choice) -> list[StepCosts]:
        return step_costs(self.rows(choice))

    def _result(self, choice: Choice) -> Breakeven:
        costs = self._costs(_of_cost(choice))
        if choice.context_range is not None:
            low, high = choice.context_range
            costs = [cost for cost in costs if low <= cost.key["context_len"] <= high]
            if not costs:
                raise InputError(f"no measured context between {format_tokens(low)} and {format_tokens(high)}")
        acceptance = self._lengths(choice)[0]
        found = breakeven(costs, acceptance, baseline=choice.baseline)
        return replace(found, cells=found.cells.assign(pairing=pairing(found.cells)))

    def _lengths(self, choice: Choice) -> tuple[pd.DataFrame | Imposed | None, str]:
        """The acceptance of a choice, or None and why there is none: costs are drawn alone then."""
        if choice.acceptance_length is not None:
            return choice.acceptance_length, ""
        try:
            return self._measured(choice), ""
        except InputError as error:
            return None, str(error)

    def without_acceptance(self, choice: Choice) -> str:
        """Why only costs are drawn; "" where there is an acceptance length."""
        return self._lengths(choice)[1]

    def _measured(self, choice: Choice) -> pd.DataFrame:
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

    def curve(self, choice: Choice) -> Breakeven:
        """Verdicts at every measured context, crossings within the chosen range only."""
        whole = self.result(_key(choice, context_range=None))
        if choice.context_range is None:
            return whole
        return replace(whole, crossovers=self.result(_key(choice)).crossovers)

    def contexts(self, choice: Choice) -> list[int]:
        """Measured contexts of a choice, ascending."""
        return [int(value) for value in distinct(self.rows(choice), "context_len")]

    def at_context(self, choice: Choice) -> pd.DataFrame:
        """Cells at the chosen context, or at the measured one nearest to it in log2."""
        cells = self.curve(choice).cells
        nearest = min(self.contexts(choice), key=lambda tokens: abs(log2(tokens / choice.context_len)))
        return cells[cells["context_len"] == nearest]

    def parts(self, choice: Choice) -> pd.DataFrame:
        """`labkit.decide.cause.waterfall` at the context of the read-outs: the cost by part, in tokens per step."""
        at = set(self.at_context(choice)["context_len"])
        costs = [cost for cost in self._costs(_of_cost(choice)) if cost.key["context_len"] in at]
        table = waterfall(costs, choice.baseline)
        return table.assign(pairing=pairing(table))

    def causes(self, choice: Choice) -> dict[str, str]:
        """Pairing -> diagnosis of its growth with context (`labkit.decide.cause.slope_causes`)."""
        table = slope_causes(self._costs(_of_cost(choice)), self.read_gb_per_s, choice.baseline)
        return dict(zip(pairing(table), table["diagnosis"], strict=True))

    def best(self, choice: Choice) -> pd.DataFrame:
        """`labkit.decide.best_k.best_k` per pairing at the context of the read-outs, over every measured k.

        Raises InputError: no acceptance that holds for several k.
        """
        if choice.acceptance_length is not None:
            raise InputError("best k needs measured acceptance: a typed length holds for one k")
        context = int(self.at_context(choice)["context_len"].iloc[0])
        found = []
        for k in self.values("num_speculative_tokens"):
            try:
                found.append(
                    self.result(_key(replace(choice, num_speculative_tokens=k), context_range=(context, context)))
                )
            except InputError:  # not measured with this k
                continue
        return best_k(pd.concat([one.cells for one in found]))

    def draw(self, figure: Figure, choice: Choice) -> None:
        """The picture of a choice on an empty figure: break-even, and below it where the cost comes from."""
        found, parts = self.curve(choice), self.parts(choice)
        above, below = figure.subplots(2, height_ratios=(3, 0.45 + 0.28 * parts["pairing"].nunique()))
        plot_choice(above, found, context_len=choice.context_len, context_range=choice.context_range or ())
        plot_parts(below, parts, self.at_context(choice)["mean_acceptance_length"].max())

    @styled
    def figure(self, choice: Choice, *, width_in: float = TEXT_WIDTH_IN) -> Figure:
        """The picture of a choice as a figure to save. Raises InputError as `rows`, or without acceptance."""
        figure, found = new_figure(width_in, 4.6 if width_in > 5 else 5.2), self.curve(choice)
        self.draw(figure, choice)
        add_header(figure, "Where speculative decoding pays", describe(found.cells, found.baseline))
        freeze_layout(figure)
        return figure

    def sources(self, choice: Choice) -> list[Path]:
        """Run files behind a choice, for `labkit.publish.figures.save_figure`."""
        used = set(self.rows(choice)["run_id"])
        if choice.acceptance_length is None:
            used |= set() if self.without_acceptance(choice) else set(self._measured(choice)["run_id"])
        return [file for run_id, file in self.files.items() if run_id in used]

    def code(self, choice: Choice, name: str, out_dir: str) -> str:
        """The notebook cell that draws and saves the picture of a choice."""
        values = [f"    {field.name}={getattr(choice, field.name)!r}," for field in fields(choice)]
        lines = ["from labkit.explorer import Choice, Explorer", "from labkit.publish.figures import save_figure", ""]
        lines += ["explorer = Explorer.load()", "choice = Choice(", *values, ")"]
        call = f"save_figure(explorer.figure(choice), {name!r}, explorer.sources(choice), out_dir={out_dir!r})"
        return "\n".join([*lines, call])


def _key(choice: Choice, **changes: Any) -> Choice:
    """A choice without what its verdicts do not depend on, so that moving along the context computes nothing."""
    without: dict[str, Any] = {"context_len": 0} | ({} if choice.acceptance_length is None else {"workload": None})
    return replace(choice, **{**without, **changes})


def _of_cost(choice: Choice) -> Choice:
    return _key(choice, context_range=None, acceptance_length=None, workload=None, baseline="")


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


def explore(*folders: Path | str, interactive: bool | None = None, out_dir: Path | str = "") -> Any:
    """The explorer over stored runs: a widget in a live notebook, the first choice as a figure in batch.

    interactive : None finds out (`labkit.progress.in_notebook`).
    out_dir : where exported figures go; "" is ``build/explorer``.
    """
    explorer = Explorer.load(*[folder for folder in folders if folder])
    if not (in_notebook() if interactive is None else interactive):
        return explorer.figure(explorer.first())
    from IPython.display import Javascript, display

    from labkit.publish.explorer_widgets import KEYBOARD, ExplorerWidget

    display(Javascript(KEYBOARD))
    return ExplorerWidget(explorer, out_dir)
