"""Arms side by side: times apart from one another, acceptance, equal outputs, failures, and the ratio with an interval.

The unit is (prompt, launch): repeats of a prompt within one launch are pairs between the arms and give one median. The
interval resamples launches, then prompts. With one launch it holds prompts only, and says so.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from labkit.decide.compare import compare_runs
from labkit.decide.engine_truth import engine_cells
from labkit.decide.intervals import RESAMPLES, generator, percentile_interval, student_spread
from labkit.rows import is_missing

Sidecars = Mapping[str, Mapping[str, Any]]
PAIR = ["run_id", "scene", "prompt_id", "concurrency", "round"]
_TIMES = (
    *("ttft_ms", "prefill_tokens_per_s", "itl_ms", "tpot_ms", "tokens_per_chunk"),
    *("decode_tokens_per_s", "engine_step_ms"),
)
_ONE_LAUNCH = "one launch: the interval holds prompts, not what differs from start to start"


def request_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The compared requests (measured, nothing wrong) with what is derived from them, one row each.

    Adds tokens_per_chunk; itl_ms, the mean gap between events; tpot_ms, the time per token after the first event;
    decode_tokens_per_s, its inverse. The first token's time is in neither; the first event is taken as the one token of
    the prefill. engine_step_ms and prefill_tokens_per_s are of the engine's own times, the latter else of ttft_ms.
    """
    kept = rows[(rows["record"] == "request") & (rows["stage"] == "measured") & (rows["status"] == "ok")].copy()
    times = [[] if is_missing(value) else list(value) for value in kept["chunk_ms"]]
    span = np.array([t[-1] - t[0] if len(t) > 1 else np.nan for t in times])
    chunks, tokens = kept["num_chunks"].to_numpy(float), kept["num_output_tokens"].to_numpy(float)
    kept["tokens_per_chunk"] = tokens / np.where(chunks > 0, chunks, np.nan)
    kept["itl_ms"] = span / np.where(chunks > 1, chunks - 1, np.nan)
    kept["tpot_ms"] = span / np.where(tokens > 1, tokens - 1, np.nan)
    kept["decode_tokens_per_s"] = 1e3 / kept["tpot_ms"]
    steps = kept["num_verify_steps"].fillna(kept["num_output_tokens"] - 1).where(kept["num_output_tokens"] > 1)
    kept["engine_step_ms"] = kept["engine_decode_ms"] / steps
    computed = kept["num_prompt_tokens"] - kept["num_cached_tokens"].fillna(0)
    kept["prefill_tokens_per_s"] = 1e3 * computed / kept["engine_prefill_ms"].fillna(kept["ttft_ms"])
    return kept


def ratio(a: pd.DataFrame, b: pd.DataFrame, column: str) -> dict[str, Any]:
    """Column of B over A: value, low, high, num_prompts, num_launches. Pairs share run, scene, prompt, load and repeat.

    Bounds are NaN for one prompt of one launch; everything is NaN without a pair.
    """
    pairs = a[[*PAIR, "launch", column]].merge(b[[*PAIR, "launch", column]], on=PAIR, suffixes=("_a", "_b"))
    pairs["log"] = np.log(pairs[f"{column}_b"] / pairs[f"{column}_a"])
    pairs["start"] = pairs["launch_a"] + "|" + pairs["launch_b"]
    pairs["prompt"] = pairs["scene"] + "|" + pairs["prompt_id"].fillna("") + "|" + pairs["concurrency"].astype(str)
    table = pairs.pivot_table(index="start", columns="prompt", values="log", aggfunc="median")
    value = float(np.nanmean(np.nanmean(table, axis=1))) if table.size else np.nan
    draws = _draws(table.to_numpy(float), generator(0, "replay", column)) if table.size else np.array([])
    low, high = np.exp(percentile_interval(draws))
    sizes = {"num_prompts": table.shape[1], "num_launches": table.shape[0], "num_pairs": len(pairs)}
    return {"value": float(np.exp(value)), "low": float(low), "high": float(high), **sizes}


def _draws(table: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Resampled means of [num_launches, num_prompts]: launches first, then prompts, widened for the fewer of them."""
    num_launches, num_prompts = table.shape
    centre = float(np.nanmean(np.nanmean(table, axis=1)))
    launches = rng.integers(0, num_launches, size=(RESAMPLES, num_launches))
    prompts = rng.integers(0, num_prompts, size=(RESAMPLES, num_prompts))
    picked = table[launches[:, :, None], prompts[:, None, :]]
    means = np.nanmean(picked.reshape(RESAMPLES, -1), axis=1)
    spread = student_spread(num_launches if num_launches > 1 else num_prompts, RESAMPLES, rng)
    return centre + spread * (means - centre)


def first_difference(a: pd.Series, b: pd.Series) -> int:
    """The first token at which two answers differ, from 0.

    Counted in whole equal events, which is exact where an event holds one token and else a lower bound.
    """
    pairs = zip(a["output_text"] or "", b["output_text"] or "", strict=False)
    common = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a["output_text"]), len(b["output_text"])))
    ends = [np.cumsum([] if is_missing(row["chunk_sizes"]) else list(row["chunk_sizes"])) for row in (a, b)]
    return max(int(np.searchsorted(end, common, side="right")) for end in ends)


def outputs(a: pd.DataFrame, b: pd.DataFrame) -> dict[str, Any]:
    """identical_output_share of the pairs, and the first differing token of each prompt whose answers differ."""
    columns = [*PAIR, "output_digest", "output_text", "chunk_sizes"]
    pairs = a[columns].merge(b[columns], on=PAIR, suffixes=("_a", "_b"))
    equal = pairs["output_digest_a"] == pairs["output_digest_b"]
    names = ("output_text", "chunk_sizes")
    differ = {
        str(pair["prompt_id"]): first_difference(*(pd.Series({n: pair[n + s] for n in names}) for s in ("_a", "_b")))
        for pair in pairs[~equal].to_dict("records")
    }
    return {"identical_output_share": float(equal.mean()) if len(pairs) else np.nan, "first_differing_token": differ}


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per scene, load and endpoint: medians over prompts of the medians over repeats, and counts.

    Rates per token come from requests; acceptance from the engine's counters where a page told them, else from what it
    told with each answer. energy_per_token_j: of the passes whose energy was read.
    """
    requests = request_table(rows)
    found = []
    for (scene, load, endpoint), part in rows.groupby(["scene", "concurrency", "endpoint"], sort=True):
        mine = requests[(requests["scene"] == scene) & (requests["endpoint"] == endpoint)]
        mine = mine[mine["concurrency"] == load]
        if mine.empty and part["fault"].isna().all():  # the scene's warm-up
            continue
        by_prompt = mine.groupby("prompt_id")
        times = {name: float(by_prompt[name].median().median()) if len(mine) else np.nan for name in _TIMES}
        passes = part[(part["record"] == "counters") & (part["stage"] == "measured")]
        whole = passes[passes["num_output_tokens"].notna()]
        seconds = whole["duration_ms"].sum() / 1e3
        counted = passes if passes["num_accepted_tokens"].notna().any() else mine
        attempts = part[part["record"] == "request"]
        found.append(
            {
                **{"scene": scene, "concurrency": load, "endpoint": endpoint, "num_requests": len(mine)},
                "num_failed": int(attempts["fault"].notna().sum()),
                "faults": ", ".join(f"{n} {f}" for f, n in attempts["fault"].value_counts().items()),
                **times,
                "output_tokens_per_s": float(whole["num_output_tokens"].sum() / seconds) if seconds else np.nan,
                **_acceptance(counted),
                "cached_share": _share(mine["num_cached_tokens"], mine["num_prompt_tokens"]),
                "energy_per_token_j": _share(
                    passes["energy_j"], passes["num_output_tokens"].where(passes["energy_j"].notna())
                ),
                **_spread(mine),
                "answers_right": _right(mine["answer"]),
            }
        )
    return pd.DataFrame(found)


def _share(part: pd.Series, whole: pd.Series) -> float:
    known = part.notna() & whole.notna()
    return float(part[known].sum() / whole[known].sum()) if known.any() and whole[known].sum() else np.nan


def _acceptance(rows: pd.DataFrame) -> dict[str, float]:
    """Pooled over all steps, those without a draft included."""
    accepted, drafted = rows["num_accepted_tokens"], rows["num_drafted_tokens"]
    length = 1 + _share(accepted, rows["num_verify_steps"])
    return {"mean_acceptance_length": length, "draft_acceptance_rate": _share(accepted, drafted)}


def _spread(rows: pd.DataFrame) -> dict[str, float]:
    """Over the turns of a conversation, tokens/s: mean, median, coefficient of variation, worst."""
    turns = rows.dropna(subset=["turn"]).groupby("turn")["decode_tokens_per_s"].median()
    values = {"mean": turns.mean(), "median": turns.median(), "variation": turns.std() / turns.mean()}
    values["worst"] = turns.min()
    return {f"turns_{name}": float(value) for name, value in values.items()}


def _right(answers: pd.Series) -> str:
    known = answers.dropna()
    return f"{(known == 'right').sum()}/{len(known)}" if len(known) else ""


def retention(rows: pd.DataFrame) -> pd.DataFrame:
    """Decode rate per context length over that of the shortest, per endpoint of the depth scene."""
    requests = request_table(rows)
    deep = requests[requests["scene"] == "depth"]
    table = deep.groupby(["endpoint", "prompt_id"]).agg(
        context_len=("context_len", "median"), decode_tokens_per_s=("decode_tokens_per_s", "median")
    )
    table = table.reset_index().sort_values(["endpoint", "context_len"])
    first = table.groupby("endpoint")["decode_tokens_per_s"].transform("first")
    return table.assign(retention=table["decode_tokens_per_s"] / first)


def comparisons(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Every later endpoint over the first, per scene and load: decode rate, first-token time, outputs."""
    requests, found = request_table(rows), []
    for (scene, load), part in requests.groupby(["scene", "concurrency"], sort=True):
        arms = dict(list(part.groupby("endpoint")))
        base, *others = sorted(map(str, arms))
        for other in others:
            a, b = arms[base], arms[other]
            rates = {name: ratio(a, b, name) for name in ("decode_tokens_per_s", "ttft_ms")}
            found.append({"scene": scene, "concurrency": load, "a": base, "b": other, **rates, **outputs(a, b)})
    return found


def render(rows: pd.DataFrame, sidecars: Sidecars, **guard: Any) -> str:
    """The report as text: a table of the arms, ratios, retention, and the guard's verdict on the servers' settings.

    **guard : ``varying`` and ``allow`` of `labkit.decide.compare.compare_runs`.
    """
    table = summary(rows)
    lines = _step_lines(rows) if (rows["record"] == "steps").any() else []
    if table.empty:
        return "\n".join(lines) or "no request was measured"
    compared = comparisons(rows)
    for (scene, load), part in table.groupby(["scene", "concurrency"], sort=True):
        block = part.drop(columns=["scene", "concurrency"]).set_index("endpoint").T
        block = block[(block.notna() & (block != "")).any(axis=1)].map(_cell)
        lines += [f"{scene}, {load} in flight", block.to_string(), ""]
        mine = [item for item in compared if (item["scene"], item["concurrency"]) == (scene, load)]
        lines += [line for item in mine for line in (*_ratio_lines(item), "")]
    if (rows["scene"] == "depth").any():
        lines += ["", retention(rows).to_string(index=False, float_format=lambda value: f"{value:.4g}")]
    return "\n".join([*lines, *guard_lines(sidecars, **guard)])


def _step_lines(rows: pd.DataFrame) -> list[str]:
    """Steps timed inside an engine, plain and speculative side by side; these rows hold no requests."""
    table = engine_cells(rows)
    names = ["engine", "engine_version", "setting", "target", "num_speculative_tokens", "batch_size", "context_len"]
    shown = table[names].rename(columns={"num_speculative_tokens": "k", "batch_size": "batch"})
    for name in ("plain_ms", "step_ms", "drafts_per_step"):
        shown[name] = [f"{value:.2f}" for value in table[name]]
    bounds = table[["relative_step_cost", "relative_step_cost_low", "relative_step_cost_high"]].itertuples(index=False)
    shown["relative step cost"] = ["{:.2f} [{:.2f}, {:.2f}]".format(*values) for values in bounds]
    failed = rows[(rows["record"] == "steps") & (rows["status"] != "ok")]
    alone = "; no requests are among these rows" if (rows["record"] == "steps").all() else ""
    lines = [f"steps timed inside an engine (record steps){alone}"]
    lines.append(shown.to_string(index=False, float_format=lambda value: f"{value:.0f}"))
    lines += [f"{count} without times: {reason}" for reason, count in failed["reason"].value_counts().items()]
    return [*lines, f"{int(table['num_windows'].sum())} windows; interval: windows resampled, 95%", ""]


def _cell(value: Any) -> Any:
    return "-" if is_missing(value) else f"{value:.4g}" if isinstance(value, float) else value


def _ratio_lines(item: Mapping[str, Any]) -> list[str]:
    lines = []
    for column, text in (("decode_tokens_per_s", "decode rate"), ("ttft_ms", "first-token time")):
        found = item[column]
        if np.isfinite(found["value"]):
            bounds = f" [{found['low']:.3g}, {found['high']:.3g}]" if np.isfinite(found["low"]) else " (no interval)"
            size = f"prompts {found['num_prompts']}, launches {found['num_launches']}, pairs {found['num_pairs']}"
            lines.append(f"{item['b']} over {item['a']}: {text} {found['value']:.3g}x{bounds}; {size}")
    lines += [_ONE_LAUNCH] if item["ttft_ms"]["num_launches"] == 1 else []
    differing = sorted(item["first_differing_token"].values())
    where = f"; first differing token {differing[0]} to {differing[-1]}" if differing else ""
    return [*lines, f"identical outputs {item['identical_output_share']:.0%}{where}"]


def guard_lines(sidecars: Sidecars, **guard: Any) -> list[str]:
    """What the guard says about the settings of each run's endpoints, the first against every other."""
    lines = []
    for run_id, sidecar in sidecars.items():
        endpoints = sidecar.get("endpoints") or {}
        base, *others = sorted(endpoints) or [""]
        for other in others:
            found = compare_runs(endpoints[base], endpoints[other], **guard)
            lines += ["", f"settings of {base} and {other} ({run_id}):"]
            lines += [found.to_text()] if found.differences else ["no difference in what the servers tell"]
    return lines
