"""Which backend decodes and which verifies under one engine setting, and whether step rows hold both."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from labkit.breakeven import breakeven
from labkit.decide.forward_costs import FREE, loop_rows
from labkit.decide.step_costs import baseline_ms, step_costs
from labkit.errors import InputError
from labkit.paths import REFERENCE
from labkit.rows import ok_rows


@dataclass(frozen=True)
class Pairing:
    """A decode and a verify backend that are used together; `label` names the engine settings that mean them."""

    label: str
    decode_backend: str
    verify_backend: str


def pairing_rows() -> pd.DataFrame:
    """``data/reference/engine_pairings.csv``: what each setting of an engine version means in our backends, as text."""
    return pd.read_csv(REFERENCE / "engine_pairings.csv", dtype=str, keep_default_na=False)


def engine_pairings() -> list[Pairing]:
    """The settings of `pairing_rows`; those that mean the same backends share one label."""
    table = pairing_rows()
    short = table["setting"].str.replace(r"--attention-backend |attention backend |BatchPrefill\w+", "", regex=True)
    # "(CUDA)", "(Hopper)" and calls stay out of a label; the versions are in it where they make the difference.
    table["label"] = table["engine"] + " " + short.str.replace(r"\s*\((?!backend).*?\)", "", regex=True)
    several = table.groupby(["engine", "setting"])["verify_backend"].transform("nunique") > 1
    table["label"] += (" " + table["engine_version"]).where(several, "")
    groups = table.groupby(["decode_backend", "verify_backend"], sort=False)["label"]
    return [Pairing(", ".join(dict.fromkeys(labels)), *map(str, backends)) for backends, labels in groups]


def pairing_table(step_rows: pd.DataFrame) -> pd.DataFrame:
    """Each engine pairing: label, decode_backend, verify_backend, and measured: "yes" or the role that is missing."""
    rows = ok_rows(step_rows, "step", ["phase", "backend"])
    have = {role: set(rows.loc[rows["phase"] == role, "backend"]) for role in ("decode", "verify")}
    records = []
    for pairing in engine_pairings():
        wanted = {"decode": pairing.decode_backend, "verify": pairing.verify_backend}
        missing = [f"{role} on {name}" for role, name in wanted.items() if name not in have[role]]
        records.append(vars(pairing) | {"measured": f"no {', no '.join(missing)}" if missing else "yes"})
    return pd.DataFrame(records)


def measured_pairings(step_rows: pd.DataFrame) -> list[Pairing]:
    """The engine pairings that step rows hold both roles of, then every other backend that was measured in both.

    Raises InputError when there is none.
    """
    rows, table = ok_rows(step_rows, "step", ["phase", "backend"]), pairing_table(step_rows)
    found = [
        Pairing(row["label"], row["decode_backend"], row["verify_backend"])
        for row in table[table["measured"] == "yes"].to_dict("records")
    ]
    taken = {(pairing.decode_backend, pairing.verify_backend) for pairing in found}
    roles = rows[rows["phase"].isin(("decode", "verify"))].groupby("backend")["phase"].nunique()
    found += [
        Pairing(f"{name}, both roles", name, name) for name in roles.index[roles == 2] if (name, name) not in taken
    ]
    if not found:
        raise InputError("pairings: want a decode and a verify backend of one pairing in the step rows; got none")
    return found


def drafter_rows(rows: pd.DataFrame, pairing: Pairing, drafter: str) -> pd.DataFrame:
    """The drafter's forwards as the pairing runs them: draft on its decode and draft_extend on its verify backend.

    One engine flag moves all roles. `backend` then names both. Works on step rows and on `forward_table`. No rows for
    the drafter `FREE`. Raises InputError: a phase of this drafter was not measured on the pairing's backend.
    """
    own = rows[rows["phase"].isin(("draft", "draft_extend")) & (rows["drafter"] == drafter)]
    wanted = own["phase"].map({"draft": pairing.decode_backend, "draft_extend": pairing.verify_backend})
    found = own[own["backend"] == wanted]
    if missing := sorted(set(own["phase"]) - set(found["phase"])):
        raise InputError(f"{drafter}: {' and '.join(missing)} not measured on the backends of {pairing.label}")
    if own.empty and drafter != FREE:
        raise InputError(f"drafter: none of the step rows is of {drafter!r}")
    return found.assign(backend=" + ".join(dict.fromkeys(found.sort_values("phase")["backend"])))


def is_measured(step_rows: pd.DataFrame, pairing: Pairing, num_speculative_tokens: int) -> bool:
    """Whether some group holds the pairing's decode forward and its verify forward of k+1 tokens."""
    rows = step_rows[step_rows["status"] == "ok"]
    decode = rows[(rows["phase"] == "decode") & (rows["backend"] == pairing.decode_backend)]
    verify = rows[(rows["phase"] == "verify") & (rows["backend"] == pairing.verify_backend)]
    verify = verify[verify["q_len"] == num_speculative_tokens + 1]
    return bool(verify["group"].isin(decode["group"]).any())


def pairing_cells(
    step_rows: pd.DataFrame,
    pairing: Pairing,
    *,
    num_speculative_tokens: int,
    acceptance_length: float,
    drafter: str = FREE,
    baseline: str = "fastest",
) -> tuple[pd.DataFrame, list[dict[str, Any]]]:
    """`labkit.breakeven.breakeven` of one pairing at one k under an imposed length: its cells, and its crossovers.

    baseline : "fastest" plain decode of each cell, or "own": the pairing's decode backend.

    The cells also have label, step_ms and decode_ms (medians over rounds). Raises InputError: pairing or drafter
    was not measured at this k, or the length exceeds k+1.
    """
    k, phase, backend = num_speculative_tokens, step_rows["phase"], step_rows["backend"]
    decode = (phase == "decode") & ((backend == pairing.decode_backend) | (baseline == "fastest"))
    verify = (phase == "verify") & (backend == pairing.verify_backend) & (step_rows["q_len"] == k + 1)
    if not is_measured(step_rows, pairing, k):
        raise InputError(f"pairings: {pairing.label} was not measured at k = {k}")
    frame = loop_rows(pd.concat([step_rows[decode | verify], drafter_rows(step_rows, pairing, drafter)]))
    frame = frame[(frame["arm"] == "plain") | (frame["drafter"] == drafter)]
    result = breakeven(
        frame, acceptance_length, baseline="fastest" if baseline == "fastest" else pairing.decode_backend
    )
    times = [
        (np.nanmedian(c.step_ms[:, k]), np.nanmedian(baseline_ms(c, result.baseline)[1])) for c in step_costs(frame)
    ]
    step_ms, decode_ms = np.array(times).T
    cells = result.cells.assign(label=pairing.label, step_ms=step_ms, decode_ms=decode_ms)
    return cells, [curve | {"label": pairing.label} for curve in result.crossovers]
