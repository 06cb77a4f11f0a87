"""How every figure looks: rc context, palette, origins, numbers as text, the context axis.

The same rc context has to surround drawing *and* saving: matplotlib makes ticks and embeds fonts only when it saves,
and outside the context it silently falls back to Type 3 fonts and outlined text.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

COLUMN_WIDTH_IN = 3.4
TEXT_WIDTH_IN = 7.0
NOTE_SIZE = 6.5
INK = "0.15"
MUTED = "0.42"

_TICKS: Mapping[str, object] = {
    **{"labelsize": 7.0, "color": "0.35", "labelcolor": INK},
    **{"major.width": 0.6, "major.size": 3.0, "minor.width": 0.4, "minor.size": 1.6},
}
_AXES: Mapping[str, object] = {
    **{"titlesize": 8.0, "titlelocation": "left", "titlepad": 5.0, "labelsize": 8.0, "labelpad": 2.5},
    **{"labelcolor": INK, "edgecolor": "0.35", "linewidth": 0.6, "spines.top": False, "spines.right": False},
    **{"axisbelow": True, "xmargin": 0.0, "grid": True, "grid.axis": "y"},
}
RC: Mapping[str, object] = {
    # DejaVu Sans comes with matplotlib, so a figure does not depend on the fonts of the machine.
    **{"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 8.0, "text.color": INK},
    **{f"axes.{name}": value for name, value in _AXES.items()},
    **{f"{axis}tick.{name}": value for axis in "xy" for name, value in _TICKS.items()},
    **{"grid.color": "0.91", "grid.linewidth": 0.5, "hatch.linewidth": 0.5},
    **{"lines.linewidth": 1.4, "lines.markersize": 3.6, "lines.solid_capstyle": "round"},
    # Letters are then as wide on screen as in the PDF, so one layout serves all formats.
    "text.hinting": "no_hinting",
    **{"figure.dpi": 150.0, "savefig.dpi": 300.0},
    **{"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "labkit"},
}

# Okabe-Ito. Black is kept for baselines and floors; its yellow is too light for a line on white.
_BLUE, _VERMILLION, _GREEN, _ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
_PURPLE, _SKY = "#CC79A7", "#56B4E9"
# Four darker ones behind them, so that none of ten series shares a colour.
_CYCLE = (_BLUE, _VERMILLION, _GREEN, _ORANGE, _PURPLE, _SKY, "#332288", "#882255", "#7A7A1E", "#6B4226")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h")
# A backend keeps its colour and marker in every figure, whatever else is drawn beside it.
BACKENDS = (
    *("sdpa", "per_token", "triton_split", "triton_nosplit", "flashinfer_fa2", "fa3", "flashinfer_fa3"),
    *("triton_per_token", "triton_segmented_2d", "flex"),
)


@dataclass(frozen=True)
class SeriesStyle:
    """Colour and marker of one series. The marker alone must tell series apart in greyscale."""

    color: str
    marker: str


@dataclass(frozen=True)
class OriginStyle:
    """How numbers of one origin are drawn: line style, filled or hollow markers, ``note`` beside the label."""

    linestyle: str | tuple[int, tuple[float, ...]]
    filled: bool
    note: str


_SOLID = "-"
_DASHED = (0, (4.0, 1.8))
_DOTTED = (0, (1.0, 1.4))
_DASH_DOT = (0, (5.0, 1.5, 1.0, 1.5))
ORIGINS: Mapping[str, OriginStyle] = {
    "measured": OriginStyle(_SOLID, True, ""),
    "imported": OriginStyle(_SOLID, True, ""),
    "modelled": OriginStyle(_DASHED, False, "modelled"),
    "interpolated": OriginStyle(_DASHED, False, "interpolated"),
    "transferred": OriginStyle(_SOLID, False, "borrowed"),
    "forced": OriginStyle(_DASH_DOT, False, "imposed"),
    "published": OriginStyle(_DOTTED, False, "published"),
    "cited": OriginStyle(_DOTTED, False, "cited"),
}

P = ParamSpec("P")
R = TypeVar("R")


def context() -> AbstractContextManager[None]:
    """The rc context of every figure: matplotlib's defaults plus `RC`, whatever a user's matplotlibrc says."""
    if matplotlib.rcParams["svg.hashsalt"] == RC["svg.hashsalt"]:  # nobody else's, so inside already
        return nullcontext()
    return matplotlib.style.context(["default", dict(RC)])


def styled(func: Callable[P, R]) -> Callable[P, R]:
    """Run ``func`` inside `context`."""

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with context():
            return func(*args, **kwargs)

    return wrapper


def origin_style(origin: str) -> OriginStyle:
    """Style of one origin. Raises ValueError: ``origin`` is none of the origins this project knows."""
    if origin not in ORIGINS:
        raise ValueError(f"origin: want one of {', '.join(ORIGINS)}; got {origin!r}")
    return ORIGINS[origin]


def series_styles(names: Iterable[str]) -> dict[str, SeriesStyle]:
    """A distinct style per name, in the order given. Backends of this project keep theirs; others take what is left.

    ``"sdpa + triton_split"`` (a pairing) is a name like any other.
    """
    names = list(dict.fromkeys(names))
    slots = [(color, marker) for marker, color in zip(_MARKERS, _CYCLE, strict=True)]
    taken = {name: slots[BACKENDS.index(name)] for name in names if name in BACKENDS}
    free = [slot for slot in slots if slot not in taken.values()]
    for index, name in enumerate(name for name in names if name not in taken):
        taken[name] = free[index % len(free)] if free else slots[index % len(slots)]
    return {name: SeriesStyle(*taken[name]) for name in names}


def attention_order(names: Iterable[str]) -> list[str]:
    """Attention backends as figures list them: those of a fixed style, then the others, the ladder's rungs last."""
    rank = {name: index for index, name in enumerate(BACKENDS)}
    return sorted(names, key=lambda name: (name.startswith("triton_ladder"), rank.get(name, len(rank)), name))


def format_tokens(tokens: float) -> str:
    """``512``, ``1K``, ``1.5K``, ``128K``, ``1M`` (K = 1,024), two digits unless the number is whole."""
    size, unit = _unit(tokens)
    value = tokens / size
    whole = abs(value - round(value)) < 1e-9
    return f"{round(value)}{unit}" if whole else f"{_two_digits(value, size)}{unit}"


def format_tokens_range(tokens: float, low: float | None, high: float | None, limits: tuple[float, float]) -> str:
    """``23K [21, 26]``: a context length and its interval in one unit.

    A bound of None lies outside the measured contexts ``limits`` and prints as ``<0.5`` or ``>128``.
    """
    size, unit = _unit(tokens)
    ends = [
        _two_digits(end / size, size) if end is not None else f"{sign}{_two_digits(limit / size, size)}"
        for end, limit, sign in zip((low, high), limits, "<>", strict=True)
    ]
    return f"{_two_digits(tokens / size, size)}{unit} [{ends[0]}, {ends[1]}]"


def _unit(tokens: float) -> tuple[int, str]:
    if tokens >= 0.9995 * 1024**2:
        return 1024**2, "M"
    return (1024, "K") if tokens >= 0.9995 * 1024 else (1, "")


def _two_digits(value: float, size: int) -> str:
    if size == 1:
        return f"{round(value, -1):.0f}" if value >= 100 else f"{value:.0f}"
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def context_ticks(low: float, high: float, *, max_ticks: int = 6) -> list[int]:
    """Powers of two in ``[low, high]`` tokens, each 2, 4 or 16 times the one before, at most ``max_ticks``, through 1K.

    Raises ValueError: the limits are not ``0 < low <= high``.
    """
    if not 0 < low <= high:
        raise ValueError(f"low, high: want 0 < low <= high tokens; got {low}, {high}")
    for octaves in (1, 2, 4):
        first = math.ceil((math.log2(low) - 10) / octaves - 1e-9)
        last = math.floor((math.log2(high) - 10) / octaves + 1e-9)
        ticks = [2 ** (10 + octaves * index) for index in range(first, last + 1)]
        if len(ticks) <= max_ticks:
            break
    return ticks


def context_axis(ax: Axes, low: float, high: float) -> None:
    """Make x a log2 axis over ``low`` to ``high`` tokens with ticks like ``1K 4K 16K`` and a minor tick per octave."""
    pad = 0.04 * max(1.0, math.log2(high / low)) if high > low else 0.5
    ax.set_xscale("log", base=2)
    low, high = low * 2**-pad, high * 2**pad
    ax.set_xlim(low, high)
    ticks = context_ticks(low, high)
    octaves = [2**power for power in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(FixedLocator([value for value in octaves if value not in ticks]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tokens(value)))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("context length (tokens)")


def ticks_at(axis: Axis, values: Iterable[float]) -> None:
    """Ticks at these values alone, once the scale of an axis is set."""
    axis.set_major_locator(FixedLocator(sorted(set(values))))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def signed(value: float, digits: int) -> str:
    """``+1,234.5`` or ``\u22121,234.5``, with a minus sign and not a hyphen."""
    return f"{value:+,.{digits}f}".replace("-", "\u2212")


def display_name(name: object, labels: Mapping[str, str] | None) -> str:
    """What a figure calls a value of the data: its label, or itself without underscores."""
    return (labels or {}).get(str(name), str(name).replace("_", " "))


def log_axis(axis: Axis, base: int = 10, subs: Sequence[float] = (1.0,)) -> None:
    """Plain numbers at powers of ``base`` times ``subs``, once the scale of an axis is logarithmic."""
    axis.set_major_locator(LogLocator(base=base, subs=subs, numticks=8 if subs == (1.0,) else 12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())


def text_color(color: str) -> tuple[float, float, float]:
    """A darker shade of a line colour: letters are thinner than lines and need more contrast on white."""
    red, green, blue = to_rgb(color)
    return (0.74 * red, 0.74 * green, 0.74 * blue)
