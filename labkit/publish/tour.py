"""The tour of the committed data, the notebooks in batch, the committed figures, and the demo that measures."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from labkit import paths
from labkit.decide import verdict
from labkit.errors import InputError

if TYPE_CHECKING:
    from labkit.publish.batch import Verdict


def run_tour(_: argparse.Namespace) -> None:
    """`labkit tour`: headline figure and verdicts from ``data/runs``; nothing is measured, no torch is loaded."""
    from labkit.plots.panels import figure_breakeven
    from labkit.publish.figures import save_figure
    from labkit.publish.notebook import Session

    session = Session(preset="gpu")
    result = session.breakeven()
    print(verdict.render(result))
    files = save_figure(figure_breakeven(result), "tour_breakeven", session.used, out_dir=paths.BUILD / "tour")
    print(f"\nheadline figure: {next(file for file in files if file.suffix == '.png')}")


def batch(names: Sequence[str], *, preset: str, out_dir: Path, quiet: bool = False) -> list[Verdict]:
    """Run notebooks by name, number or file, all when none is named; preset ``auto`` is gpu or cpu as the machine is.

    Raises InputError for an unknown preset or notebook.
    """
    from labkit.publish.batch import preset_parameters, run_batch

    if preset == "auto":
        from labkit.experiments.common import auto_preset

        preset = auto_preset()
    preset_parameters(preset)
    known = sorted(paths.NOTEBOOKS.glob("*.ipynb"))
    chosen = [_notebook(name, known) for name in names]
    return run_batch(chosen or None, preset=preset, out_dir=out_dir, progress=None if quiet else print)


def _notebook(name: str, known: Sequence[Path]) -> Path:
    found = [path for path in known if name in (path.stem, path.stem.partition("_")[0], path.name)]
    if found:
        return found[0]
    if Path(name).suffix == ".ipynb" and Path(name).is_file():
        return Path(name)
    raise InputError(f"notebook {name!r}: no such name; the notebooks are {', '.join(path.stem for path in known)}")


def run_batch_command(arguments: argparse.Namespace) -> int:
    """`labkit batch`: 1 where a notebook failed."""
    from labkit.publish.batch import failed

    verdicts = batch(arguments.notebooks, preset=arguments.preset, out_dir=arguments.out, quiet=arguments.json)
    if arguments.json:
        print(json.dumps([vars(verdict) for verdict in verdicts], indent=2))
    return int(bool(failed(verdicts)))


def run_demo(arguments: argparse.Namespace) -> int:
    """`labkit demo`: measure through the notebooks; 1 where one failed (its executed copy is kept)."""
    from labkit.publish.batch import failed

    out, begin = arguments.out, time.monotonic()
    # The summary goes last: it reads what the others measured.
    names = ["01_verify_attention", "03_acceptance", "04_breakeven", "00_start_here"]
    bad = failed(batch(names, preset=arguments.preset, out_dir=out))
    if not bad:
        runs = out.resolve() / "runs"
        result = verdict.verdict_from_files([runs], acceptance_paths=[runs])
        (out / "breakeven.json").write_text(result.to_json() + "\n")
        print("\n" + verdict.render(result))
    print(f"\n{out}: executed notebooks, HTML, figures/, runs/ ({time.monotonic() - begin:.0f} s)")
    return int(bool(bad))


def run_figures(arguments: argparse.Namespace) -> int:
    """`labkit figures`: draw the committed figures again from the committed data, or list the stale ones (then 1)."""
    from labkit.publish.batch import failed, run_batch
    from labkit.publish.figures import stale_figures

    if arguments.stale:
        stale = stale_figures()
        print("\n".join(f"{name}: {reason}" for name, reason in stale.items()) or "all figures are up to date")
        return int(bool(stale))
    folder = paths.BUILD / "figures"
    if bad := failed(run_batch(parameters={"figures_dir": str(paths.FIGURES)}, out_dir=folder)):
        raise InputError(f"notebooks failed: {', '.join(bad)}; see {folder}")
    return 0
