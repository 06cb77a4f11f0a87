"""How long from a key on a control of the explorer to the new picture, in JupyterLab and a real Chromium.

    python -m benchmarks.explorer_latency [--presses 8] [--data DIR]

On the committed data by default. Each control is moved with the arrow keys, forth and back; the page times the key
press and the frame in which the canvas differs. Prints median and worst per control, in ms; the first press at a new
choice computes it, later ones find it kept, so both are shown. Meaningful on an idle machine only.
"""

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import sync_playwright

from labkit import paths
from tests.browser import Explorer, Lab, Notebook, chromium, errors

# Controls in the order they are tried, and the key that moves each to its next value; typed lengths while they are on.
KEYS = {
    **{"context_len": "ArrowRight", "context_range": "ArrowRight", "workload": "ArrowDown", "baseline": "ArrowDown"},
    **{"acceptance": "ArrowDown", "length": "ArrowLeft", "bounds": "ArrowLeft", "pairings": "Space"},
    **{"num_speculative_tokens": "ArrowRight", "batch_size": "ArrowRight", "weight_dtype": "ArrowDown"},
    **{"kv_dtype": "ArrowDown", "drafter": "ArrowDown", "target": "ArrowDown", "gpu": "ArrowDown"},
}
BACK = {"ArrowRight": "ArrowLeft", "ArrowLeft": "ArrowRight", "ArrowDown": "ArrowUp", "Space": "Space"}


def measure(explorer: Explorer, name: str, presses: int) -> tuple[list[float], list[float]]:
    """Waits in ms of moves forth (new choices) and of the moves back (choices seen before)."""
    forth: list[float] = []
    back: list[float] = []
    for key, waits in ((KEYS[name], forth), (BACK[KEYS[name]], back)):
        if name == "acceptance" and waits is back:  # `length` and `bounds` come next and want it on
            break
        for _ in range(presses):
            try:
                waits.append(explorer.change(name, key))
            except AssertionError:  # the end of the control's values, or one that draws the same
                break
    return forth, back


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presses", type=int, default=8)
    parser.add_argument("--data", type=Path, default=paths.RUNS)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    source = f"from labkit.explorer import explore\n\nexplore({str(arguments.data.resolve())!r})"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = new_notebook(cells=[new_code_cell(source)], metadata={"kernelspec": kernel})
    nbformat.write(notebook, folder / "explorer.ipynb")
    lab, every = Lab(folder, folder), []
    try:
        with sync_playwright() as playwright:
            context = chromium(playwright, folder)
            tab = Notebook(context, lab, "explorer.ipynb")
            tab.run_all()
            if found := errors(tab.finished()):
                raise SystemExit(found[0])
            explorer = Explorer(tab)
            print(f"{'control':24}{'new: median':>12}{'worst':>8}{'seen: median':>14}{'worst':>8}  ms", flush=True)
            for name in KEYS:
                forth, back = measure(explorer, name, arguments.presses if name != "acceptance" else 1)
                every += forth + back
                if name == "bounds":
                    every.append(explorer.change("acceptance", "ArrowUp"))
                cells = [f"{f(w):.0f}" if w else "-" for w in (forth, back) for f in (statistics.median, max)]
                print("{:24}{:>12}{:>8}{:>14}{:>8}".format(name, *cells), flush=True)
            context.close()
    finally:
        lab.close()
        shutil.rmtree(folder, ignore_errors=True)
    ordered = sorted(every)
    print(
        f"all {len(every)}: median {statistics.median(every):.0f}, p95 {ordered[int(0.95 * len(every))]:.0f}, "
        f"worst {ordered[-1]:.0f} ms, under 300 ms: {sum(w < 300 for w in every) / len(every):.0%}"
    )


if __name__ == "__main__":
    main()
