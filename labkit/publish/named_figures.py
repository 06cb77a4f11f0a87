"""The figures of this project by name, from any stored runs: what `labkit figure` draws."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from labkit.axes import ALIASES, keep_where, parse_size, some_values, with_sizes
from labkit.breakeven import Breakeven, breakeven
from labkit.decide.composed import cost_rows, stored_acceptance, stored_costs
from labkit.decide.step_costs import CELL_KEY
from labkit.decide.verdict import parse_length, restricted
from labkit.errors import InputError
from labkit.paths import check_out, make_folder
from labkit.plots.acceptance import figure_acceptance
from labkit.plots.attention import figure_attention
from labkit.plots.attention_table import one_setting
from labkit.plots.floor import figure_ladder, figure_over_floor
from labkit.plots.panels import FIXED, breakeven_panels, figure_breakeven, figure_speedup, speedup_panels
from labkit.plots.step import figure_step_parts
from labkit.plots.style import COLUMN_WIDTH_IN, TEXT_WIDTH_IN
from labkit.publish.figures import FORMATS, SavedFigure, save_figure
from labkit.publish.notebook import one_device
from labkit.results import experiments_in, find_runs, load_runs, load_sidecars
from labkit.rows import distinct, fullest, key_value, run_ids

# What a display name can stand for.
_NAMED = ("gpu", "target", "drafter", "workload", "backend", "verify_backend", "draft_backend", "decode_backend")
_WITH_LENGTH = ("breakeven", "speedup", "step")
_JOINED = {"loop", "step", "acceptance"}
Panels = Callable[[pd.DataFrame], list[str]]
WIDTHS = {"column": COLUMN_WIDTH_IN, "text": TEXT_WIDTH_IN}


@dataclass
class Request:
    """What a figure is drawn from and how; ``used``: the run files it turned out to be drawn from.

    paths : run files or folders; none: LABKIT_DATA or ``data/runs``.
    where : column -> the values to keep, as text.
    acceptance_length : imposed ``X`` or ``X,low,high`` instead of stored acceptance.
    """

    paths: Sequence[Path | str] = ()
    where: Mapping[str, Sequence[str]] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    width_in: float = TEXT_WIDTH_IN
    acceptance_length: str | None = None
    used: list[Path] = field(default_factory=list)
    columns: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)

    def rows(self, experiment: str, gpus: Sequence[str] = ()) -> pd.DataFrame:
        """Rows of one experiment alone (see `_rows`), once every name of the request is known to them."""
        frame = self._rows(experiment, gpus)
        self._refuse_unknown()
        return frame

    def _refuse_unknown(self) -> None:
        for option, given, known in (("--where", self.where, self.columns), ("--label", self.labels, self.names)):
            if known and (unknown := sorted(set(given) - known)):
                raise InputError(f"{option} {unknown[0]}: not in these rows; known: {', '.join(sorted(known))}")
        shown = [self.labels.get(name, name) for name in sorted(self.names)]
        if twice := sorted({text for text in shown if shown.count(text) > 1}):
            raise InputError(f"--label: {twice[0]!r} would name several things; wanted one display name for each")

    def _rows(self, experiment: str, gpus: Sequence[str] = ()) -> pd.DataFrame:
        """Rows of the devices asked for, else of one of ``gpus``, else of the device of the newest run."""
        runs = find_runs(experiment, *self.paths)
        wanted = self.where.get("gpu") or gpus
        runs = [run for run in runs if run.sidecar["gpu"] in wanted] if wanted else one_device(runs)
        if not runs:
            raise InputError(f"gpu: no runs of {experiment} on {', '.join(wanted or ())}")
        # The text of a cost run is what its drafter reads: costs of any text join acceptance on any.
        without = () if experiment == "acceptance" else ("workload",)
        where = {name: values for name, values in self.where.items() if name not in without}
        frame = load_runs(experiment, *(run.path for run in runs))
        self.columns |= set(map(str, frame))
        frame = _where(frame, where)
        named = _NAMED[:4] if experiment == "acceptance" else _NAMED
        self.names |= {str(name) for column in named for name in distinct(frame, column)}
        self.used += [run.path for run in runs if run.path.stem in set(frame["run_id"])]
        return frame

    def verdicts(self, panels: Panels | None = None) -> tuple[Breakeven, str]:
        """The cells of `labkit breakeven` that ``where`` keeps, on the device of the newest run behind them.

        panels : what needs panels in a figure of one setting. Of several settings the fullest with an acceptance length
            is kept (`labkit.rows.fullest`), and the smallest batch where k, batch and text would all need panels or not
            every pair was measured; what ``where`` names stays. Returns also what the subtitle says of that.
        """
        length, paths = self.acceptance_length, self.paths
        costs = cost_rows(stored_costs(paths))
        acceptance = stored_acceptance(paths) if length is None else None
        result = breakeven(costs, acceptance if length is None else parse_length(length))
        where = [f"{name}={','.join(values)}" for name, values in self.where.items()]
        cells = keep_where(result.cells, where)
        newest = acceptance if acceptance is not None and set(acceptance["gpu"]) & set(cells["gpu"]) else costs
        newest = newest[newest["gpu"].isin(cells["gpu"])]
        cells = cells[cells["gpu"] == newest.sort_values("run_id")["gpu"].iloc[-1]]
        chosen: list[str] = []
        if panels is not None:
            cells, chosen = fullest(cells, FIXED, cells[cells["mean_acceptance_length"].notna()], self.where)
            facets = panels(cells)
            whole = len(cells[facets].drop_duplicates()) == math.prod(cells[facets].nunique())
            if "batch_size" in facets and "batch_size" not in self.where and (len(facets) > 2 or not whole):
                cells = cells[cells["batch_size"] == cells["batch_size"].min()]
                chosen.append(f"batch size {cells['batch_size'].iloc[0]:g}")
        self.names |= {str(name) for column in _NAMED if column in cells for name in distinct(cells, column)}
        self._refuse_unknown()
        found = run_ids(costs, cells, CELL_KEY)
        if acceptance is not None:
            names = ("target", "drafter", "workload")
            found |= run_ids(acceptance, cells, ("gpu", *names)) or run_ids(acceptance, cells, names)
        runs = []
        for name in experiments_in(*paths) & _JOINED:
            runs += find_runs(name, *(path for path in paths if name in experiments_in(path)))
        self.used += [run.path for run in runs if run.path.stem in found]
        return restricted(result, cells), _of_several(chosen)

    def attention(self) -> tuple[pd.DataFrame, dict[str, Any]]:
        rows = self.rows("attention")
        asked = self.where.get("batch_size", ["1"])
        if len(asked) > 1:
            raise InputError(f"--where batch_size={','.join(asked)}: one figure holds one batch size")
        return one_setting(rows, batch_size=_size("batch_size", asked[0])), load_sidecars("attention", *self.used)


def _where(frame: pd.DataFrame, where: Mapping[str, Sequence[str]]) -> pd.DataFrame:
    """Rows whose columns hold one of the values; rows without a value (the plain arm has no k) stay."""
    for name, values in where.items():
        if name not in frame:
            continue
        texts = frame[name].map(lambda value: str(key_value(value)))
        kept = frame[texts.isin(with_sizes(values)) | frame[name].isna()]
        if not kept[name].notna().any():
            raise InputError(f"--where {name}: wanted one of {some_values(frame[name])}, got {', '.join(values)}")
        frame = kept
    return frame


def _of_several(chosen: Sequence[str]) -> str:
    return f" · of several (--where): {', '.join(chosen)}" if chosen else ""


def _of_verdicts(draw: Callable[..., Figure], panels: Panels) -> Callable[..., Figure]:
    def figure(data: Request, **style: Any) -> Figure:
        result, note = data.verdicts(panels)
        return draw(result, note=note, **style)

    return figure


def _of_attention(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    def figure(data: Request, **style: Any) -> Figure:
        rows, sidecars = data.attention()
        return draw(rows, sidecars=sidecars, **style)

    return figure


def _acceptance(data: Request, **style: Any) -> Figure:
    rows = data.rows("acceptance")
    rows, chosen = fullest(rows, ("target", "drafter", "temperature"), rows, data.where)
    data.used = [path for path in data.used if path.stem in set(rows["run_id"])]
    return figure_acceptance(rows, note=_of_several(chosen), **style)


def _step(data: Request, *, labels: Mapping[str, str] | None, width_in: float) -> Figure:
    length = data.acceptance_length
    if length is None or labels:
        raise InputError("figure step: wanted --acceptance-length X for its line, and no --label (it names roles)")
    value = parse_length(length)
    rows = data.rows("step")
    options: dict[str, Any] = {"sidecars": load_sidecars("step", *data.used), "width_in": width_in}
    return figure_step_parts(rows, acceptance_length=value[0] if isinstance(value, tuple) else value, **options)


FIGURES: Mapping[str, Callable[..., Figure]] = {
    "breakeven": _of_verdicts(figure_breakeven, breakeven_panels),
    "speedup": _of_verdicts(figure_speedup, speedup_panels),
    "attention": _of_attention(figure_attention),
    "over_floor": _of_attention(figure_over_floor),
    "ladder": _of_attention(figure_ladder),
    "acceptance": _acceptance,
    "step": _step,
}


def write_figure(name: str, out: Path, request: Request) -> SavedFigure:
    """Draw figure ``name`` and save it as ``out`` (.svg, .pdf, .png; .html for the page of "breakeven") with a sidecar.

    Raises InputError: an unknown figure or format, or rows that cannot be drawn.
    """
    if name not in FIGURES:
        raise InputError(f"figure: want one of {', '.join(FIGURES)}; got {name!r}")
    if request.acceptance_length is not None and name not in _WITH_LENGTH:
        raise InputError(
            f"--acceptance-length: wanted with {', '.join(_WITH_LENGTH)}; {name} draws no acceptance length"
        )
    suffix = out.suffix.lstrip(".")
    if suffix not in (*FORMATS, *(["html"] if name == "breakeven" else [])):
        raise InputError(f"--out {out}: want a file ending in .{', .'.join(FORMATS)}, or .html for breakeven")
    make_folder(out.parent, f"--out {out}")  # now, not after the work
    check_out(out)
    if suffix == "html":
        from labkit.publish.page import write_page

        result, _ = request.verdicts()
        return SavedFigure(out.stem, (write_page(result, out, runs=tuple(path.stem for path in request.used)),), out)
    figure = FIGURES[name](request, labels=request.labels, width_in=request.width_in)
    return save_figure(figure, out.stem, request.used, formats=[suffix], out_dir=out.parent)


def run_from_arguments(arguments: argparse.Namespace) -> None:
    """`labkit figure`."""
    where = [_pair("--where", text) for text in arguments.where]
    request = Request(
        paths=arguments.runs,
        where={ALIASES.get(name, name): values.split(",") for name, values in where},
        labels=dict(_pair("--label", text) for text in arguments.label),
        width_in=_width(arguments.width),
        acceptance_length=arguments.acceptance_length,
    )
    saved = write_figure(arguments.figure, arguments.out, request)
    print(*dict.fromkeys([*saved, saved.sidecar]), sep="\n")


def _size(name: str, text: str) -> int:
    try:
        return parse_size(text)
    except InputError as error:
        raise InputError(f"--where {name}={text}: {error}") from None


def _pair(option: str, text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator or not value:
        raise InputError(f"{option} {text!r}: wanted name=value")
    return name, value


def _width(text: str) -> float:
    try:
        width_in = WIDTHS.get(text) or float(text)
    except ValueError:
        width_in = 0.0
    if not 2.5 <= width_in <= 20:
        raise InputError(f"--width: wanted column, text or inches from 2.5 to 20, got {text!r}")
    return width_in
