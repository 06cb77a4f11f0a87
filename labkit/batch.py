"""Run notebooks in batch: papermill behind a thin runner that keeps every executed copy and judges each run.

A run is judged by the exception that ends it. The metadata that papermill leaves in a notebook says "completed" after
a timeout and after a killed kernel, so it is never asked.
"""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labkit import paths
from labkit.errors import InputError

# A preset is a set of notebook parameters; a name that a notebook does not declare is not passed to it.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "committed": {"source": "committed", "preset": "cpu"},
    "cpu": {"source": "run", "preset": "cpu"},
    "gpu": {"source": "run", "preset": "gpu"},
    "ci": {"source": "run", "preset": "ci"},
    "ci": {"source": "run", "preset": "ci"},
}
STATUSES = ("ok", "cell-error", "timeout", "kernel-died")
_TAIL_CHARACTERS = 2000


@dataclass(frozen=True)
class Verdict:
    """How one notebook ended.

    ``cell`` counts code cells from 1, as the prompts of the executed copy do. ``executed`` and ``html`` are relative
    to the batch folder; ``html`` is "" when the export failed, with the reason in ``html_error``.
    """

    notebook: str
    status: str
    seconds: float
    error_name: str = ""
    error_value: str = ""
    cell: int | None = None
    executed: str = ""
    html: str = ""
    html_error: str = ""

    @property
    def ok(self) -> bool:
        """Whether the notebook ran to its end and its HTML copy exists."""
        return self.status == "ok" and not self.html_error

    def __str__(self) -> str:
        """One plain line, as progress shows it."""
        where = f" in cell {self.cell}" if self.cell is not None else ""
        what = (
            f" {self.error_name}: {self.error_value.splitlines()[0] if self.error_value else ''}"
            if self.error_name
            else ""
        )
        html = f" (no HTML: {self.html_error})" if self.html_error else ""
        return f"{self.notebook:<24} {self.status}{where}, {self.seconds:.1f} s{what}{html}"


def preset_parameters(preset: str) -> dict[str, Any]:
    """Notebook parameters of a preset.

    Raises
    ------
    InputError
        If there is no such preset; the message lists the known ones.
    """
    if preset not in PRESETS:
        raise InputError(f"preset: want one of {', '.join(PRESETS)}; got {preset!r}")
    return dict(PRESETS[preset])


def run_batch(
    notebooks: Sequence[Path | str] | None = None,
    *,
    preset: str = "committed",
    parameters: Mapping[str, Any] | None = None,
    out_dir: Path | str | None = None,
    parallel: int = 1,
    timeout_s: float | None = None,
    progress: Callable[[str], None] | None = print,
) -> list[Verdict]:
    """Execute notebooks and judge each one.

    Parameters
    ----------
    notebooks
        Files to run, in this order; all of ``notebooks/`` when None.
    preset, parameters
        Parameters of the preset, overridden by ``parameters`` (typed values, as papermill's Python API takes them).
        ``out_dir`` and ``figures_dir`` default to folders inside the batch folder.
    out_dir
        Batch folder, ``build/batch`` when None. Each notebook gets ``<stem>/<stem>.ipynb``, ``.html`` and
        ``run.json``.
    parallel
        Notebooks at a time. Notebooks that measure (``source="run"``) run one at a time whatever is asked: timings
        would disturb one another.
    timeout_s
        Limit for one cell in seconds; None is no limit.
    progress
        Takes one line per event; None is silent.

    Returns
    -------
    list of Verdict
        One per notebook, in order. Nothing is raised for a failing notebook: see `failed`.

    Raises
    ------
    InputError
        For an unknown preset, a parameter that no notebook declares, a missing or broken notebook, two notebooks of
        one name, or ``parallel < 1``.
    """
    sources = _notebook_files(notebooks)
    if parallel < 1:
        raise InputError(f"parallel: want 1 or more notebooks at a time; got {parallel}")
    folder = Path(out_dir) if out_dir is not None else paths.BUILD / "batch"
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "out_dir": str(folder / "runs"),
        "figures_dir": str(folder / "figures"),
        **preset_parameters(preset),
    }
    values.update(parameters or {})
    known = {name for source in sources for name in _declared(source)}
    if unknown := sorted(set(parameters or {}) - known):
        raise InputError(f"parameters: no notebook declares {', '.join(unknown)}; declared: {', '.join(sorted(known))}")
    workers = 1 if values.get("source") == "run" else min(parallel, len(sources))
    say = progress or (lambda line: None)
    batch = {"preset": preset, "notebooks": [source.name for source in sources], "parallel": workers}
    write_json(folder / "batch.json", {**batch, "status": "running"})

    def run_one(numbered: tuple[int, Path]) -> Verdict:
        number, source = numbered
        say(f"[{number}/{len(sources)}] {source.name} started")
        verdict = run_notebook(source, values, out_dir=folder / source.stem, timeout_s=timeout_s, say=say)
        say(f"[{number}/{len(sources)}] {verdict}")
        return verdict

    with _batch_environment(), ThreadPoolExecutor(workers) as pool:
        verdicts = list(pool.map(run_one, enumerate(sources, start=1)))
    bad = failed(verdicts)
    write_json(
        folder / "batch.json",
        {**batch, "status": "failed" if bad else "ok", "verdicts": [asdict(verdict) for verdict in verdicts]},
    )
    say(f"{len(verdicts) - len(bad)} of {len(verdicts)} notebooks ok" + (f"; failed: {', '.join(bad)}" if bad else ""))
    return verdicts


@contextmanager
def _batch_environment() -> Iterator[None]:
    """Tell kernels started meanwhile that nobody watches: progress in plain lines, no widgets (`labkit.progress`)."""
    before = os.environ.get("LABKIT_BATCH")
    os.environ["LABKIT_BATCH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["LABKIT_BATCH"]
        else:
            os.environ["LABKIT_BATCH"] = before


def failed(verdicts: Sequence[Verdict]) -> list[str]:
    """Names of the notebooks that did not end well. A batch with any has failed."""
    return [verdict.notebook for verdict in verdicts if not verdict.ok]


def run_notebook(
    source: Path,
    parameters: Mapping[str, Any],
    *,
    out_dir: Path,
    timeout_s: float | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Verdict:
    """Execute one notebook into ``out_dir`` and judge it.

    ``run.json`` appears at once with status ``running`` and is replaced by the verdict, so an interrupted batch shows
    where it was. Parameters that the notebook does not declare are left out. The kernel starts in the notebook's
    folder, as in JupyterLab. ``say`` takes the lines that the notebook prints, as they come.
    """
    from papermill import execute_notebook

    out_dir.mkdir(parents=True, exist_ok=True)
    executed = out_dir / source.name
    declared = _declared(source)
    used = {name: value for name, value in parameters.items() if name in declared}
    record = {
        "notebook": source.name,
        "notebook_sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        "parameters": used,
        "started_at_s": round(time.time(), 3),
    }
    write_json(out_dir / "run.json", {**record, "status": "running"})
    start, lines = time.perf_counter(), _Lines(say, f"      {source.stem} | ")
    with tempfile.TemporaryDirectory(prefix="labkit-") as sockets:
        try:
            execute_notebook(
                str(source), str(executed), parameters=used, cwd=str(source.parent), execution_timeout=timeout_s,
                progress_bar=False, config=_kernel_config(sockets), stdout_file=lines, stderr_file=lines,
            )  # fmt: skip
            outcome = _quiet_exit(executed)
        except Exception as error:
            outcome = _judge(error, executed)
    outcome["seconds"] = round(time.perf_counter() - start, 2)
    outcome["executed"] = f"{source.stem}/{source.name}" if executed.exists() else ""
    try:
        export_html(executed, executed.with_suffix(".html"))
        outcome["html"] = f"{source.stem}/{source.stem}.html"
    except Exception as error:
        # Whatever nbconvert raises, the run and its verdict stand; the missing copy fails the batch.
        outcome["html_error"] = f"{type(error).__name__}: {error}"
    verdict = Verdict(notebook=source.stem, **outcome)
    write_json(out_dir / "run.json", {**record, **asdict(verdict)})
    return verdict


def export_html(executed: Path, html: Path) -> None:
    """Write an executed notebook as one HTML file that asks nothing of the network.

    MathJax, require.js and Mermaid would come from outside, and stored widget state makes nbconvert load a widget
    manager; all are left out.
    """
    import nbformat
    from nbconvert import HTMLExporter

    notebook = nbformat.read(executed, as_version=4)
    notebook.metadata.pop("widgets", None)
    exporter = HTMLExporter(mathjax_url="", require_js_url="", jquery_url="", mermaid_js_url="")
    body, _ = exporter.from_notebook_node(notebook, resources={"metadata": {"name": executed.stem}})
    _replace(html, body)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of one."""
    _replace(path, json.dumps(content, indent=1, sort_keys=True) + "\n")


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _notebook_files(notebooks: Sequence[Path | str] | None) -> list[Path]:
    files = sorted(paths.NOTEBOOKS.glob("*.ipynb")) if notebooks is None else [Path(entry) for entry in notebooks]
    if not files:
        raise InputError("notebooks: want at least one; got none")
    for file in files:
        if not file.is_file():
            raise InputError(f"notebooks: no such file {file}")
        _check_format(file)
    stems = [file.stem for file in files]
    if len(set(stems)) < len(stems):
        raise InputError(f"notebooks: names must differ, their copies share a folder; got {', '.join(stems)}")
    return [file.resolve() for file in files]


def _check_format(file: Path) -> None:
    import nbformat

    try:
        nbformat.read(file, as_version=4)
    except Exception as error:  # nbformat raises a different type for each way a file can be broken
        raise InputError(f"notebooks: {file} is not a notebook ({type(error).__name__})") from error


def _declared(source: Path) -> set[str]:
    """Names of the parameters cell of a notebook."""
    from papermill import inspect_notebook

    return set(inspect_notebook(str(source)))


def _kernel_config(sockets: str) -> Any:
    """Kernels over Unix sockets in the folder ``sockets``: nothing listens on a port. Windows has none, so it keeps TCP.

    The folder must be this kernel's own: by default all kernels of a process share names in the working directory and
    mix up.
    """
    from traitlets.config import Config

    transport = {} if os.name == "nt" else {"transport": "ipc", "ip": f"{sockets}/k"}
    return Config({"KernelManager": transport, "AsyncKernelManager": transport})


def _judge(error: Exception, executed: Path) -> dict[str, Any]:
    """Status and place of the exception that ended a run. What is not about the notebook (a missing kernel) is raised again."""
    from nbclient.exceptions import CellTimeoutError
    from papermill.exceptions import PapermillExecutionError

    if isinstance(error, PapermillExecutionError):
        name, value, cell = error.ename, error.evalue, error.exec_count
        return {
            "status": "cell-error",
            "error_name": name,
            "error_value": value[-_TAIL_CHARACTERS:],
            "cell": cell,
        }
    if isinstance(error, CellTimeoutError):
        status = "timeout"
    elif isinstance(error, RuntimeError):  # DeadKernelError, or a kernel that never answered
        status = "kernel-died"
    else:
        raise error
    value = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return {
        "status": status,
        "error_name": type(error).__name__,
        "error_value": value,
        "cell": _stopped_in(executed),
    }


def _code_cells(executed: Path) -> list[Any]:
    import nbformat

    cells = nbformat.read(executed, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code" and cell.source.strip()]


def _errors(cell: Any) -> list[Any]:
    return [output for output in cell.outputs if output.output_type == "error"]


def _stopped_in(executed: Path) -> int | None:
    """The code cell, from 1, that ran when the kernel was lost: it holds an error, or no prompt number; None if all have one."""
    cells = _code_cells(executed) if executed.exists() else []
    for number, cell in enumerate(cells, start=1):
        if cell.execution_count is None or _errors(cell):
            return number
    return None


def _quiet_exit(executed: Path) -> dict[str, Any]:
    """``ok``, or ``cell-error`` for a notebook that called ``sys.exit(0)``: papermill lets it pass with cells still to run."""
    for number, cell in enumerate(_code_cells(executed), start=1):
        for error in _errors(cell):
            return {
                "status": "cell-error",
                "error_name": error.ename,
                "error_value": error.evalue,
                "cell": number,
            }
    return {"status": "ok"}


class _Lines:
    """A text sink that hands complete lines to ``say``, so that progress printed inside a notebook is seen outside it."""

    def __init__(self, say: Callable[[str], None], prefix: str):
        self.say, self.prefix, self.rest = say, prefix, ""

    def write(self, text: str) -> None:
        """Take a piece of output."""
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            self.say(self.prefix + line)

    def flush(self) -> None:
        """Do nothing: a line goes out when it is complete."""
