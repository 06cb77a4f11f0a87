"""`labkit breakeven` as text and JSON: settings, conditions, tables."""

import json
import re

import numpy as np
import pandas as pd
import pytest

from labkit.acceptance import acceptance_table
from labkit.axes import keep_where
from labkit.breakeven import CELL_COLUMNS, Breakeven, breakeven, verdict_table
from labkit.decide.verdict import MOST_CELLS, render, restricted
from labkit.errors import InputError
from tests.breakeven_worlds import alike, falling
from tests.worlds import (
    Noise,
    cost_rows,
)


def many_settings() -> Breakeven:
    settings = [(f"t{index}", dtype) for index in range(6) for dtype in ("bfloat16", "float8_e4m3fn")][1:]
    rows = [
        cost_rows(falling(2.0, 0.25)).assign(target=target, kv_dtype=dtype, run_id=target + dtype)
        for target, dtype in settings
    ]
    return breakeven(pd.concat(rows, ignore_index=True), 2.5)


def test_many_cells_print_one_setting_and_name_the_rest() -> None:
    result = many_settings()
    assert len(result.cells) > MOST_CELLS
    lines = render(result).splitlines()
    assert len(lines) < 25
    assert f"breakeven --all: {len(result.cells)} cells" in "\n".join(lines)
    assert sum("--where target=t" in line for line in lines) == 10
    assert len(render(result, everything=True).splitlines()) > len(result.cells)


def test_where_keeps_cells_and_their_curves() -> None:
    result = many_settings()
    cells = keep_where(result.cells, ["target=t1,t2", "context_len=1k", "kv_dtype=bfloat16"])
    assert set(cells["target"]) == {"t1", "t2"}
    assert set(cells["context_len"]) == {1024}
    part = restricted(result, cells)
    assert {(curve["target"], curve["kv_dtype"]) for curve in part.crossovers} == {
        ("t1", "bfloat16"),
        ("t2", "bfloat16"),
    }
    for condition, said in (
        ("k=99", "num_speculative_tokens is"),
        ("nosuch=1", "no such column"),
        ("k", "wanted column"),
    ):
        with pytest.raises(InputError, match=said):
            keep_where(result.cells, [condition])


def test_tables_and_verdicts_give_one_interval() -> None:
    acceptance = alike().assign(context_len_high=10**6)
    cell = breakeven(cost_rows(falling(2.0, 0.0)), acceptance).cells.iloc[0]
    row = acceptance_table(acceptance).iloc[0]
    for name in ("mean_acceptance_length_low", "mean_acceptance_length_high"):
        assert cell[name] == pytest.approx(row[name], rel=1e-9)


def test_an_imposed_length_prints_no_workload() -> None:
    result = breakeven(cost_rows(falling(2.0, 0.25)), 2.5)
    assert "workload" not in verdict_table(result.cells)
    about, *_ = render(result).splitlines()
    assert all(str(result.cells[name].iloc[0]) in about for name in ("gpu", "target", "drafter"))


def test_json_and_table_have_the_agreed_form() -> None:
    acceptance = alike().assign(context_len_high=65536)
    result = breakeven(cost_rows(falling(2.0, 0.25).with_(noise=Noise(sample=0.01))), acceptance)
    assert tuple(result.cells.columns) == CELL_COLUMNS
    record = json.loads(result.to_json())
    assert [tuple(cell) for cell in record["cells"]] == [CELL_COLUMNS] * 4
    assert record["cells"][0]["context_len"] == 1024
    assert record["cells"][3]["speedup"] is None
    assert record["cells"][0]["draft_backend"] is None
    names = {"context_len", "low", "high", "direction", "decided", "pays_at", "loses_at"}
    assert set(record["curves"][0]["crossovers"][0]) == names
    table = verdict_table(result.cells)
    assert list(table.columns[:4]) == ["workload", "context", "k", "verify_backend"]
    assert re.fullmatch(r"1\.\d\d \[1\.\d\d, 1\.\d\d\]", table["speed-up"].iloc[0])
    assert table["speed-up"].iloc[3] == "unknown"
    assert "gpu" not in table


def test_a_refusal_lists_twelve_values_at_most() -> None:
    table = pd.DataFrame({"context_len": [*range(1000, 9000, 100), np.nan], "drafter": ["ngram"] * 80 + [None]})
    with pytest.raises(InputError, match=r"context_len is 1000, 1100, .*, 2100, \.\.\. \(80 in all\)$") as refused:
        keep_where(table, ["context_len=7"])
    assert "nan" not in str(refused.value)
    with pytest.raises(InputError, match=r"drafter is ngram$"):
        keep_where(table, ["drafter=eagle3"])


def test_the_compact_listing_tells_of_an_imposed_length_above_k_plus_1() -> None:
    worlds = [
        falling(2.0, 0.25).with_(
            target=f"t{target}", num_speculative_tokens=k, run_id=f"r{target}-{k}", noise=Noise(sample=0.01)
        )
        for target in range(6)
        for k in (1, 4)
    ]
    result = breakeven(pd.concat([cost_rows(world) for world in worlds], ignore_index=True), 3.0)
    assert len(result.cells) > 40
    few = int((result.cells["num_speculative_tokens"] == 1).sum())
    assert f"k = 1 not judged in {few} of its cells: imposed length 3 exceeds the ceiling 2" in render(result)
