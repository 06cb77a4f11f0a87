import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from labkit.decide.compare import compare_files, compare_runs
from labkit.decide.ratios import ratio_table
from labkit.errors import InputError
from labkit.results import build_table, write_run
from labkit.schema import columns
from tests.synthetic import CPU, write_runs
from tests.worlds import TYPICAL_NOISE, CostWorld, Noise, cost_rows

SIDECAR: dict[str, Any] = {
    "schema_version": 1,
    "run_id": "20260101T000000Z-aaaaaa",
    "experiment": "loop",
    "gpu": "nvidia-h200",
    "grid": {
        "target": ["tiny"],
        "context_len": [512, 2048],
        "verify_backend": ["sdpa"],
        "launch_mode": ["eager"],
        "kv_dtype": ["bfloat16"],
        "max_new_tokens": [64],
        "num_warmup": [3],
    },
    "seed": 0,
    "command": "labkit run loop",
    "code_digest": "c0de",
    "provenance": {
        "device": {"name": "NVIDIA H200", "slug": "nvidia-h200", "driver": "580.1", "power_limit_w": 700.0},
        "versions": {"torch": "2.13.0", "triton": "3.6"},
        "commit": "abc",
        "dirty": False,
        "env": {},
        "time": "2026-01-01T00:00:00Z",
    },
    "calibration": {"read_gb_per_s": 4300.0, "timer_resolution_ms": 0.001},
    "digests": {"backend": {"sdpa": "d1"}, "prompts": "p1"},
    "num_rows": 100,
    "started": "2026-01-01T00:00:00Z",
}


def changed(**paths: Any) -> dict[str, Any]:
    """The sidecar of a second run, with fields set by path (``provenance__device__driver``)."""
    other = copy.deepcopy(SIDECAR) | {"run_id": "20260102T000000Z-bbbbbb", "started": "2026-01-02T00:00:00Z"}
    for path, value in paths.items():
        *folders, last = path.split("__")
        place = other
        for folder in folders:
            place = place[folder]
        place[last] = value
    return other


def planted(step_ms: float, run_id: str, noise: Noise = TYPICAL_NOISE, seed: int = 0, **changes: Any) -> pd.DataFrame:
    world = CostWorld(
        lambda _, __: 10.0, lambda _, __, j: step_ms + j, run_id=run_id, noise=noise, num_rounds=16, samples_per_round=3
    )
    return cost_rows(world.with_(**changes), np.random.default_rng(seed))


def store(folder: Path, run_id: str, rows: pd.DataFrame, **changes: Any) -> Path:
    """A stored loop run with the sidecar of `changed`."""
    rows = rows.assign(run_id=run_id, point_key="p", group=rows["group"].astype(str))
    rows = rows[[column.name for column in columns("loop") if column.name in rows]].astype(object)
    values = {name: rows[name].where(rows[name].notna(), None).tolist() for name in rows}
    table = build_table("loop", values)
    return write_run(folder / f"{run_id}.parquet", [table], changed(**changes) | {"run_id": run_id})


def kinds(comparison: Any) -> dict[str, str]:
    return {difference.field: difference.kind for difference in comparison.differences}


def test_two_runs_of_the_same_thing_differ_only_incidentally() -> None:
    calibration = {"read_gb_per_s": 4250.0, "timer_resolution_ms": 0.002}
    same = compare_runs(SIDECAR, changed(calibration=calibration, provenance__commit="def", num_rows=90))
    assert same.comparable
    assert set(kinds(same).values()) == {"incidental"}
    measured = {"calibration.read_gb_per_s", "calibration.timer_resolution_ms"}
    assert set(kinds(same)) == {"run_id", "started", "provenance.commit", "num_rows", *measured}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("grid__target", ["tiny-awq"]),  # another checkpoint
        ("grid__num_warmup", [1]),
        ("grid__launch_mode", ["graph"]),
        ("grid__kv_dtype", ["float8_e4m3fn"]),
        ("grid__max_new_tokens", [1000]),
        ("digests__prompts", "p2"),
        ("digests__backend", {"sdpa": "d2"}),  # same name, other code
        ("calibration__read_gb_per_s", 3300.0),  # throttled or shared
        ("provenance__device__driver", "590.2"),
        ("provenance__versions__torch", "2.14.0"),
        ("provenance__env", {"CUDA_LAUNCH_BLOCKING": "1"}),
        ("code_digest", "beef"),
        ("seed", 1),
    ],
)
def test_confounders_refuse_until_they_are_allowed(path: str, value: Any) -> None:
    other = changed(grid__verify_backend=["per_token"], **{path: value})
    refused = compare_runs(SIDECAR, other, varying="verify_backend")
    assert not refused.comparable
    field = refused.unexplained[0].field
    assert field.split(".")[: path.count("__") + 1] == path.split("__")
    allowed = compare_runs(SIDECAR, other, varying="verify_backend", allow=[item.field for item in refused.unexplained])
    assert allowed.comparable
    assert kinds(allowed)[field] == "allowed"


def test_the_asked_for_field_brings_its_own_digest_along() -> None:
    other = changed(grid__verify_backend=["per_token"], digests__backend={"per_token": "d9"})
    found = kinds(compare_runs(SIDECAR, other, varying="grid.verify_backend"))
    assert {field for field, kind in found.items() if kind == "asked_for"} == {
        "grid.verify_backend",
        "digests.backend.sdpa",
        "digests.backend.per_token",
    }


def test_another_gpu_explains_its_name_and_bandwidth_but_not_its_driver() -> None:
    other = changed(
        gpu="nvidia-h100",
        provenance__device={"name": "NVIDIA H100", "slug": "nvidia-h100", "driver": "590.2", "power_limit_w": 700.0},
        calibration__read_gb_per_s=2900.0,
    )
    found = compare_runs(SIDECAR, other, varying="gpu")
    assert [item.field for item in found.unexplained] == ["provenance.device.driver"]
    assert kinds(found)["calibration.read_gb_per_s"] == "asked_for"


def test_a_field_on_one_side_only_is_a_difference() -> None:
    other = changed()
    del other["provenance"]["versions"]["triton"]
    (difference,) = compare_runs(SIDECAR, other).unexplained
    assert (difference.field, difference.a, difference.b) == ("provenance.versions.triton", "3.6", "(absent)")


def test_partly_common_axes_are_compared_where_they_meet_and_disjoint_ones_refuse() -> None:
    assert compare_runs(SIDECAR, changed(grid__context_len=[2048, 8192])).comparable
    assert not compare_runs(SIDECAR, changed(grid__context_len=[8192])).comparable


def test_names_that_are_no_field_or_do_not_vary_are_said() -> None:
    with pytest.raises(InputError, match=r"'verify' is no field .*grid\.verify_backend"):
        compare_runs(SIDECAR, changed(), varying="verify")
    with pytest.raises(InputError, match="'nothing' is no field"):
        compare_runs(SIDECAR, changed(), allow=["nothing"])
    found = compare_runs(SIDECAR, changed(), varying="verify_backend")
    assert found.problems == ("verify_backend is the same on both sides",)
    assert not found.comparable
    with pytest.raises(InputError, match="given together"):
        compare_runs(SIDECAR, changed(), rows_a=planted(12.0, "a"))


def test_the_planted_ratio_of_two_runs_is_unpaired_and_says_so() -> None:
    other = changed(grid__verify_backend=["per_token"])
    rows_a = planted(12.0, SIDECAR["run_id"])
    rows_b = planted(18.0, other["run_id"], seed=1, verify_backends=("per_token",))
    found = compare_runs(SIDECAR, other, rows_a=rows_a, rows_b=rows_b, varying="verify_backend")
    assert found.comparable
    ratios = found.ratios.set_index(["arm", "num_drafted_tokens"])
    row = ratios.loc[("speculative", 0)]
    assert row["ratio"] == pytest.approx(1.5, rel=0.05)
    assert row["ratio_low"] < 1.5 < row["ratio_high"]
    assert not row["paired"]
    assert ratios.loc[("plain", 0), "ratio"] == pytest.approx(1.0, rel=0.05)
    text = found.to_text()
    assert "asked for" in text
    assert "unpaired" in text
    assert json.loads(json.dumps(found.to_dict()))["comparable"] is True


def test_two_arms_of_one_run_are_paired_and_drift_cancels() -> None:
    rows = planted(12.0, "a", Noise(drift=0.3))
    speculative = rows[rows["arm"] == "speculative"]
    slower = speculative.assign(step_ms=speculative["step_ms"] * 1.25, verify_backend="per_token")
    found = compare_runs(SIDECAR, SIDECAR, rows_a=speculative, rows_b=slower, varying="verify_backend")
    assert kinds(found) == {"rows.verify_backend": "asked_for"}
    assert found.ratios["paired"].all()
    for name in ("ratio", "ratio_low", "ratio_high"):
        assert found.ratios[name].to_numpy() == pytest.approx(1.25)


@pytest.mark.parametrize(("size", "kind"), [(512, "unexplained"), (128, "incidental")])
def test_matrix_rates_of_different_sizes_are_not_compared(size: int, kind: str) -> None:
    sides = [
        {"matrix_tflops_per_s": {"float32": rate}, "matrix_spread": {"float32": {"size": matrix}}}
        for rate, matrix in ((0.02, 512), (0.0004, size))
    ]
    found = compare_runs(*(changed(calibration=side) for side in sides))
    assert kinds(found)["calibration.matrix_tflops_per_s.float32"] == kind


def test_unstable_samples_on_one_side_are_in_the_interval_already() -> None:
    rows_a, rows_b = planted(12.0, "a").assign(quality="ok"), planted(12.0, "b").assign(quality="unstable")
    assert kinds(compare_runs(SIDECAR, changed(), rows_a=rows_a, rows_b=rows_b))["rows.quality"] == "incidental"


@pytest.mark.parametrize(
    ("column", "value"), [("launch_mode", "graph"), ("kv_dtype", "float8_e4m3fn"), ("quality", "throttled")]
)
def test_rows_can_differ_where_sidecars_agree(column: str, value: str) -> None:
    rows_a, rows_b = planted(12.0, "a"), planted(12.0, "b").assign(**{column: value})
    found = compare_runs(SIDECAR, changed(), rows_a=rows_a, rows_b=rows_b)
    assert f"rows.{column}" in [item.field for item in found.unexplained]
    assert found.ratios is None
    assert "not comparable" in found.to_text()


def test_a_varied_field_needs_one_value_per_side() -> None:
    rows_a = planted(12.0, "a", verify_backends=("sdpa", "per_token"))
    rows_b = planted(12.0, "b", verify_backends=("sdpa",))
    other = changed(grid__verify_backend=["sdpa", "per_token"])
    with pytest.raises(InputError, match="verify_backend must have one value on each side, got per_token, sdpa"):
        compare_runs(other, changed(), rows_a=rows_a, rows_b=rows_b, varying="verify_backend")


def test_one_round_gives_a_ratio_without_bounds_and_no_common_cell_is_refused() -> None:
    table = ratio_table(planted(12.0, "a", num_rounds=1), planted(12.0, "b", num_rounds=1))
    assert table["ratio"].notna().all()
    assert table["ratio_low"].isna().all()
    with pytest.raises(InputError, match="no cell in common"):
        ratio_table(planted(12.0, "a"), planted(12.0, "b", context_lens=(77,)))
    with pytest.raises(InputError, match="must both have one of"):
        ratio_table(planted(12.0, "a"), planted(12.0, "b").drop(columns="step_ms"))


def test_stored_runs_are_compared_by_path(tmp_path: Path) -> None:
    a = store(tmp_path / "a", "20260101T000000Z-aaaaaa", planted(12.0, "a"))
    rows_b = planted(18.0, "b", seed=1, verify_backends=("per_token",))
    store(tmp_path / "b", "20260102T000000Z-bbbbbb", rows_b, grid__verify_backend=["per_token"])
    found = compare_files(a, tmp_path / "b", varying="verify_backend")
    assert found.comparable, found.to_text()
    assert found.ratios["ratio"].max() == pytest.approx(1.5, rel=0.05)
    assert not compare_files(a, tmp_path / "b").comparable
    with pytest.raises(InputError, match="wanted launches of one run to compare; they differ in"):
        compare_files(a, tmp_path)


@pytest.mark.parametrize(("noise", "least"), [(Noise(sample=0.03, spikes=0.05), 0.9), (Noise(drift=0.02), 0.0)])
def test_unpaired_ratios_cover_unless_the_clock_drifts(noise: Noise, least: float) -> None:
    contexts = tuple(range(150))
    tables = [planted(12.0, run, noise, seed, context_lens=contexts) for seed, run in enumerate("ab")]
    table = ratio_table(*[rows[rows["num_drafted_tokens"] == 3] for rows in tables])
    covered = ((table["ratio_low"] <= 1) & (table["ratio_high"] >= 1)).mean()
    assert least <= covered <= (1.0 if least else 0.7)


def test_what_follows_from_an_axis_needs_no_allowance() -> None:
    group, other = {"grid__group": ["512/16"]}, {"grid__group": ["512/32"]}
    a, b = changed(grid__page_size=[16], **group), changed(grid__page_size=[32], **other)
    found = compare_runs(a, b, varying="page_size")
    assert found.comparable
    assert kinds(found)["grid.group"] == "incidental"


# ---- what an engine changes by itself, and launches -----------------------------------------------------------------


def engine_sidecar(engine: str, version: str, **arguments: Any) -> dict[str, Any]:
    """The sidecar of a replay run against a server with these arguments."""
    shared = {"model": "qwen3-8b", "kv_cache_dtype": "auto", "cuda_graph": True, "num_warmup": 8, "max_tokens": 256}
    told = {"engine": engine, "engine_version": version, "args": shared | arguments}
    return {"schema_version": 1, "run_id": "r", "experiment": "replay", "gpu": "nvidia-h200", "endpoints": {"b": told}}


SGLANG = {"speculative_algorithm": "EAGLE3", "max_running_requests": 48, "max_total_num_tokens": 900_000}
PLAIN = {"speculative_algorithm": None, "max_running_requests": 4096, "max_total_num_tokens": 1_000_000}


def test_what_sglang_changes_by_itself_is_implied_and_does_not_refuse() -> None:
    plain = engine_sidecar("sglang", "0.5.21", **PLAIN, enable_mixed_chunk=True)
    other = engine_sidecar("sglang", "0.5.21", **SGLANG, enable_mixed_chunk=False)
    for a, b in ((plain, other), (other, plain)):
        found = compare_runs(a, b, varying="speculative_algorithm")
        assert found.comparable, found.to_text()
        implied = {item.field.rsplit(".", 1)[-1]: item.why for item in found.of_kind("implied")}
        assert set(implied) == {"max_running_requests", "max_total_num_tokens", "enable_mixed_chunk"}
        assert "sgl-project/sglang" in implied["max_running_requests"]
    assert "implied" in found.to_text()


@pytest.mark.parametrize(
    "change",
    [
        {"max_running_requests": 256},  # set by hand: not what the engine does
        {"max_total_num_tokens": 1_200_000},  # a larger pool is no price of a drafter
        {"model": "qwen3-8b-awq"},  # another checkpoint
        {"num_warmup": 1},
        {"cuda_graph": False},  # eager against graph
        {"kv_cache_dtype": "fp8_e4m3"},
        {"max_tokens": 1000},
        {"attention_backend": "triton"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_an_engine_does_not_change_by_itself_refuses(change: dict) -> None:
    other = engine_sidecar("sglang", "0.5.21", **SGLANG | change)
    found = compare_runs(engine_sidecar("sglang", "0.5.21", **PLAIN), other, varying="speculative_algorithm")
    assert [item.field.rsplit(".", 1)[-1] for item in found.unexplained] == list(change)


def test_implied_changes_hold_for_the_versions_they_were_read_in_and_for_speculation_only() -> None:
    sides = [{"speculative_algorithm": None, "disable_overlap_schedule": False}]
    sides += [{"speculative_algorithm": "EAGLE", "disable_overlap_schedule": True}]
    old, new = ([engine_sidecar("sglang", version, **side) for side in sides] for version in ("0.5.6", "0.5.21"))
    assert compare_runs(*old, varying="speculative_algorithm").comparable
    assert not compare_runs(*new, varying="speculative_algorithm").comparable
    sides = [
        {"attention_backend": name, "max_running_requests": limit} for name, limit in (("fa3", 4096), ("triton", 48))
    ]
    backends = [engine_sidecar("sglang", "0.5.21", **side) for side in sides]
    assert not compare_runs(*backends, varying="attention_backend").comparable


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("num_cached_tokens", 4096),  # prefix-cache hits on one side
        ("quality", "throttled"),
        ("prompt_digest", "p2"),
        ("prompt_id", "prose-02"),
        ("num_output_tokens", 1000),
    ],
)
def test_confounders_in_the_rows_refuse(column: str, value: Any) -> None:
    base = {
        "num_cached_tokens": 0,
        "quality": "ok",
        "prompt_digest": "p1",
        "prompt_id": "prose-01",
        "num_output_tokens": 256,
    }
    rows_a, rows_b = planted(12.0, "a").assign(**base), planted(12.0, "b").assign(**base | {column: value})
    found = compare_runs(SIDECAR, changed(), rows_a=rows_a, rows_b=rows_b)
    assert [item.field for item in found.unexplained] == [f"rows.{column}"]


def launches(step_ms: float, names: str, spread: float, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    times = step_ms * np.exp(rng.normal(0, spread, len(names)))
    return pd.concat(
        [planted(ms, name, Noise(sample=0.01), seed + i) for i, (ms, name) in enumerate(zip(times, names, strict=True))]
    )


def test_one_launch_never_decides_between_launches_and_several_do() -> None:
    one = ratio_table(planted(12.0, "a"), planted(18.0, "b", seed=1))
    assert set(one["claim"]) == {"within one launch"}
    assert set(one["verdict"]) == {"undecided"}
    several = ratio_table(launches(12.0, "abcd", 0.03, 1), launches(18.0, "efgh", 0.03, 2))
    drafting = several[several["arm"] == "speculative"]
    assert set(drafting["claim"]) == {"across launches"}
    assert (drafting[["num_launches_a", "num_launches_b"]] == 4).all(axis=None)
    assert set(drafting["verdict"]) == {"slower"}
    # The same gain is not decided when launches differ by as much.
    wide = ratio_table(launches(12.0, "abcd", 0.3, 1), launches(14.0, "efgh", 0.3, 2))
    assert set(wide["verdict"]) == {"undecided"}


def test_arms_of_one_launch_are_decided_within_it() -> None:
    rows = planted(12.0, "a", Noise(drift=0.3))
    speculative = rows[rows["arm"] == "speculative"]
    found = ratio_table(speculative, speculative.assign(step_ms=speculative["step_ms"] * 0.8))
    assert set(found["claim"]) == {"within one launch"}
    assert set(found["verdict"]) == {"faster"}


def test_what_follows_from_chance_takes_one_line_and_lists_show_what_only_one_side_has() -> None:
    other = changed(grid__prompt_id=["p1", "p3"], started="later")
    text = compare_runs(changed(grid__prompt_id=["p1", "p2"]), other).to_text()
    assert "unexplained  grid.prompt_id: only A: ['p2'], only B: ['p3']" in text
    (line,) = [line for line in text.splitlines() if line.startswith("incidental")]
    assert re.match(r"incidental   \d+ more, of .*started.* \(--json lists them\)", line)
    assert "not comparable: 1 unexplained differences forbid a ratio" in text


def test_generations_are_compared_by_draft_length_and_not_by_each_token_of_context() -> None:
    rows = planted(12.0, "a").query("arm == 'plain' or num_drafted_tokens == 4")
    rows = rows.assign(step_index=rows["sample"], context_len=1000.0 + rows["sample"])
    slower = rows.assign(run_id="b", step_ms=rows["step_ms"] * 1.25)
    table = ratio_table(rows, slower)
    assert "context_len" not in table
    assert table["ratio"].to_numpy() == pytest.approx(1.25)


def test_runs_of_two_experiments_are_refused_in_one_line(tmp_path: Path) -> None:
    loop = write_runs(tmp_path / "a", CPU, ("loop",))[0]
    acceptance = write_runs(tmp_path / "b", CPU, ("acceptance",))[0]
    with pytest.raises(InputError, match="wanted two of one experiment, got loop and acceptance"):
        compare_files(loop, acceptance)
