"""`labkit best-k`: stored costs and acceptance in, a table of the best k out, or the flags that set it in an engine."""

import argparse
import contextlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.axes import keep_where
from labkit.decide.best_k import SETTING, best_k, not_judged, regret
from labkit.decide.capacity import AXES, Capacity, memory_gb
from labkit.decide.composed import stored_acceptance, stored_costs
from labkit.decide.forward_costs import FREE
from labkit.decide.step_costs import CELL_KEY
from labkit.decide.surface import verdict_surface
from labkit.decide.verdict import acceptance_notes, judging_options, not_judged_lines, parse_length
from labkit.errors import InputError
from labkit.results import read_sidecar, run_files
from labkit.rows import matching, plain_record, run_ids
from labkit.shapes import model_shape

_OWN, _PLACE = ["gpu", "target", "drafter", "verify_backend"], ["context_len", "batch_size"]
_DTYPES = ["weight_dtype", "kv_dtype"]
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
    too_large : gpu, target, drafter, verify_backend, weight_dtype, kv_dtype, context_len and batch_size of points that
        ran out of memory (origin measured) or cannot fit by arithmetic (origin modelled), reason; needed_gb and free_gb
        where the planned point has no row.
    unjudged : `labkit.decide.best_k.not_judged`.
    runs : run ids of the costs and acceptance behind them.
    """

    best: pd.DataFrame
    regret: pd.DataFrame
    too_large: pd.DataFrame
    unjudged: pd.DataFrame
    runs: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; null where unknown."""
        tables = {"best_k": self.best, "one_k_everywhere": self.regret, "does_not_fit": self.too_large}
        tables["not_judged"] = self.unjudged
        return {name: [plain_record(row) for row in table.to_dict("records")] for name, table in tables.items()}

    def to_text(self) -> str:
        """Per setting a table context x batch of k, speed-up and interval, and what one k everywhere would lose."""
        parts = []
        for key, rows in self.best.groupby(SETTING, dropna=False, sort=True):
            parts.append("\n".join(self._setting_lines(dict(zip(SETTING, key, strict=True)), rows)) + "\n")
        own = [*_OWN, *_DTYPES]
        judged = pd.MultiIndex.from_frame(self.best[own].astype(str))
        others = self.unjudged[~pd.MultiIndex.from_frame(self.unjudged[own].astype(str)).isin(judged)]
        for names, rows in others.groupby(_OWN[:3]):
            parts += [f"{', '.join(map(str, names))} drafter: {line}" for line in not_judged_lines(rows)]
        legend = "k: speed-up [95 % interval]; off: no k is faster than plain decode; ? = the interval holds 1"
        return "\n".join([*parts, legend])

    def _setting_lines(self, names: dict[str, Any], rows: pd.DataFrame) -> list[str]:
        lines = [_setting_text(names)]
        own = {name: names[name] for name in (*_OWN, *_DTYPES)}
        large, open_cells = matching(self.too_large, own), matching(self.unjudged, own)
        open_cells = open_cells[open_cells["workload"].isna() | (open_cells["workload"] == names["workload"])]
        texts = [rows.assign(text=[cell_text(row) for row in rows.to_dict("records")])]
        texts += [large.assign(text="does not fit")]
        texts += [cells.iloc[:1].assign(text=_open_text(cells)) for _, cells in open_cells.groupby(_PLACE)]
        places = pd.concat([part[[*_PLACE, "text"]] for part in texts]).drop_duplicates(_PLACE)
        table = places.astype(dict.fromkeys(_PLACE, int))
        table = table.pivot(index="context_len", columns="batch_size", values="text").fillna("not measured")
        lines.append(table.rename_axis(index="context", columns="batch").to_string())
        lines += [f"  {line}" for line in not_judged_lines(open_cells)]
        for row in large.to_dict("records"):
            lines.append(f"  context {row['context_len']:,.0f} x batch {row['batch_size']:.0f}: {row['reason']}")
        lines += [f"  {note}" for note in acceptance_notes(rows)]
        for row in matching(self.regret, names).to_dict("records"):
            lost = f"loses {row['mean_regret']:.1%} on average, {row['worst_regret']:.1%} at worst"
            place = f"context {row['worst_context_len']:g}, batch {row['worst_batch_size']:g}"
            lines.append(f"  k = {row['num_speculative_tokens']} everywhere {lost} ({place})")
        return lines

    def flags(self, engine: str) -> str:
        """Launch flags of the one setting, behind a comment that says how sure they are. Raises as `engine_flags`."""
        setting, k = self.one_setting()
        chosen = engine_flags(engine, setting["drafter"], k)
        open_cells = int((~self.best["decided"].astype(bool)).sum())
        comment = f"# k = {k} loses least over {len(self.best)} cells; {open_cells} of them undecided (? in the table)"
        origins = sorted(set(self.best["origin"].dropna()) - {"measured"})
        comment += f"; acceptance of some {', '.join(origins)}" if origins else ""
        imposed = ["an imposed length is the same at every k, which favours the smallest"] * ("forced" in origins)
        about = f"measured on {_setting_text(setting)}"
        notes = [about, f"runs: {', '.join(self.runs)}", *imposed, *acceptance_notes(self.best)]
        return "\n".join([comment, *(f"# {note}" for note in notes), chosen])

    def one_setting(self) -> tuple[dict[str, Any], int]:
        """The one setting and the k that loses least everywhere. Raises InputError where there are several settings."""
        if len(keys := self.regret[SETTING].drop_duplicates()) > 1:
            varying = [name for name in SETTING if keys[name].nunique(dropna=False) > 1]
            values = ", ".join(sorted({str(value) for value in keys[varying[0]]}))
            select = " ".join(f"{name}=VALUE" for name in varying)
            raise InputError(f"--emit: want runs of one {varying[0]}, got {values}; select with --where {select}")
        best = self.regret.sort_values(["mean_regret", "num_speculative_tokens"]).iloc[0]
        return dict(keys.iloc[0]), int(best["num_speculative_tokens"])


def _setting_text(names: Mapping[str, Any]) -> str:
    """Device and data of a setting."""
    text = names["workload"] if isinstance(names["workload"], str) else "imposed length, the same at every k"
    about = f"{names['gpu']}, {names['target']}, {names['drafter']} drafter, {names['weight_dtype']} weights"
    return f"{about}, {names['kv_dtype']} KV, verify on {names['verify_backend']}, {text}"


def _open_text(cells: pd.DataFrame) -> str:
    """What stands in the table where no k of a context and batch could be judged."""
    if (cells["verdict"] == "cannot_pay").all():
        return "off, cannot pay"
    if cells["reason"].str.startswith("imposed length").all():
        return f"no k up to {cells['num_speculative_tokens'].max()} reaches it"
    return "no acceptance" if cells["reason"].str.startswith("no acceptance").all() else "not judged"


def cell_text(row: Mapping[Hashable, Any]) -> str:
    """A row of `labkit.decide.best_k.best_k`: ``4: 2.43 [1.57, 3.57]``, ``off``; "?" where the interval holds 1."""
    doubt = "" if row["decided"] else " ?"
    if row["best_k"] == 0:
        return "off, cannot pay" if row["verdict"] == "cannot_pay" else f"off{doubt}"
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
    rows = stored_costs(paths)
    acceptance: Any = stored_acceptance(paths) if acceptance_length is None else parse_length(acceptance_length)
    cells = verdict_surface(rows, acceptance, acceptance_from=acceptance_from, baseline=baseline).result.cells
    kept = keep_where(cells, where)
    large = pd.concat([_ran_out(rows, kept), _cannot_fit(rows, kept, paths)], ignore_index=True)
    # A cell without acceptance has no workload, so that conditions on it do not apply.
    known = [text for text in where if not text.startswith(("workload", "temperature"))]
    large, unjudged = (keep_where(table, known, strict=False) for table in (large, not_judged(cells)))
    unjudged = unjudged[unjudged["workload"].isna() | unjudged["workload"].isin(kept["workload"])]
    runs = run_ids(rows, kept, CELL_KEY)
    if acceptance_length is None:
        runs |= run_ids(acceptance, kept, ("drafter", "workload", *([] if acceptance_from else ["target"])))
    return Recommendation(best_k(kept), regret(kept), large, unjudged, sorted(runs))


def _ran_out(rows: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """The points of the settings of ``cells`` that ran out of memory."""
    large = rows[rows["status"] == "oom"].assign(**{name: None for name in _OWN if name not in rows})
    if "backend" in large:  # of a step row; who drafts beside a forward of the target alone is free
        large["verify_backend"] = large["verify_backend"].fillna(large["backend"])
        large["drafter"] = large["drafter"].mask(large["experiment"].eq("step") & large["drafter"].eq("none"), FREE)
    # A point that failed may not know its dtype of KV: it stands for all that were measured with its weights.
    points = large[[*_OWN, "weight_dtype", *_PLACE, "reason"]].dropna(subset=[*_OWN, *_PLACE])
    own = cells[[*_OWN, *_DTYPES]].drop_duplicates()
    points = points.drop_duplicates([*_OWN, "weight_dtype", *_PLACE]).merge(own)
    computed = points["reason"].str.contains("computed, not tried", na=False)
    origin = computed.map({True: "modelled", False: "measured"})
    return points.assign(needed_gb=float("nan"), free_gb=float("nan"), origin=origin)


def _cannot_fit(rows: pd.DataFrame, cells: pd.DataFrame, paths: Sequence[Path | str]) -> pd.DataFrame:
    """Planned places of the settings of ``cells`` without any row that `labkit.decide.capacity` finds too large.

    Of the device's own memory where the run tells it, with the share of ``AXES``; the drafter is not counted, its shape
    is not known here. Unknown devices and models are passed over.
    """
    own = cells[[*_OWN, *_DTYPES, "num_speculative_tokens"]].groupby([*_OWN, *_DTYPES], as_index=False).min()
    seen = set(rows[["gpu", "target", "weight_dtype", *_PLACE]].itertuples(index=False, name=None))
    found = {}
    for sidecar in (read_sidecar(file) for path in paths for file in run_files(Path(path))):
        grid, device = sidecar.get("grid", {}), sidecar.get("provenance", {}).get("device", {})
        here = own[(own["gpu"] == sidecar["gpu"]) & own["target"].isin(grid.get("target", ()))]
        for setting in here.to_dict("records"):
            k = int(setting.pop("num_speculative_tokens"))
            with contextlib.suppress(InputError):  # no shape, no memory or no such dtype: nothing is claimed
                room = _room(setting, device.get("memory_mib"), max(grid.get("num_gpus", [1])))
                for place in product(grid.get("context_len", ()), grid.get("batch_size", ())):
                    cell = room.cell(place[0], place[1], k)
                    new = (setting["gpu"], setting["target"], setting["weight_dtype"], *place) not in seen
                    if new and not cell["fits"]:
                        values = {name: cell[name] for name in (*_PLACE, "needed_gb", "free_gb", "reason")}
                        found[(*setting.values(), *place)] = setting | values | {"origin": "modelled"}
    return pd.DataFrame(found.values(), columns=[*_OWN, *_DTYPES, *_PLACE, "needed_gb", "free_gb", "reason", "origin"])


def _room(setting: Mapping[Hashable, Any], memory_mib: float | None, num_gpus: int) -> Capacity:
    shape = model_shape(setting["target"].removeprefix("random:"))
    if setting["target"].startswith("random:"):  # seeded weights take any context
        shape = replace(shape, max_context_len=1 << 40)
    size = memory_mib * 2**20 / 1e9 if memory_mib else memory_gb(setting["gpu"])
    weight, kv = setting["weight_dtype"], setting["kv_dtype"]
    return Capacity(shape, None, size, AXES["memory_share"][0], weight, kv, weight, num_gpus, 0.0)


def check_engine(engine: str) -> None:
    """Raise InputError for an engine whose flags are not known."""
    if engine not in ENGINES:
        raise InputError(f"--emit: want one of {', '.join(ENGINES)}, got {engine!r}")


def engine_flags(engine: str, drafter: str, k: int) -> str:
    """Launch flags that draft k tokens with one chain; without speculation a comment.

    SGLang counts the root in its draft tokens (k+1), vLLM and TensorRT-LLM do not. Raises InputError: unknown engine.
    """
    check_engine(engine)
    if k == 0:
        return f"# {engine}: no speculative flags; plain decode is faster on average"
    if drafter in (FREE, "one layer"):
        raise InputError(f"--emit: {drafter!r} is a cost without a drafter; select one with --where drafter=NAME")
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
    if arguments.emit:
        check_engine(arguments.emit)
    found = recommend(arguments.paths, **judging_options(arguments))
    if not arguments.emit:
        return found.to_dict(), found.to_text(), 0
    print(found.flags(arguments.emit))
    return None
