"""What the explorer shows: one choice of device, model, backends, text and sizes in, verdicts and a figure out.

No widgets here: `labkit.publish.explorer_widgets` puts controls around it, a batch draws the same figure once, and the
cell that the explorer exports calls the same functions. Everything comes from `labkit.breakeven.breakeven`, on the rows
that the choice leaves, so that a read-out equals `labkit breakeven --json`.
"""

import gc
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache
from math import log2
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.breakeven import Breakeven, breakeven
from labkit.decide.best_k import best_k
from labkit.decide.cause import slope_causes, waterfall
from labkit.decide.step_costs import StepCosts, step_costs
from labkit.errors import InputError
from labkit.plots.canvas import finished, new_figure
from labkit.plots.explorer import mark_context, plot_choice, plot_parts
from labkit.plots.panels import describe
from labkit.plots.style import TEXT_WIDTH_IN, format_tokens, styled
from labkit.progress import in_notebook
from labkit.publish.explorer_rows import COST_FIELDS, Choice, Imposed, StoredRows, pairing


class Explorer(StoredRows):
    """Stored rows of every device, and what a `Choice` says about them.

    Answers are kept: going back to a choice costs nothing.
    """

    def __init__(self, *rows: Any, **options: Any):
        super().__init__(*rows, **options)
        self.result = lru_cache(maxsize=512)(self._result)
        self._costs = lru_cache(maxsize=256)(self._step_costs)
        self._causes = lru_cache(maxsize=256)(self._slope_causes)
        cells = step_costs(self.costs)
        self._cells = list(zip(pairing(pd.DataFrame([cell.key for cell in cells])), cells, strict=True))

    def _step_costs(self, choice: Choice) -> list[StepCosts]:
        self.chosen(choice)  # raises where there are none, and tells why
        wanted = {name: getattr(choice, name) for name in COST_FIELDS}
        return [cell for name, cell in self._cells if name in choice.pairings and wanted.items() <= cell.key.items()]

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
            return self.acceptance_rows(choice), ""
        except InputError as error:
            return None, str(error)

    def without_acceptance(self, choice: Choice) -> str:
        """Why only costs are drawn; "" where there is an acceptance length."""
        return self._lengths(choice)[1]

    def curve(self, choice: Choice) -> Breakeven:
        """Verdicts at every measured context, crossings within the chosen range only."""
        whole = self.result(_key(choice, context_range=None))
        if choice.context_range is None:
            return whole
        return replace(whole, crossovers=self.result(_key(choice)).crossovers)

    def contexts(self, choice: Choice) -> list[int]:
        """Measured contexts of a choice, ascending."""
        return sorted({int(cost.key["context_len"]) for cost in self._costs(_of_cost(choice))})

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
        return self._causes(_of_cost(choice), choice.baseline)

    def _slope_causes(self, choice: Choice, baseline: str) -> dict[str, str]:
        table = slope_causes(self._costs(choice), self.read_gb_per_s, baseline)
        return dict(zip(pairing(table), table["diagnosis"], strict=True))

    def best(self, choice: Choice) -> pd.DataFrame:
        """`labkit.decide.best_k.best_k` per pairing at the context of the read-outs, over every measured k.

        Raises InputError: no acceptance that holds for several k.
        """
        if choice.acceptance_length is not None:
            raise InputError("best k needs measured acceptance: a typed length holds for one k")
        context = self.at_context(choice)["context_len"].iloc[0]
        cells = pd.concat([self.with_k(choice, k) for k in self.values("num_speculative_tokens")])
        return best_k(cells[cells["context_len"] == context])

    def with_k(self, choice: Choice, k: int) -> pd.DataFrame | None:
        """Verdicts of a choice at another k, None where it was not measured."""
        try:
            return self.result(_key(choice, context_range=None, num_speculative_tokens=k)).cells
        except InputError:
            return None

    @styled
    def draw(self, axes: Sequence[Axes], choice: Choice) -> None:
        """The picture of a choice on two empty axes, one below the other: break-even, and where the cost comes from."""
        plot_choice(axes[0], self.curve(choice), context_range=choice.context_range or ())
        self.draw_context(axes, choice)

    @styled
    def draw_context(self, axes: Sequence[Axes], choice: Choice) -> None:
        """What depends on the context of the read-outs: its mark above, and all of the lower, empty axes."""
        (above, below), parts = axes, self.parts(choice)
        if grid := below.get_gridspec():
            grid.set_height_ratios((3, 0.45 + 0.28 * parts["pairing"].nunique()))
        mark_context(above, choice.context_len)
        plot_parts(below, parts, self.at_context(choice)["mean_acceptance_length"].max())

    @styled
    def figure(self, choice: Choice, *, width_in: float = TEXT_WIDTH_IN) -> Figure:
        """The picture of a choice as a figure to save. Raises InputError as `cost_rows`."""
        figure, found = new_figure(width_in, 4.6 if width_in > 5 else 5.2), self.curve(choice)
        self.draw(figure.subplots(2), choice)
        return finished(figure, "Where speculative decoding pays", describe(found.cells, found.baseline))

    def sources(self, choice: Choice) -> list[Path]:
        """Run files behind a choice, for `labkit.publish.figures.save_figure`."""
        used = set(self.cost_rows(choice)["run_id"])
        if choice.acceptance_length is None and not self.without_acceptance(choice):
            used |= set(self.acceptance_rows(choice)["run_id"])
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
    widget = ExplorerWidget(explorer, out_dir)
    gc.collect()
    gc.freeze()  # or every tenth picture would wait for a walk over all rows and artists, which stay anyway
    return widget
