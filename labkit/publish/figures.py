"""Saving figures so that each can be traced: provenance in every file and in a sidecar, same bytes on every rerun.

What is recorded comes from the data runs (run ids, device, versions, commit) and from digests of data and drawing
code. The commit of the drawing code, the time and the machine are left out: they would change the file and not the
figure.
"""

import base64
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from labkit import __version__, paths
from labkit.errors import InputError
from labkit.plots.canvas import SCREEN_DPI, freeze_layout
from labkit.plots.style import RC, context
from labkit.provenance import code_digest
from labkit.results import file_digest, read_sidecar, run_files

FORMATS = ("svg", "pdf", "png")
# Everything between stored rows and ink. A change in one of these makes a figure stale.
DRAWING_CODE = (
    "plots",
    *("acceptance.py", "breakeven.py", "cost.py", "device_state.py", "explorer.py", "quality.py", "rows.py"),
    *("schema.py", "shapes.py", "steps/table.py"),
    *("decide/acceptance_join.py", "decide/acceptance_positions.py", "decide/cause.py", "decide/crossovers.py"),
    *("decide/diagnosis.py", "decide/forward_costs.py", "decide/intervals.py", "decide/pairings.py"),
    *("decide/speedup.py", "decide/step_costs.py"),
    *("publish/explorer_rows.py", "publish/figures.py"),
)


@dataclass(frozen=True)
class SavedFigure:
    """What `save_figure` wrote. Iterates over the figure's files; shows the PNG in a notebook."""

    name: str
    files: tuple[Path, ...]
    sidecar: Path

    def __iter__(self) -> Iterator[Path]:
        """The figure's files, one per format."""
        return iter(self.files)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, str], dict[str, Any]]:
        pngs = [file for file in self.files if file.suffix == ".png"]
        if not pngs:
            return {"text/plain": f"{self.name}: {', '.join(file.name for file in self.files)}"}, {}
        data = pngs[0].read_bytes()
        width = int.from_bytes(data[16:20], "big") * SCREEN_DPI / float(str(RC["savefig.dpi"]))
        return {"image/png": base64.b64encode(data).decode()}, {"image/png": {"width": round(width), "alt": self.name}}


def save_figure(
    fig: Figure,
    name: str,
    sources: Sequence[Path | str],
    *,
    formats: Sequence[str] = FORMATS,
    out_dir: Path | str = paths.FIGURES,
) -> SavedFigure:
    """Write ``fig`` as ``<out_dir>/<name>.<format>`` and ``<name>.json``.

    sources : run files (or folders of runs) that the figure was drawn from.
    formats : of svg, pdf, png.

    Raises InputError: no sources, a missing run or sidecar, an unknown format, or a name that is not a plain file name.
    """
    if unknown := [entry for entry in formats if entry not in FORMATS]:
        raise InputError(f"formats: want some of {', '.join(FORMATS)}; got {unknown[0]!r}")
    if not name or Path(name).name != name:
        raise InputError(f"name: want a plain file name without folder; got {name!r}")
    folder, record = Path(out_dir), provenance(name, sources)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with context():
        freeze_layout(fig)
        for entry in formats:
            buffer = io.BytesIO()
            fig.savefig(buffer, format=entry, metadata=_metadata(entry, name, record))
            data = _in_palette(buffer.getvalue()) if entry == "png" else buffer.getvalue()
            files.append(paths.write_whole(folder / f"{name}.{entry}", data))
    full = record | {"files": {file.name: file_digest(file) for file in files}}
    sidecar = paths.write_whole(folder / f"{name}.json", (json.dumps(full, indent=1, sort_keys=True) + "\n").encode())
    return SavedFigure(name, tuple(files), sidecar)


def provenance(name: str, sources: Sequence[Path | str]) -> dict[str, Any]:
    """What a figure was made from: name, versions that draw, digest of the drawing code, one record per data run.

    Raises InputError: no sources, or a missing run or sidecar.
    """
    files = sorted({file for source in sources for file in run_files(Path(source))}, key=lambda file: file.name)
    if not files:
        raise InputError("sources: want the run files that the figure was drawn from; got none")
    return {
        "figure": name,
        "labkit": __version__,
        "matplotlib": matplotlib.__version__,
        "code_digest": code_digest(DRAWING_CODE),
        "sources": [_source(file) for file in files],
    }


def stale_figures(folder: Path | str = paths.FIGURES, *, runs: Path | str = paths.RUNS) -> dict[str, str]:
    """Figures in ``folder`` that would not come out the same: name -> what changed; empty when all are up to date."""
    current, found = code_digest(DRAWING_CODE), {}
    for sidecar in sorted(Path(folder).glob("*.json")):
        record = json.loads(sidecar.read_text(encoding="utf-8"))
        reasons = [] if record["code_digest"] == current else ["the drawing code changed"]
        for source in record["sources"]:
            file = Path(runs) / source["file"]
            if not file.exists():
                reasons.append(f"run {source['run_id']} is gone")
            elif file_digest(file) != source["sha256"]:
                reasons.append(f"run {source['run_id']} changed")
        for name, digest in record["files"].items():
            file = sidecar.with_name(name)
            if not file.exists() or file_digest(file) != digest:
                reasons.append(f"{name} is not the file that was drawn")
        if reasons:
            found[sidecar.stem] = "; ".join(reasons)
    return found


def _source(file: Path) -> dict[str, Any]:
    """One data run. The file is named by its place below the data folder, never by a path of this machine."""
    sidecar = read_sidecar(file)
    origin = sidecar.get("provenance") or {}
    device = origin.get("device") or {}
    return {
        "run_id": sidecar["run_id"],
        "experiment": sidecar["experiment"],
        "gpu": sidecar["gpu"],
        "device": device.get("name"),
        "driver": device.get("driver"),
        "versions": {name: version for name, version in (origin.get("versions") or {}).items() if version},
        "commit": origin.get("commit"),
        "dirty": origin.get("dirty"),
        "file": f"{sidecar['experiment']}/{sidecar['gpu']}/{sidecar['run_id']}.parquet",
        "sha256": sidecar["sha256"],
    }


def _in_palette(png: bytes) -> bytes:
    """The picture in 256 colours, a third of the bytes: lines and text need no more. Its texts and resolution stay."""
    texts = PngInfo()
    with Image.open(io.BytesIO(png)) as image:
        for key, value in image.text.items():  # type: ignore[attr-defined]
            texts.add_text(key, value)
        small = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        buffer = io.BytesIO()
        small.save(buffer, "PNG", optimize=True, pnginfo=texts, dpi=image.info["dpi"])
    return buffer.getvalue()


def _metadata(entry: str, name: str, record: dict[str, Any]) -> dict[str, Any]:
    """The record in the fields that each format has; dates are switched off, since they would change the bytes."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    if entry == "png":
        return {"Title": name, "labkit:provenance": text}
    if entry == "pdf":
        return {"Title": name, "Creator": f"labkit {__version__}", "Keywords": text, "CreationDate": None}
    return {"Title": name, "Creator": f"labkit {__version__}", "Description": text, "Date": None}
