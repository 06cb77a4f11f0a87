"""Controls around `labkit.explorer`: sliders, a live canvas that can be read with the pointer and brushed, an export.

Every control can be reached and set with the keyboard; the brush sets the same range slider that the arrow keys do.
"""

import asyncio
import html
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import matplotlib
import numpy as np
import traitlets
from matplotlib.figure import Figure
from matplotlib.widgets import SpanSelector

from labkit import paths
from labkit.breakeven import verdict_table
from labkit.errors import InputError
from labkit.explorer import Explorer
from labkit.plots.canvas import empty
from labkit.plots.curves import crossing_text
from labkit.plots.explorer import points
from labkit.plots.style import context, format_tokens
from labkit.publish.explorer_rows import COST_FIELDS, Choice, usual_length
from labkit.publish.figures import save_figure
from labkit.publish.tables import html_table

_before = matplotlib.get_backend()
from ipympl.backend_nbagg import Canvas, FigureManager  # noqa: E402

matplotlib.use(_before)  # importing ipympl switches the whole kernel's backend

TITLES = {
    **{"gpu": "GPU", "target": "target", "drafter": "drafter", "weight_dtype": "weights", "kv_dtype": "KV cache"},
    **{"workload": "text", "baseline": "baseline", "batch_size": "batch", "num_speculative_tokens": "k"},
}
_WIDE = {"width": "auto", "min_width": "230px", "flex": "1 1 230px"}
# JupyterLab takes arrows and letters as commands of its own, and a canvas of ipympl never lets go of the Tab key. So
# the explorer's keys are kept from JupyterLab, and Tab goes past the canvas (what it does, the range slider does too).
KEYBOARD = """window.labkitKeyboard ??= setInterval(() => {
  document.querySelectorAll('.labkit-explorer:not([data-lm-suppress-shortcuts])').forEach((part) => {
    part.dataset.lmSuppressShortcuts = 'true';
    part.addEventListener('keydown', (event) => event.stopPropagation());
  });
  document.querySelectorAll('.labkit-explorer [tabindex="0"].jupyter-matplotlib-canvas-div').forEach(
    (canvas) => { canvas.tabIndex = -1; });
}, 300);"""
_MEASURED, _TYPED = "measured on the text", "typed, with bounds"
_BEST = "<b>Best k here:</b>"
_NEAR_PIXELS = 22.0


class _Canvas(Canvas):
    """A canvas that also draws inside the rc context: matplotlib makes ticks and lays out when it draws."""

    def draw(self) -> None:
        with context():
            super().draw()


class _Checks(widgets.HBox):
    """One checkbox per option, ``value`` the chosen ones: a list that the keyboard can set anywhere."""

    value = traitlets.Tuple()

    def __init__(self, options: Sequence[str], value: Sequence[str], description: str):
        look: dict[str, Any] = {"indent": False, "layout": {"width": "auto", "margin": "2px 10px 2px 0"}}
        self.boxes = [widgets.Checkbox(description=name, value=name in value, **look) for name in options]
        super().__init__([widgets.Label(description, layout={"width": "84px"}), *self.boxes], value=tuple(value))
        for box in self.boxes:
            box.observe(self._changed, "value")

    def _changed(self, _: Any) -> None:
        self.value = tuple(box.description for box in self.boxes if box.value)


class ExplorerWidget(widgets.VBox):
    """The explorer as a widget; ``choice`` is what it shows, ``message`` why it shows nothing."""

    def __init__(self, explorer: Explorer, out_dir: Path | str = ""):
        self.explorer, self.out_dir = explorer, str(out_dir or paths.BUILD / "explorer")
        self.choice, self.message, self._hushed = explorer.first(), "", False
        self._brush: SpanSelector | None = None
        self._drawn: Choice | None = None
        with context():
            self.figure = Figure(figsize=(6.9, 4.9), dpi=110)
            self.axes = self.figure.subplots(2, gridspec_kw={"top": 0.95, "bottom": 0.085, "hspace": 0.3})
        # Where labels stand is told once: finding it out takes an eighth of every drawing.
        for ax, down in zip(self.axes, (-0.085, -0.27), strict=True):
            ax.xaxis.set_label_coords(0.5, down)
            ax.yaxis.set_label_coords(-0.05, 0.5)
        self.words = self.figure.text(0.5, 0.5, "", ha="center", va="center", wrap=True, size=9)
        self.canvas = _Canvas(self.figure)
        FigureManager(self.canvas, 0)
        for part in ("header_visible", "footer_visible", "resizable", "toolbar_visible"):
            setattr(self.canvas, part, False)
        self.figure.canvas.mpl_connect("motion_notify_event", self._hover)
        self._make_controls()
        self.readout, self.pointer, self.crossings, self.best = (widgets.HTML() for _ in range(4))
        self.readout.layout = widgets.Layout(overflow="auto", width="100%")
        self.code = widgets.Textarea(layout={"width": "100%", "height": "0px", "display": "none"}, disabled=True)
        controls = widgets.HBox(list(self.controls.values()), layout={"flex_flow": "row wrap", "width": "100%"})
        # A window narrower than the canvas scrolls the canvas, not the page.
        picture = widgets.Box([self.canvas], layout={"overflow": "auto", "width": "100%"})
        below = [self.pointer, self.readout, self.crossings, self.best, self.export, self.code]
        super().__init__([controls, picture, *below])
        self.add_class("labkit-explorer")
        for name, control in self.controls.items():
            control.add_class(f"labkit-{name}")
        for name in ("readout", "pointer", "crossings", "best"):
            getattr(self, name).add_class(f"labkit-{name}")
        self.redraw()

    def _make_controls(self) -> None:
        explorer, choice = self.explorer, self.choice
        self.controls: dict[str, Any] = {}
        for name in (*COST_FIELDS[:5], "workload", "baseline"):
            options: Any = ["fastest", "same", *explorer.values("decode_backend")]
            if name != "baseline":
                options = [(str(value if value is not None else "not told"), value) for value in explorer.values(name)]
            self._add(name, widgets.Dropdown(options=options, value=getattr(choice, name), description=TITLES[name]))
        names = explorer.values("pairings")
        self._add("pairings", _Checks(names, choice.pairings, "backends"))
        self.controls["pairings"].layout = widgets.Layout(width="100%", flex_flow="row wrap", align_items="center")
        for name in ("batch_size", "num_speculative_tokens"):
            look: dict[str, Any] = {"options": explorer.values(name), "description": TITLES[name]}
            self._add(name, widgets.SelectionSlider(value=getattr(choice, name), **look))
        at = [(format_tokens(value), value) for value in explorer.values("context_len")]
        self._add("context_len", widgets.SelectionSlider(options=at, value=choice.context_len, description="context"))
        self._whole = (at[0][1], at[-1][1])
        span = widgets.SelectionRangeSlider(options=at, value=self._whole, description="crossings in")
        self._add("context_range", span)
        modes = [_MEASURED, _TYPED] if len(explorer.acceptance) else [_TYPED]
        mode = modes[-1 if choice.acceptance_length else 0]
        self._add("acceptance", widgets.Dropdown(options=modes, value=mode, description="acceptance"))
        length, *bounds = choice.acceptance_length or usual_length(choice.num_speculative_tokens)
        largest = 1.0 + max(explorer.values("num_speculative_tokens"))
        scale: dict[str, Any] = {"min": 1.0, "max": largest, "step": 0.05, "readout_format": ".2f"}
        self._add("length", widgets.FloatSlider(value=length, description="length", **scale))
        self._add("bounds", widgets.FloatRangeSlider(value=bounds, description="its bounds", **scale))
        self.export = widgets.Button(description="Export figure and cell", icon="download", layout={"width": "230px"})
        self.export.add_class("labkit-export")
        self.export.on_click(self._export)

    def _add(self, name: str, control: Any) -> None:
        control.layout = widgets.Layout(**_WIDE)
        if hasattr(control, "style"):
            control.style = {"description_width": "84px"}
        control.observe(self._changed, "value")
        self.controls[name] = control

    def _changed(self, change: Any = None) -> None:
        if self._hushed:
            return
        self._hushed = True  # bounds follow the length below
        try:
            typed = self._typed(change.owner if change else None)
        finally:
            self._hushed = False
        value = {name: control.value for name, control in self.controls.items()}
        own = {name: value[name] for name in value if name in asdict(self.choice)}
        span = None if value["context_range"] == self._whole else value["context_range"]
        own |= {"pairings": tuple(value["pairings"]), "context_range": span, "acceptance_length": typed}
        self.choice = replace(self.choice, **own)
        self.redraw()

    def _typed(self, changed: Any) -> tuple[float, float, float] | None:
        """The typed length and bounds; whichever of the two was moved takes the other one along."""
        length, bounds = self.controls["length"], self.controls["bounds"]
        typed = self.controls["acceptance"].value == _TYPED
        for control in (length, bounds):
            control.disabled = not typed
        self.controls["workload"].disabled = typed
        if changed is length and not bounds.value[0] <= length.value <= bounds.value[1]:
            half = (bounds.value[1] - bounds.value[0]) / 2
            bounds.value = (max(1.0, length.value - half), min(bounds.max, length.value + half))
        elif not bounds.value[0] <= length.value <= bounds.value[1]:
            length.value = min(max(length.value, bounds.value[0]), bounds.value[1])
        if not typed:
            return None
        middle, low, high = (round(value, 2) for value in (length.value, *bounds.value))
        return (middle, low, high)

    def redraw(self) -> None:
        """Draw the choice, or say in place of the picture why there is nothing to draw."""
        before, self._drawn = self._drawn, replace(self.choice, context_len=0)
        self.message, self.pointer.value = "", ""
        moved = before == self._drawn
        for ax in self.axes[1:] if moved else self.axes:
            empty(ax)
        try:
            draw = self.explorer.draw_context if moved else self.explorer.draw
            draw(self.axes, self.choice)
        except InputError as error:
            self.message = str(error)
        self.words.set_text(f"Nothing to draw: {self.message}" if self.message else "")
        for ax in self.axes:
            ax.set_visible(not self.message)
        if not moved:
            self._attach_brush()
        # Room for the longest name on either side. A layout engine would take as long as half the picture.
        side = (0.45 + 0.055 * max(map(len, self.choice.pairings), default=0)) / self.figure.get_figwidth()
        self.figure.subplots_adjust(left=side, right=1 - max(side, 0.15))
        # At once: `draw_idle` would wait for the browser to ask for what it is about to be sent.
        self.canvas.draw()
        if self.message:
            self.readout.value = f"<b>Nothing to draw.</b> {html.escape(self.message)}"
            self.crossings.value = self.best.value = ""
        else:
            self._later(0.01, self._show_numbers)
            # Not before a hand that drags a slider would have moved on.
            typed = self.choice.acceptance_length is not None
            self.best.value = f"{_BEST} \u2026"
            self._later(0.3, self._show_best, [] if typed else self.explorer.values("num_speculative_tokens"))

    def _later(self, seconds: float, show: Callable[..., None], *arguments: Any) -> None:
        """Call ``show`` when the picture has left, unless something else is chosen by then."""
        choice = self.choice

        def unless_moved() -> None:
            if choice == self.choice:
                show(*arguments)

        try:
            asyncio.get_running_loop().call_later(seconds, unless_moved)
        except RuntimeError:  # no event loop: not in a kernel
            unless_moved()

    def _show_numbers(self) -> None:
        cells, causes = self.explorer.at_context(self.choice), self.explorer.causes(self.choice)
        table = verdict_table(cells).assign(backend=cells["pairing"], growth=cells["pairing"].map(causes))
        table = table.drop(columns=["verify_backend", "workload"], errors="ignore")
        table.insert(0, "backend", table.pop("backend"))
        why = self.explorer.without_acceptance(self.choice)
        note = f"<p>Costs only: {html.escape(why)}.</p>" if why else ""
        if absent := [name for name in self.choice.pairings if name not in set(cells["pairing"])]:
            note += f"<p>Not measured here: {html.escape(', '.join(absent))}.</p>"
        self.readout.value = html_table(table.rename(columns={"decode_backend": "baseline"})) + note
        found, limits = self.explorer.curve(self.choice), self._limits()
        self._points = points(found)
        lines = [
            f"{html.escape(curve['verify_backend'])}: {crossing_text(crossing, limits)}"
            for curve in found.crossovers
            for crossing in curve["crossovers"]
        ]
        where = "" if self.choice.context_range is None else f" between {' and '.join(map(format_tokens, limits))}"
        self.crossings.value = f"<b>Crossings{where}:</b> " + ("; ".join(lines) or "none")

    def _show_best(self, ks: Sequence[int]) -> None:
        """Best k per backend, one k at a time: a control that is moved meanwhile waits for one of them at most."""
        if ks:
            self.explorer.with_k(self.choice, ks[0])
            self._later(0.05, self._show_best, ks[1:])
            return
        try:
            best = self.explorer.best(self.choice)
            said = [
                f"{html.escape(row['verify_backend'])}: {f'k = {row.best_k}' if row['best_k'] else 'off'} "
                f"({row['speedup']:.2f} [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"
                f"{'' if row['decided'] else ', undecided'})"
                for _, row in best.iterrows()
            ]
            self.best.value = f"{_BEST} {'; '.join(said)}"
        except InputError as error:
            self.best.value = f"{_BEST} {html.escape(str(error))}"

    def _limits(self) -> tuple[float, float]:
        contexts = self.explorer.contexts(self.choice)
        return self.choice.context_range or (contexts[0], contexts[-1])

    def _attach_brush(self) -> None:
        style: dict[str, Any] = {"props": {"alpha": 0.12, "facecolor": "0.3"}, "useblit": False, "minspan": 1}
        if self._brush is not None:
            self._brush.disconnect_events()
        self._brush = SpanSelector(self.axes[0], self._brushed, "horizontal", **style)

    def _brushed(self, low: float, high: float) -> None:
        contexts = np.array(self.explorer.contexts(self.choice), float)
        inside = contexts[(contexts >= low) & (contexts <= high)]
        # A brush that holds fewer than two measured contexts takes those around it: a crossing lies between two.
        if len(inside) < 2:
            inside = np.concatenate([contexts[contexts <= low][-1:], inside, contexts[contexts >= high][:1]])
        self.controls["context_range"].value = (int(inside[0]), int(inside[-1]))

    def _hover(self, event: Any) -> None:
        """Read the nearest point under the pointer, with its interval and origin."""
        if self.message or event.inaxes is not self.axes[0]:
            return
        at = event.inaxes.transData.transform([point[:2] for point in self._points])
        distance = np.hypot(*(at - (event.x, event.y)).T)
        near = np.nanmin(distance, initial=np.inf) < _NEAR_PIXELS * self.canvas.device_pixel_ratio
        self.pointer.value = html.escape(self._points[int(np.nanargmin(distance))][2]) if near else "&nbsp;"

    def _export(self, _: Any = None) -> None:
        choice = self.choice
        name = f"explorer_{choice.target.replace('/', '-')}_batch{choice.batch_size}_k{choice.num_speculative_tokens}"
        try:
            saved = save_figure(self.explorer.figure(choice), name, self.explorer.sources(choice), out_dir=self.out_dir)
        except (InputError, OSError) as error:
            self.pointer.value = f"not exported: {html.escape(str(error))}"
            return
        self.code.value = self.explorer.code(choice, name, self.out_dir)
        self.code.layout = widgets.Layout(width="100%", height="340px")
        self.pointer.value = "written: " + ", ".join(html.escape(str(file)) for file in (*saved, saved.sidecar))

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """The widget, and a PNG beside it: a saved notebook then shows a picture without a kernel."""
        bundle = super()._repr_mimebundle_(**options)
        data, extra = bundle if isinstance(bundle, tuple) else (bundle, {})
        return {**data, "image/png": self.canvas._repr_mimebundle_()["image/png"]}, extra
