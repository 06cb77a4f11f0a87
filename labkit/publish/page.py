"""A page to send: the cells of a verdict in one HTML file that needs no kernel and no network.

Altair makes the chart, with the palette of the figures; Vega travels inside the file. `page.js` fills the selects and
the table and reads a CSV, Parquet or JSON file of cells that is dropped on the page.
"""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit import __version__, paths
from labkit.breakeven import Breakeven
from labkit.plots.panels import describe
from labkit.plots.style import BACKENDS, series_styles

if TYPE_CHECKING:
    import altair as alt

# Vega's name of a marker, and the sign that stands for it in the key.
_SHAPES = {"o": ("circle", "\u25cf"), "s": ("square", "\u25a0"), "^": ("triangle-up", "\u25b2")}
_SHAPES |= {"D": ("diamond", "\u25c6"), "v": ("triangle-down", "\u25bc"), "P": ("cross", "\u271a")}
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #222; max-width: 900px; margin: 1.5em auto; padding: 0 1em; }
h1 { font-size: 1.3em; margin: 0; } .muted { color: #666; margin: 0.2em 0; }
#controls label { display: inline-block; margin: 0.5em 1em 0.5em 0; } #chart { width: 100%; overflow-x: auto; }
#drop { border: 1px dashed #999; padding: 0.7em; margin: 1em 0; } #message { min-height: 1.4em; }
#table { overflow-x: auto; } table { border-collapse: collapse; font-size: 12px; }
th, td { text-align: right; padding: 2px 9px; border-bottom: 1px solid #e4e4e4; white-space: nowrap; }
"""
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval';
 style-src 'unsafe-inline'; img-src data: blob:; connect-src 'none'">
<title>{title}</title><style>{style}</style></head><body>
<h1>{title}</h1><p class="muted"><span id="setting">{subtitle}</span> <span id="source"></span></p>
<p>Speculative decoding pays where the marker (tokens that a verify step yields) is above the curve of the backend
(what the step costs in plain decode steps). Drag across the upper chart to look closer at some contexts below.</p>
<div id="controls"></div><div id="legend"></div><div id="chart"></div><p id="message" role="status"></p>
<label id="drop" style="display:block">Your own cells: drop a CSV or Parquet file of <code>labkit breakeven ...
--out cells.csv</code> on this page, or choose it: <input type="file" id="file" accept=".csv,.parquet,.json"></label>
<div id="table"></div><p class="muted">labkit {version}; runs {runs}</p>
<script>{vega}</script><script>(() => {{ const PALETTE = {palette};
{script}
start({spec}, {rows}); }})();</script></body></html>
"""


def page_html(result: Breakeven, *, title: str = "Where speculative decoding pays", runs: tuple[str, ...] = ()) -> str:
    """The page as text. ``runs`` are the run ids to name at its foot."""
    import vl_convert

    record = result.to_dict()
    return _PAGE.format(
        title=html.escape(title),
        subtitle=html.escape(describe(result.cells, result.baseline)),
        style=_STYLE,
        version=__version__,
        runs=html.escape(", ".join(runs) or "not named"),
        vega=vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"),
        palette=_in_script(_palette()),
        script=Path(__file__).with_suffix(".js").read_text(encoding="utf-8"),
        spec=_in_script(chart().to_dict()),
        rows=_in_script(record["cells"]),
    )


def write_page(result: Breakeven, path: Path | str, **options: Any) -> Path:
    """Write `page_html` and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return paths.write_whole(path, page_html(result, **options).encode())


def _in_script(content: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(content, allow_nan=False).replace("<", "\\u003c")


def _palette() -> dict[str, dict[str, str]]:
    looks = series_styles(BACKENDS)
    shapes = {name: _SHAPES.get(look.marker, ("triangle-left", "\u25c0")) for name, look in looks.items()}
    return {n: {"color": looks[n].color, "shape": shape, "sign": sign} for n, (shape, sign) in shapes.items()}


def chart() -> alt.VConcatChart:
    """Break-even and acceptance length over context, and speed-up at the brushed contexts, on data named ``cells``."""
    import altair as alt

    scale: dict[str, Any] = {"type": "log", "base": 2, "nice": False, "padding": 12}
    tokens = "datum.value >= 1024 ? format(datum.value / 1024, '~r') + 'K' : format(datum.value, 'd')"
    axis = alt.Axis(labelExpr=tokens, grid=False, values=[2**power for power in range(6, 25)])
    x = alt.X("context_len:Q", title="context length (tokens)", scale=alt.Scale(**scale), axis=axis)
    backend: dict[str, Any] = {"color": alt.Color("color:N", scale=None), "detail": "verify_backend:N"}
    tip = [alt.Tooltip(f"{name}:N") for name in ("verify_backend", "workload", "verdict", "origin", "reason")]
    tip += [alt.Tooltip("context_len:Q")]
    for name in ("relative_step_cost", "mean_acceptance_length", "speedup"):
        tip += [alt.Tooltip(f"{name}{end}:Q", format=".3f") for end in ("", "_low", "_high")]
    brush = alt.selection_interval(encodings=["x"], name="brush")
    base = alt.Chart(alt.NamedData("cells"))
    shape = alt.Shape("shape:N", scale=None)
    ink, solid = alt.value("#262626"), alt.value([1, 0])
    dashes = {"strokeDash": alt.condition("datum.origin === 'modelled'", alt.value([5, 3]), solid)}
    hollow = {"fill": alt.condition("datum.origin === 'transferred'", alt.value("white"), ink)}

    def y(name: str) -> alt.Y:
        return alt.Y(f"{name}:Q", title="tokens per verify step", scale=alt.Scale(zero=False))

    cost, length = "relative_step_cost", "mean_acceptance_length"
    upper = alt.layer(
        base.mark_rule(color="#6b6b6b").encode(y=y("breakeven_ceiling")),
        base.mark_area(opacity=0.17).encode(x=x, y=y(f"{cost}_low"), y2=f"{cost}_high", **backend),
        base.mark_line(strokeWidth=2).encode(x=x, y=y(cost), **backend, **dashes).add_params(brush),
        base.mark_point(filled=True, opacity=1, size=45).encode(x=x, y=y(cost), shape=shape, **backend, tooltip=tip),
        base.mark_line(strokeWidth=0.8).encode(x=x, y=y(length), color=ink, detail="workload:N"),
        base.mark_rule().encode(x=x, y=y(f"{length}_low"), y2=f"{length}_high", color=ink),
        base.mark_point(opacity=1, size=70, shape="diamond").encode(
            x=x, y=y(length), stroke=ink, tooltip=tip, **hollow
        ),
    )
    upper = upper.properties(width=640, height=300)
    look: dict[str, Any] = {"title": "speed-up", "scale": alt.Scale(type="log", base=2, nice=False, padding=6)}
    look |= {"axis": alt.Axis(values=[0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12], format="~g")}
    speed, ends = alt.Y("speedup:Q", **look), {"y": alt.Y("speedup_low:Q", **look), "y2": "speedup_high"}
    lower = alt.layer(
        base.mark_rule(color="black", strokeDash=[2, 3]).encode(y=alt.datum(1.0)),
        *(base.mark_rule(opacity=0).encode(y=alt.datum(end)) for end in (0.5, 2.0)),  # an axis where nothing is judged
        base.mark_rule(opacity=0.7).encode(x=x, **ends, **backend),
        base.mark_line().encode(x=x, y=speed, **backend, **dashes),
        base.mark_point(filled=True, opacity=1, size=45).encode(x=x, y=speed, shape=shape, **backend, tooltip=tip),
    )
    lower = lower.transform_filter(brush).properties(width=640, height=160)
    return alt.vconcat(upper, lower, datasets={"cells": []}).configure_axis(gridColor="#e8e8e8")
