"""Two runs side by side: which differences were asked for, which come with them, which refuse."""

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from labkit.decide.compare import compare_files, compare_runs
from labkit.errors import InputError
from labkit.results import build_table, write_run
from labkit.schema import columns
from tests.compared_runs import SIDECAR, changed, kinds, planted
from tests.synthetic import CPU, write_runs


def store(folder: Path, run_id: str, rows: pd.DataFrame, **changes: Any) -> Path:
    """A stored loop run with the sidecar of `changed`."""
    rows = rows.assign(run_id=run_id, point_key="p", group=rows["group"].astype(str))
    rows = rows[[column.name for column in columns("loop") if column.name in rows]].astype(object)
    values = {name: rows[name].where(rows[name].notna(), None).tolist() for name in rows}
    table = build_table("loop", values)
    return write_run(folder / f"{run_id}.parquet", [table], changed(**changes) | {"run_id": run_id})


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


def test_what_follows_from_an_axis_needs_no_allowance() -> None:
    group, other = {"grid__group": ["512/16"]}, {"grid__group": ["512/32"]}
    a, b = changed(grid__page_size=[16], **group), changed(grid__page_size=[32], **other)
    found = compare_runs(a, b, varying="page_size")
    assert found.comparable
    assert kinds(found)["grid.group"] == "incidental"


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


def test_what_follows_from_chance_takes_one_line_and_lists_show_what_only_one_side_has() -> None:
    other = changed(grid__prompt_id=["p1", "p3"], started="later")
    text = compare_runs(changed(grid__prompt_id=["p1", "p2"]), other).to_text()
    assert "unexplained  grid.prompt_id: only A: ['p2'], only B: ['p3']" in text
    (line,) = [line for line in text.splitlines() if line.startswith("incidental")]
    assert re.match(r"incidental   \d+ more, of .*started.* \(--json lists them\)", line)
    assert "not comparable: 1 unexplained differences forbid a ratio" in text


def test_runs_of_two_experiments_are_refused_in_one_line(tmp_path: Path) -> None:
    loop = write_runs(tmp_path / "a", CPU, ("loop",))[0]
    acceptance = write_runs(tmp_path / "b", CPU, ("acceptance",))[0]
    with pytest.raises(InputError, match="wanted two of one experiment, got loop and acceptance"):
        compare_files(loop, acceptance)
