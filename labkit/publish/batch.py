"""Run notebooks in batch: presets, one verdict each, a report, a batch that fails at the end."""

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from labkit import paths
from labkit.errors import InputError
from labkit.publish.batch_report import write_report
from labkit.publish.notebook_run import Verdict, declared_parameters, run_notebook, write_json

# A preset is a set of notebook parameters; a name that a notebook does not declare is not passed to it.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "committed": {"source": "committed", "preset": "gpu"},
    "cpu": {"source": "run", "preset": "cpu"},
    "gpu": {"source": "run", "preset": "gpu"},
    "ci": {"source": "run", "preset": "ci"},
}
_MOST_WORKERS = 4  # a kernel and its libraries take some 300 MB


def preset_parameters(preset: str) -> dict[str, Any]:
    """Notebook parameters of a preset.

    Raises InputError: there is no such preset; the message lists the known ones.
    """
    if preset not in PRESETS:
        raise InputError(f"preset: want one of {', '.join(PRESETS)}, auto; got {preset!r}")
    return dict(PRESETS[preset])


def run_batch(
    notebooks: Sequence[Path | str] | None = None,
    *,
    preset: str = "committed",
    parameters: Mapping[str, Any] | None = None,
    out_dir: Path | str | None = None,
    timeout_s: float | None = None,
    progress: Callable[[str], None] | None = print,
) -> list[Verdict]:
    """Execute notebooks and judge each one; side by side where nothing is timed, else one at a time per device.

    notebooks : files to run, in this order; all of ``notebooks/`` when None.
    preset, parameters : parameters of the preset, overridden by ``parameters`` (typed values, as papermill's Python API
        takes them). ``out_dir`` and ``figures_dir`` default to folders inside the batch folder.
    out_dir : batch folder, ``build/batch`` when None. Each notebook gets ``<stem>/<stem>.ipynb``, ``.html`` and
        ``run.json``; the batch ``report.html`` (`labkit.publish.batch_report`) and ``batch.json``.
    timeout_s : limit for one cell in seconds; None is no limit.
    progress : takes one line per event; None is silent.

    Returns a list of Verdict: one per notebook, in order. Nothing is raised for a failing notebook: see `failed`.

    Raises InputError: an unknown preset, a parameter that no notebook declares, a missing or broken notebook, or
    two notebooks of one name.
    """
    sources = _notebook_files(notebooks)
    folder = paths.make_folder(Path(out_dir or paths.BUILD / "batch").resolve(), "out_dir")
    values = {"out_dir": str(folder / "runs"), "figures_dir": str(folder / "figures"), **preset_parameters(preset)}
    values.update(parameters or {})
    known = {name for source in sources for name in declared_parameters(source)}
    if unknown := sorted(set(parameters or {}) - known):
        raise InputError(f"parameters: no notebook declares {', '.join(unknown)}; declared: {', '.join(sorted(known))}")
    say = progress or (lambda line: None)
    batch: dict[str, Any] = {"preset": preset, "notebooks": [source.name for source in sources]}
    write_json(folder / "batch.json", {**batch, "status": "running"})

    def run(numbered: tuple[int, Path]) -> Verdict:
        number, source = numbered
        with _device_lock(values["preset"], say) if timed else nullcontext():
            say(f"[{number}/{len(sources)}] {source.name} started")
            verdict = run_notebook(source, values, out_dir=folder / source.stem, timeout_s=timeout_s, say=say)
        say(f"[{number}/{len(sources)}] {verdict}")
        return verdict

    timed = values["source"] == "run"
    workers = 1 if timed else min(len(sources), os.cpu_count() or 1, _MOST_WORKERS)
    with _batch_environment(), ThreadPoolExecutor(workers) as pool:
        verdicts = list(pool.map(run, enumerate(sources, start=1)))
    bad = failed(verdicts)
    batch |= {"status": "failed" if bad else "ok", "verdicts": [asdict(verdict) for verdict in verdicts]}
    write_json(folder / "batch.json", batch)
    report = write_report(folder, verdicts, preset=preset, figures_dir=Path(values["figures_dir"]))
    say(f"report: {report}")
    say(f"{len(verdicts) - len(bad)} of {len(verdicts)} notebooks ok" + (f"; failed: {', '.join(bad)}" if bad else ""))
    return verdicts


@contextmanager
def _device_lock(preset: str, say: Callable[[str], None]) -> Iterator[None]:
    """One timing notebook per device and user, whatever batch it belongs to."""
    with (paths.cache_dir() / f"batch-{'cuda' if preset == 'gpu' else 'cpu'}.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another batch that times on this device")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def _batch_environment() -> Iterator[None]:
    """Tell kernels started meanwhile that nobody watches: progress in plain lines, no widgets (`labkit.progress`).

    They import this checkout, whichever one is installed in their environment.
    """
    before = {name: os.environ.get(name, "") for name in ("LABKIT_BATCH", "PYTHONPATH")}
    os.environ["LABKIT_BATCH"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(paths.ROOT), before["PYTHONPATH"]]))
    try:
        yield
    finally:
        os.environ.update(before)


def failed(verdicts: Sequence[Verdict]) -> list[str]:
    """Names of the notebooks that did not end well. A batch with any has failed."""
    return [verdict.notebook for verdict in verdicts if not verdict.ok]


def _notebook_files(notebooks: Sequence[Path | str] | None) -> list[Path]:
    import nbformat

    files = sorted(paths.NOTEBOOKS.glob("*.ipynb")) if notebooks is None else [Path(entry) for entry in notebooks]
    if not files:
        raise InputError("notebooks: want at least one; got none")
    for file in files:
        if not file.is_file():
            raise InputError(f"notebooks: no such file {file}")
        try:
            nbformat.read(file, as_version=4)
        except Exception as error:  # nbformat raises a different type for each way a file can be broken
            raise InputError(f"notebooks: {file} is not a notebook ({type(error).__name__})") from error
    stems = [file.stem for file in files]
    if len(set(stems)) < len(stems):
        raise InputError(f"notebooks: names must differ, their copies share a folder; got {', '.join(stems)}")
    return [file.resolve() for file in files]
