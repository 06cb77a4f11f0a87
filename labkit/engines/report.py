"""What `labkit import` and `labkit diagnose` print."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from labkit.engines.diagnose import Diagnosis
from labkit.engines.record import Record, counted
from labkit.engines.roles import gpu_row
from labkit.engines.step_times import Interval
from labkit.engines.tables import number

_COLUMNS = {"mean_acceptance_length": ".2f", "draft_acceptance_rate": ".3f", "num_speculative_tokens": "d"}
_COLUMNS |= {"batch_size": ".4g", "context_len": ".0f", "output_tokens_per_s": ".1f", "step_ms": ".2f"}


def summary(records: Iterable[Record], limit: int = 20) -> str:
    """A table of the first records, and how often each warning came."""
    rows, warnings, count = [], Counter[str](), 0
    rows.append(["place", "kind", "scope", "length", "rate", "k", "batch", "context", "tok/s", "step_ms"])
    for count, record in enumerate(records, start=1):
        warnings.update(record.warnings)
        if count <= limit:
            values = [(getattr(record, name), form) for name, form in _COLUMNS.items()]
            shown = ["-" if number(value) is None else format(value, form) for value, form in values]
            rows.append([record.place, f"{record.engine} {record.kind}", record.scope, *shown])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    more = [f"... {count - limit} more records; --json or --out has all of them"] if count > limit else []
    return "\n".join(lines + more + counted(warnings, 30))


def _trace_lines(trace: dict[str, Any]) -> list[str]:
    lines = [f"{trace['num_steps']} steps, medians: step {trace['step_ms']:.3f} ms, gap {trace['gap_ms']:.3f} ms"]
    for phase, entry in trace["phases"].items():
        share = entry["attention_ms"] / entry["forward_ms"] if entry["forward_ms"] else 0.0
        lines.append(f"  {phase}: {entry['forward_ms']:.3f} ms, attention {share:.0%}")
        for k in entry["kernels"][:3]:
            lines.append(f"    {k['ms']:.3f} ms  {k['name'][:90]}" + (f"  grid {k['grid']}" if k["grid"] else ""))
    ratio = trace.get("other_over_weights")
    return lines + ([f"  verify without attention: {ratio:.1f} x one read of 16-bit weights"] if ratio else [])


def render(found: Diagnosis) -> str:
    """The diagnosis as text."""

    def shown(value: Interval | None, form: str) -> str:
        return "unknown" if value is None else f"{value[0]:{form}} [{value[1]:{form}}, {value[2]:{form}}]"

    head = {"engine": found.engine, "version": found.engine_version, "model": found.model, "GPU": found.gpu}
    lines = [", ".join(value or f"{name} unknown" for name, value in head.items())]
    lines += _trace_lines(found.trace) if found.trace else [f"acceptance: {found.acceptance}"]
    for band in found.bands:
        low, high, length = band["low"], band["high"], band["mean_acceptance_length"]
        value = f"{length:.2f}" if low is None else shown((length, low, high), ".2f")
        step = f", step {band['step_ms']:.1f} ms at batch {found.batch_size:g}" if band["step_ms"] else ""
        where = f"{band['context_len_low'] or 'any'} to {band['context_len_high'] or 'any'}"
        lines.append(f"  context {where}: {value}, {band['num_windows']} windows{step}")
    if found.slope_ms_per_1k:
        slope, intercept = shown(found.slope_ms_per_1k, ".3f"), shown(found.intercept_ms, ".1f")
        batch = f"batch {found.batch_size:g}" + " (by windows of all batches)" * found.all_batches
        lines += [f"step: {slope} ms per 1,024 cached tokens + {intercept} ms, {batch}"]
    if found.slope_over_floor:
        peak = (gpu_row(found.gpu) or {"gpu": "", "memory_gb_per_s": ""}).get
        read = f"x one KV read at {peak('memory_gb_per_s')} GB/s ({peak('gpu')})"
        lines += [f"  you pay {shown(found.slope_over_floor, '.1f')} {read}"]
    lines += ["against plain windows of the same batch and octave of context:"] if found.baseline else []
    for cell in found.baseline:
        where = "  batch {batch_size:g}, context {context_len:.0f}, plain {plain_context_len:.0f}".format(**cell)
        step = "step {step_ms:.1f} ms, {relative_step_cost:.2f} plain ones of {decode_ms:.1f} ms".format(**cell)
        speed = f"length {cell['mean_acceptance_length']:.2f}, speed-up {shown(cell['speedup'], '.2f')}"
        lines.append(f"{where}: {step}, {speed}, {cell['verdict']}")
    lines += [f"{name}: {role.backend}, {role.how}" for name, role in found.roles.items()]
    lines += [f"likely cause: {found.cause}", f"next step: {found.next_step}"]
    return "\n".join([*lines, *(f"unknown: {x}" for x in found.unknown), *(f"warning: {x}" for x in found.warnings)])
