"""`labkit try`: is a backend right, how fast is it here, and how far from the floor and from another backend?"""

import argparse
import signal
from itertools import groupby
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pandas as pd

from labkit.axes import parse_axes
from labkit.decide.ratios import ratio_table
from labkit.errors import BackendUnavailable, InputError, Unsupported
from labkit.experiments import attention, common
from labkit.plots.attention_table import cell_table
from labkit.plots.style import format_tokens
from labkit.shapes import AttentionShape
from labkit.worker import one_line, status_of

# Small enough for the whole trial to take less than 30 s; longer contexts are a `--set context_len=` away.
AXES: dict[str, common.Axes] = {
    "cpu": {"context_len": [512, 4096], "q_len": [1, 5], "num_rounds": [7], "max_repeats": [1]},
    "gpu": {"context_len": [4096, 32768, 131072], "q_len": [1, 8], "num_rounds": [21], "max_repeats": [1]},
}


def odd_shapes(model: str, q_dtype: str) -> list[AttentionShape]:
    """A few sizes at which kernels break: one key, a full page and a key more, ragged batches, a verify block."""
    num_qo_heads, num_kv_heads, head_dim = attention.heads_of(model)
    return [
        AttentionShape(
            batch_size=len(contexts), q_len=q_len, context_len=contexts, num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size, q_dtype=q_dtype,
        )
        for q_len, contexts, page_size in (
            (1, (0,), 16), (1, (127, 16, 300), 16), (5, (128, 0, 59), 1), (8, (1000, 333), 16), (17, (110, 0), 64),
        )
    ]  # fmt: skip


def try_backend(
    backend: str, *, against: str | None = None, assignments: list[str] | None = None, full: bool = False
) -> dict[str, Any]:
    """Check a backend on odd shapes (``full``: `labkit.experiments.matrix.full_matrix`), then time it.

    ``against`` is timed in the same rounds; ``assignments`` (``axis=v,..``, axes of `labkit run attention`) replace
    the defaults.

    Returns backend, against, device, read_gb_per_s (measured now), correct, num_right, unsupported (reason -> shapes),
    faults (request, query_row, head, key_tile of each wrong shape) and cells: those of `cell_table` with the ratio of
    time to that of ``against`` (same rounds, 95% interval), or why a cell has no time. A wrong backend is not timed,
    one that nothing could be checked on is not correct.

    Raises InputError for an unknown backend or axis or ``against`` itself, BackendUnavailable where one cannot run.
    """
    from labkit.calibrate import read_bandwidth
    from labkit.experiments.matrix import check_shapes, full_matrix

    if backend == against:
        raise InputError(f"--against must name another backend, got {against!r}")
    kind, device = common.auto_preset(), common.device()
    preset = attention.PRESETS[kind] | AXES[kind]
    axes = preset | parse_axes(assignments or [], preset) | {"backend": [backend, *([against] if against else [])]}
    points = attention.points(kind, **axes)
    shapes = list(full_matrix()) if full else odd_shapes(axes["model"][0], axes["q_dtype"][0])
    order = "permuted" if full else axes["page_order"][0]
    checked = check_shapes(backend, shapes, device=device, page_order=order)
    bandwidth = read_bandwidth(device)["median"]
    cells = _timed(points, bandwidth, against) if not checked.faults else []
    own = {cell["status"] for cell in cells if cell["backend"] == backend}
    correct = not checked.faults and own <= {"ok", "unsupported", "oom"} and (checked.num_right > 0 or "ok" in own)
    found = {"backend": backend, "against": against, "device": device, "read_gb_per_s": bandwidth, "correct": correct}
    found |= {"num_right": checked.num_right, "worst_error": checked.worst_error, "faults": checked.faults}
    return found | {"unsupported": dict(checked.unsupported), "cells": cells, "text": checked.to_text()}


def _timed(points: list[dict[str, Any]], bandwidth: float, against: str | None) -> list[dict[str, Any]]:
    """Every cell of the points, in turn: its backends interleaved, one record per backend."""
    records: list[dict[str, Any]] = []
    for _, group in groupby(points, key=lambda point: point["group"]):
        cell, frames = list(group), []
        for point, outcome in zip(cell, attention.measure(cell), strict=True):
            if isinstance(outcome, Exception):
                records.append(point | {"status": status_of(outcome), "reason": one_line(outcome)})
            else:
                frames.append(pd.DataFrame([point | sample for sample in outcome]).assign(run_id="now", status="ok"))
        if not frames:
            continue
        rows = pd.concat(frames, ignore_index=True)
        table = cell_table(rows, bandwidth).assign(status="ok", ratio=np.nan, ratio_low=np.nan, ratio_high=np.nan)
        is_other = rows["backend"] == against
        if len(frames) > 1:
            ratio = ratio_table(rows[is_other], rows[~is_other], ignoring=["backend"]).iloc[0]
            names = ["ratio", "ratio_low", "ratio_high"]
            table.loc[table["backend"] != against, names] = ratio[names].to_numpy(float)
        plain = table.astype(object).where(table.notna(), None)
        records += [{str(name): value for name, value in row.items()} for _, row in plain.iterrows()]
    return records


def render(found: dict[str, Any]) -> str:
    """The outcome as text: what was checked, then one line per cell and backend."""
    lines = [f"{found['backend']} on {found['device']}: {found['text']}"]
    if not found["cells"]:
        return "\n".join(lines)
    lines.append(
        f"read bandwidth now {found['read_gb_per_s']:,.0f} GB/s; floor: keys and values read once; median times"
    )
    row = "{:>8} {:>3} {:>5}  {:<20} {:>10} {:>8} {:>8} {:>6}  {:<20}  {}"
    versus = f"time / {found['against']}" if found["against"] else ""
    lines.append(
        row.format("context", "q", "batch", "backend", "us", "x floor", "programs", "splits", versus, "kernel")
    )
    for cell in found["cells"]:
        where = [format_tokens(cell["context_len"]), cell["q_len"], cell["batch_size"], cell["backend"]]
        if cell["status"] != "ok":
            lines.append(row.format(*where, cell["status"], "", "", "", "", cell["reason"]))
            continue
        counts = ["-" if cell[name] is None else round(cell[name]) for name in ("num_programs", "num_splits")]
        ratio = "" if cell["ratio"] is None else "{ratio:.2f} [{ratio_low:.2f}, {ratio_high:.2f}]".format(**cell)
        time, over = f"{cell['attention_us']:,.1f}", f"{cell['over_floor']:.2f}"
        lines.append(row.format(*where, time, over, *counts, ratio, cell["kernel"]))
    return "\n".join(lines)


def _child(pipe: Connection, asked: dict[str, Any], backend_file: str | None) -> None:
    """`try_backend` in a process of its own; what is bad input goes back as text."""
    try:
        if backend_file:
            from labkit.attention.api import load_backend_file

            load_backend_file(backend_file)
        pipe.send(try_backend(**asked))
    except (InputError, Unsupported, BackendUnavailable) as error:
        pipe.send(str(error))


def run_from_arguments(arguments: argparse.Namespace) -> tuple[dict[str, Any], str, int]:
    """`labkit try` with parsed arguments. 0 when the backend is right, else 1.

    It runs in a process of its own, which a kernel may end.
    """
    asked = {name: getattr(arguments, name) for name in ("backend", "against", "assignments", "full")}
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(sender, asked, arguments.backend_file))
    child.start()
    sender.close()  # so that the end of the child is the end of the pipe
    try:
        found = receiver.recv()
    except EOFError:
        child.join()
        code = child.exitcode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        shown = {"backend": arguments.backend, "correct": False, "cells": [], "reason": f"the process was {how}"}
        return shown, f"{arguments.backend}: the process that ran it was {how}", 1
    finally:
        child.kill()
        child.join()
    if isinstance(found, str):
        raise InputError(found)
    shown = {name: value for name, value in found.items() if name != "text"}
    return shown, render(found), 0 if found["correct"] else 1
