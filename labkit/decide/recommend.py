"""`labkit best-k`: stored costs and acceptance in, a table of the best k out, or the flags that set it in an engine."""

import argparse
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.axes import keep_where
from labkit.decide.best_k import SETTING, best_k, regret
from labkit.decide.composed import stored_acceptance, stored_costs
from labkit.decide.forward_costs import FREE
from labkit.decide.surface import verdict_surface
from labkit.decide.verdict import acceptance_notes, parse_length
from labkit.errors import InputError
from labkit.results import experiments_in
from labkit.rows import plain_record

_OWN, _PLACE = ["gpu", "target", "drafter", "verify_backend"], ["context_len", "batch_size"]
ENGINES = ("sglang", "vllm", "trtllm")
# What each engine calls a drafter of labkit; sources: data/reference/engine_flags.csv.
METHODS = {
    "ngram": {"sglang": "NGRAM", "vllm": "ngram", "trtllm": "NGram"},
    "eagle3": {"sglang": "EAGLE3", "vllm": "eagle3", "trtllm": "Eagle3"},
    "mtp": {"sglang": "NEXTN", "vllm": "mtp", "trtllm": "MTP"},
    "dflash": {"sglang": "DFLASH", "vllm": "dflash", "trtllm": "DFlash"},
}
# A drafter that is a model of its own.
MODEL = {"sglang": "STANDALONE", "vllm": "draft_model", "trtllm": "Draft_Target"}


@dataclass(frozen=True)
class Recommendation:
    """What to set.

    best, regret : `labkit.decide.best_k.best_k` and `labkit.decide.best_k.regret`.
    too_large : gpu, target, drafter, verify_backend, context_len and batch_size of points that ran out of memory.
    """

    best: pd.DataFrame
    regret: pd.DataFrame
    too_large: pd.DataFrame

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; null where unknown."""
        tables = {"best_k": self.best, "one_k_everywhere": self.regret, "does_not_fit": self.too_large}
        return {name: [plain_record(row) for row in table.to_dict("records")] for name, table in tables.items()}

    def to_text(self) -> str:
        """Per setting a table context x batch of k, speed-up and interval, and what one k everywhere would lose."""
        lines: list[str] = []
        for key, rows in self.best.groupby(SETTING, dropna=False, sort=True):
            names: dict[str, Any] = dict(zip(SETTING, key, strict=True))
            text = names["workload"] if isinstance(names["workload"], str) else "imposed length, the same at every k"
            about = f"{names['gpu']}, {names['target']}, {names['drafter']} drafter"
            lines.append(f"{about}, verify on {names['verify_backend']}, {text}")
            texts = rows.assign(text=[cell_text(row) for row in rows.to_dict("records")])
            own = (self.too_large[_OWN] == [names[name] for name in _OWN]).all(axis=1)
            large = self.too_large[own].assign(text="does not fit")
            texts = pd.concat([texts, large]).drop_duplicates(["context_len", "batch_size"])
            texts = texts.astype({"context_len": int, "batch_size": int})
            table = texts.pivot(index="context_len", columns="batch_size", values="text").fillna("not measured")
            lines.append(table.rename_axis(index="context", columns="batch").to_string())
            lines += [f"  {note}" for note in acceptance_notes(rows)]
            same = [
                self.regret[name].isna() if pd.isna(value) else self.regret[name] == value
                for name, value in names.items()
            ]
            for row in self.regret[pd.concat(same, axis=1).all(axis=1)].to_dict("records"):
                lost = f"loses {row['mean_regret']:.1%} on average, {row['worst_regret']:.1%} at worst"
                place = f"context {row['worst_context_len']:g}, batch {row['worst_batch_size']:g}"
                lines.append(f"  k = {row['num_speculative_tokens']} everywhere {lost} ({place})")
            lines.append("")
        lines.append("k: speed-up [95 % interval]; off: no k is faster than plain decode; ? = the interval holds 1")
        return "\n".join(lines)

    def flags(self, engine: str) -> str:
        """Launch flags of the one setting, behind a comment that says how sure they are. Raises as `engine_flags`."""
        setting, k = self.one_setting()
        chosen = engine_flags(engine, setting["drafter"], k)
        open_cells = int((~self.best["decided"].astype(bool)).sum())
        comment = f"# k = {k} loses least over {len(self.best)} cells; {open_cells} of them undecided (? in the table)"
        origins = sorted(set(self.best["origin"].dropna()) - {"measured"})
        comment += f"; acceptance partly {', '.join(origins)}" if origins else ""
        return "\n".join([comment, *(f"# {note}" for note in acceptance_notes(self.best)), chosen])

    def one_setting(self) -> tuple[dict[str, Any], int]:
        """The one setting and the k that loses least everywhere. Raises InputError where there are several settings."""
        if len(keys := self.regret[SETTING].drop_duplicates()) > 1:
            varying = [name for name in SETTING if keys[name].nunique(dropna=False) > 1]
            values = ", ".join(sorted({str(value) for value in keys[varying[0]]}))
            raise InputError(
                f"--emit: want runs of one {varying[0]}, got {values}; select with --where {varying[0]}=VALUE"
            )
        best = self.regret.sort_values(["mean_regret", "num_speculative_tokens"]).iloc[0]
        return dict(keys.iloc[0]), int(best["num_speculative_tokens"])


def cell_text(row: Mapping[Hashable, Any]) -> str:
    """A row of `labkit.decide.best_k.best_k`: ``4: 2.43 [1.57, 3.57]``, ``off``; "?" where the interval holds 1."""
    doubt = "" if row["decided"] else " ?"
    if row["best_k"] == 0:
        return f"off{doubt}"
    note = "" if row["origin"] == "measured" else f" {row['origin']}"
    interval = f"[{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"
    return f"{row['best_k']}: {row['speedup']:.2f} {interval}{note}{doubt}"


def recommend(
    paths: Sequence[Path | str],
    *,
    acceptance_length: str | None = None,
    acceptance_from: str | None = None,
    baseline: str = "fastest",
    where: Sequence[str] = (),
) -> Recommendation:
    """The best k of stored runs: loop or step runs for cost, acceptance runs or an imposed length.

    where : ``column=value`` of the cells to keep (``workload=prose``).

    Raises InputError: no cost run, nothing that joins, no acceptance, or `where` names no column or keeps nothing.
    """
    present = experiments_in(*paths)
    rows = stored_costs(paths)
    if acceptance_length is None and "acceptance" not in present:
        raise InputError("acceptance: want acceptance runs, or --acceptance-length X; found neither")
    acceptance: Any = parse_length(acceptance_length) if acceptance_length else stored_acceptance(paths)
    surface = verdict_surface(rows, acceptance, acceptance_from=acceptance_from, baseline=baseline)
    cells = keep_where(surface.result.cells, where)
    best = best_k(cells)
    return Recommendation(best, regret(cells), _too_large(rows, best, where))


def _too_large(rows: pd.DataFrame, best: pd.DataFrame, where: Sequence[str]) -> pd.DataFrame:
    """The points of the settings of ``best`` that ran out of memory, as far as ``where`` keeps their place."""
    large = rows[rows["status"] == "oom"].copy()
    if "backend" in large:  # of a step row; who drafts beside a forward of the target alone is free
        large["verify_backend"] = large["verify_backend"].fillna(large["backend"])
        large["drafter"] = large["drafter"].mask(large["experiment"].eq("step") & large["drafter"].eq("none"), FREE)
    points = large[[*_OWN, *_PLACE]].dropna().drop_duplicates()
    points = points.merge(best[_OWN].drop_duplicates())
    for condition in (text for text in where if text.partition("=")[0] in _PLACE):
        try:
            points = keep_where(points, [condition])
        except InputError:  # no such point is too large
            return points.iloc[:0]
    return points


def engine_flags(engine: str, drafter: str, k: int) -> str:
    """Launch flags that draft k tokens with one chain; without speculation a comment.

    SGLang counts the root in its draft tokens (k+1), vLLM and TensorRT-LLM do not. Raises InputError: unknown engine.
    """
    if engine not in ENGINES:
        raise InputError(f"--emit: want one of {', '.join(ENGINES)}, got {engine!r}")
    if k == 0:
        return f"# {engine}: no speculative flags; plain decode is faster on average"
    if drafter == FREE:
        raise InputError("--emit: no drafter was measured, only verify; select one with --where drafter=NAME")
    known = next((names for name, names in METHODS.items() if drafter.lower().startswith(name)), None)
    method, path = (known or MODEL)[engine], None if drafter == "ngram" else f"<folder of {drafter}>"
    if engine == "sglang":
        flags = ["--speculative-algorithm", method]
        flags += ["--speculative-draft-model-path", f"'{path}'"] if path else []
        block = method in ("NGRAM", "DFLASH")  # drafts at once: no number of steps
        flags += [] if block else ["--speculative-num-steps", str(k), "--speculative-eagle-topk", "1"]
        return " ".join([*flags, "--speculative-num-draft-tokens", str(k + 1)])
    if engine == "vllm":
        settings: dict[str, Any] = {"method": method, "num_speculative_tokens": k} | ({"model": path} if path else {})
        return f"--speculative-config '{json.dumps(settings)}'"
    lines = ["speculative_config:", f"  decoding_type: {method}", f"  max_draft_len: {k}"]
    return "\n".join(lines + ([f"  speculative_model: '{path}'"] if path else []))


def run_from_arguments(arguments: argparse.Namespace) -> tuple[dict[str, Any], str, int] | None:
    """`labkit best-k`."""
    if arguments.emit and arguments.json:
        raise InputError("--emit prints flags, --json the table: wanted one of them")
    found = recommend(
        arguments.paths,
        acceptance_length=arguments.acceptance_length,
        acceptance_from=arguments.acceptance_from,
        baseline=arguments.baseline,
        where=arguments.where,
    )
    if not arguments.emit:
        return found.to_dict(), found.to_text(), 0
    print(found.flags(arguments.emit))
    return None
