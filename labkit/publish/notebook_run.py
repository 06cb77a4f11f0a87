"""One notebook run: papermill behind a thin runner that keeps the executed copy, judges it and exports HTML.

A run is judged by the exception that ends it. The metadata that papermill leaves in a notebook says "completed" after
a timeout and after a killed kernel, so it is never asked.
"""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labkit.paths import write_whole
from labkit.provenance import redact

_TAIL_CHARACTERS = 2000


@dataclass(frozen=True)
class Verdict:
    """How one notebook ended: ``status`` is ok, cell-error, timeout or kernel-died.

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
        first = self.error_value.partition("\n")[0]
        what = f" {self.error_name}: {first}" if self.error_name else ""
        html = f" (no HTML: {self.html_error})" if self.html_error else ""
        return f"{self.notebook:<24} {self.status}{where}, {self.seconds:.1f} s{what}{html}"


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
    declared = declared_parameters(source)
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
                str(source),
                str(executed),
                parameters=used,
                # Not papermill's `cwd`: it moves the whole process, and other notebooks start their kernels meanwhile.
                resources={"metadata": {"path": str(source.parent)}},
                execution_timeout=timeout_s,
                progress_bar=False,
                config=_kernel_config(sockets),
                stdout_file=lines,
                stderr_file=lines,
            )
            outcome = _quiet_exit(executed)
        except Exception as error:
            outcome = _judge(error, executed)
    outcome["seconds"] = round(time.perf_counter() - start, 2)
    outcome["executed"] = f"{source.stem}/{source.name}" if executed.exists() else ""
    if executed.exists():  # outputs and papermill's notes hold paths and whatever a cell printed
        write_whole(executed, json.dumps(redact(json.loads(executed.read_text("utf-8"))), indent=1).encode() + b"\n")
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
    outside = ("mathjax_url", "require_js_url", "jquery_url", "mermaid_js_url", "mermaid_layout_elk_js_url")
    exporter = HTMLExporter(**dict.fromkeys(outside, ""))
    body, _ = exporter.from_notebook_node(notebook, resources={"metadata": {"name": executed.stem}})
    write_whole(html, body.encode())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write redacted JSON so that a reader sees the old file or the new one, never half of one."""
    write_whole(path, json.dumps(redact(content), indent=1, sort_keys=True).encode() + b"\n")


def declared_parameters(source: Path) -> set[str]:
    """Names of the parameters cell of a notebook."""
    from papermill import inspect_notebook

    return set(inspect_notebook(str(source)))


def _kernel_config(sockets: str) -> Any:
    """Kernels over Unix sockets in the folder ``sockets``: nothing listens on a port. Windows keeps TCP.

    The folder must be this kernel's own: by default all kernels of a process share names in the working directory and
    mix up.
    """
    from traitlets.config import Config

    transport = {} if os.name == "nt" else {"transport": "ipc", "ip": f"{sockets}/k"}
    return Config({"KernelManager": transport, "AsyncKernelManager": transport})


def _judge(error: Exception, executed: Path) -> dict[str, Any]:
    """Status and place of the exception that ended a run. One that is not about the notebook is raised again."""
    from nbclient.exceptions import CellTimeoutError
    from papermill.exceptions import PapermillExecutionError

    if isinstance(error, PapermillExecutionError):
        name, value, cell = error.ename, error.evalue, error.exec_count
        return {"status": "cell-error", "error_name": name, "error_value": value[-_TAIL_CHARACTERS:], "cell": cell}
    if isinstance(error, CellTimeoutError):
        status = "timeout"
    elif isinstance(error, RuntimeError):  # DeadKernelError, or a kernel that never answered
        status = "kernel-died"
    else:
        raise error
    value = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return {"status": status, "error_name": type(error).__name__, "error_value": value, "cell": _stopped_in(executed)}


def _code_cells(executed: Path) -> list[Any]:
    import nbformat

    cells = nbformat.read(executed, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code" and cell.source.strip()]


def _stopped_in(executed: Path) -> int | None:
    """The code cell, from 1, that ran when the kernel was lost: the last one that was started. None if none was."""
    cells = _code_cells(executed) if executed.exists() else []
    started = [number for number, cell in enumerate(cells, 1) if cell.metadata.get("papermill", {}).get("start_time")]
    return max(started, default=None)


def _quiet_exit(executed: Path) -> dict[str, Any]:
    """``ok``, or ``cell-error`` after ``sys.exit(0)``, which papermill lets pass with cells still to run."""
    for number, cell in enumerate(_code_cells(executed), start=1):
        for output in cell.outputs:
            if output.output_type == "error":
                what = {"error_name": output.ename, "error_value": output.evalue, "cell": number}
                return {"status": "cell-error", **what}
    return {"status": "ok"}


class _Lines:
    """A text sink that hands complete lines to ``say``: progress printed inside a notebook is seen outside it."""

    def __init__(self, say: Callable[[str], None], prefix: str):
        self.say, self.prefix, self.rest = say, prefix, ""

    def write(self, text: str) -> None:
        """Take a piece of output."""
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            self.say(self.prefix + redact(line))

    def flush(self) -> None:
        """Do nothing: a line goes out when it is complete."""
