"""What every notebook starts from: committed or freshly measured rows, figures that are shown and saved."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from labkit import paths
from labkit.breakeven import Breakeven, breakeven
from labkit.decide.surface import Surface, read_rates, select, verdict_surface
from labkit.errors import InputError
from labkit.publish.figures import SavedFigure, save_figure
from labkit.results import StoredRun, find_runs, load_runs, load_sidecars
from labkit.rows import distinct, fixed_context, fullest
from labkit.schema import columns

SOURCES = ("committed", "run")


@dataclass(frozen=True)
class Session:
    """The parameters of a notebook, and the runs it has used so far.

    source : "committed" reads stored runs, "run" measures first (and only then needs torch).
    preset : preset of the experiments. With "committed" it picks the device where there are several: "gpu" the GPU
        measured last, any other the CPU measured last, if there is one.
    data_dir : folder of stored runs; "" is LABKIT_DATA or ``data/runs``.
    out_dir : where "run" writes; "" is ``data/runs``.
    figures_dir : where figures are saved; "" shows them only.

    Raises InputError: unknown source.
    """

    source: str = "committed"
    preset: str = "cpu"
    data_dir: str = ""
    out_dir: str = ""
    figures_dir: str = ""
    used: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise InputError(f"source: want one of {', '.join(SOURCES)}; got {self.source!r}")

    def runs(self, experiment: str) -> list[StoredRun]:
        """The stored runs of one experiment on one device; measured now with source "run"."""
        if self.source == "run":
            # The experiments measure, so they need torch; reading stored runs does not.
            module = import_module(f"labkit.experiments.{experiment}")
            # On a CPU the notebooks share the demo's six minutes: wide cells are said to be wide, not measured again.
            once = {"max_repeats": [1]} if self.preset == "cpu" and experiment in ("attention", "loop") else {}
            result = module.run(self.preset, out_dir=Path(self.out_dir) if self.out_dir else None, **once)
            found = find_runs(experiment, result.path, *result.earlier)
        else:
            found = one_device(find_runs(experiment, *filter(None, [self.data_dir])), self.preset)
        self.used.extend(run.path for run in found if run.path not in self.used)
        print(f"{experiment}: {len(found)} run(s) on {found[0].sidecar['gpu']}, {self.source}")
        return found

    def rows(self, experiment: str) -> pd.DataFrame:
        """Rows of one experiment, long form, one per sample. Prints whose they are."""
        return load_runs(experiment, *(run.path for run in self.runs(experiment)))

    def draft_costs(self, acceptance: pd.DataFrame) -> pd.DataFrame:
        """Loop rows of the device that times the most of these drafters; of several the one that `rows` takes."""
        usual = self.rows("loop")
        if self.source == "run":
            return usual
        runs = find_runs("loop", *filter(None, [self.data_dir]))
        rows, place = load_runs("loop", *(run.path for run in runs)), str(usual["gpu"].iloc[0])
        wanted = set(distinct(acceptance, "drafter"))
        known = {str(gpu): len(wanted & set(some["drafter"].dropna())) for gpu, some in rows.groupby("gpu")}
        best = max(known, key=lambda gpu: (known[gpu], gpu == place))
        if best == place:
            return usual
        self.used.extend(run.path for run in runs if run.sidecar["gpu"] == best and run.path not in self.used)
        print(f"loop: {known[best]} of these drafters were timed on {best}")
        return rows[rows["gpu"] == best]

    def rows_if_any(self, experiment: str) -> pd.DataFrame:
        """As `rows`; where nothing is stored yet, one sentence and a frame of the experiment's columns without rows."""
        try:
            return self.rows(experiment)
        except InputError as error:
            if self.source == "run" or not str(error).startswith("no runs of"):
                raise
            print(f"No data of {experiment} yet: {error}.")
            return pd.DataFrame(columns=[column.name for column in columns(experiment)])

    def sidecars(self, experiment: str) -> dict[str, dict]:
        """run_id -> sidecar of the runs of this experiment that `rows` has used."""
        return load_sidecars(experiment, *(path for path in self.used if path.parent.parent.name == experiment))

    def _greedy(self) -> pd.DataFrame:
        """The acceptance rows of temperature 0 where there are several temperatures; says so."""
        rows, chosen = fullest(acceptance := self.rows("acceptance"), ["temperature"], acceptance)
        if chosen:
            others = [
                f"{value:g}" for value in distinct(acceptance, "temperature") if value not in set(rows["temperature"])
            ]
            print(f"acceptance at {chosen[0]}; notebook 03 has temperature {' and '.join(others)}")
        return rows

    def breakeven(self, **options: object) -> Breakeven:
        """Join the cost rows (loop) of one gpu and target with the acceptance rows; options as in `breakeven`."""
        loop, acceptance = fixed_context(self.rows("loop")), self._greedy()
        return breakeven(_one_place(loop, acceptance, None), acceptance, **options)  # type: ignore[arg-type]

    def surface(self, *, widest: str | None = None, imposed: float | None = None, **options: Any) -> Surface:
        """The verdict of the loop rows and, of committed data, step rows; options as `verdict_surface`.

        One setting is kept, see `labkit.decide.surface.select` for ``widest``. Where no acceptance joins it, the cost
        alone and a sentence; or with an ``imposed`` length in its place, drawn as imposed.
        """
        frames = [self.rows("loop"), *([self.rows_if_any("step")] if self.source == "committed" else [])]
        acceptance = self._greedy()
        rows = _one_place(pd.concat([frame for frame in frames if len(frame)], ignore_index=True), acceptance, widest)
        sidecars = [self.sidecars(name) for name in ("loop", "step") if name in set(rows["experiment"])]
        options = {
            "read_gb_per_s": read_rates({run: side for found in sidecars for run, side in found.items()})
        } | options
        try:
            found = select(verdict_surface(rows, acceptance, **options), widest=widest)
        except InputError as error:
            print(f"No acceptance was measured for these costs: {error}.")
            if imposed:
                print(f"An imposed length of {imposed:g} stands in.")
            found = select(verdict_surface(rows, imposed, **options), widest=widest)
        return found

    def show(self, fig: Figure, name: str) -> Figure | SavedFigure:
        """Save ``fig`` under ``figures_dir`` when there is one; the last line of a cell then shows what was saved."""
        return save_figure(fig, name, self.used, out_dir=self.figures_dir) if self.figures_dir else fig

    def explore(self) -> Any:
        """The explorer over the stored runs of every device: a widget, or in batch its first picture."""
        from labkit.explorer import explore

        folder = self.out_dir if self.source == "run" else self.data_dir
        shown = explore(folder, out_dir=self.figures_dir)
        return self.show(shown, "09_explorer") if isinstance(shown, Figure) else shown

    def page(self, result: Breakeven) -> str:
        """Write the verdicts as a page to send (`labkit.publish.page`) beside the figures; returns where it is."""
        from labkit.publish.page import write_page

        path = Path(self.figures_dir or paths.BUILD / "explorer") / "09_explorer.html"
        return f"page: {write_page(result, path, runs=tuple(run.stem for run in self.used))}"

    def measured(self, make: Callable[..., Any], *args: Any, name: str = "", **options: Any) -> Any:
        """``make(...)``, shown as figure ``name`` if it has one; where its rows are missing, one sentence instead."""
        try:
            made = make(*args, **options)
        except InputError as error:
            print(f"{make.__name__.replace('_', ' ')}: its rows are not there ({error})")
            return None
        return self.show(made, name) if name else made


def _one_place(rows: pd.DataFrame, acceptance: pd.DataFrame, widest: str | None) -> pd.DataFrame:
    """The rows of one gpu and target: most values of ``widest``, then one with acceptance, then most rows."""
    places = rows.groupby(["gpu", "target"])
    table = places.size().rename("rows").reset_index()
    table["wide"] = places[widest].nunique().to_numpy() if widest else 0
    table["joins"] = table["target"].isin(acceptance["target"].unique())
    best = table.sort_values(["wide", "joins", "rows"]).iloc[-1]
    return rows[(rows["gpu"] == best["gpu"]) & (rows["target"] == best["target"])]


def one_device(runs: list[StoredRun], preset: str | None = None) -> list[StoredRun]:
    """The runs of the device of the newest run, of the kind that ``preset`` names if there is one."""
    kind = [run for run in runs if run.sidecar["gpu"].startswith("cpu-") != (preset == "gpu")] if preset else runs
    device = max(kind or runs, key=lambda run: run.sidecar["run_id"]).sidecar["gpu"]
    return [run for run in runs if run.sidecar["gpu"] == device]
