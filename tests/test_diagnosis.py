"""Planted kernels, each with noise: the diagnosis names the cause that was planted."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from labkit.decide.diagnosis import degenerate_paths, diagnose, slope_table

RUN = "20260101T000000Z-aaaaaa"
SMS, READ_GB_PER_S, TAU_US, LAUNCH_US = 132, 4000.0, 3.0, 9.0
HEADS, KV_HEADS, HEAD_DIM, BYTES = 64, 8, 128, 2
GROUP = HEADS // KV_HEADS
CONTEXTS = (1024, 4096, 16384, 65536, 131072)
SIDECARS = {RUN: {"calibration": {"read_gb_per_s": READ_GB_PER_S, "num_sms": SMS}}}


def serial_us(context_len, programs, splits):
    """Programs walk their 64-key tiles one after the other, as many at once as SMs; pipelined above 8 splits."""
    tau_us = TAU_US / 6 if splits > 8 else TAU_US
    return np.ceil(programs / SMS) * np.ceil(context_len / 64 / splits) * tau_us


def kernel(q_len, context_len, batch, *, splits=1, packed=True, per_token=False, efficiency=0.9):
    """Time and structure of one call: serial tiles or bytes over bandwidth, whichever is longer."""
    passes = (1 if packed else GROUP) * (q_len if per_token else 1)
    programs = batch * KV_HEADS * passes * splits
    kv_bytes = 2 * batch * KV_HEADS * HEAD_DIM * BYTES * (context_len + q_len)
    read_us = passes * kv_bytes / READ_GB_PER_S / efficiency / 1e3
    time_us = LAUNCH_US + max(serial_us(context_len, programs, splits), read_us)
    return {
        "attention_us": time_us, "kv_bytes_read": kv_bytes, "num_programs": programs, "num_splits": splits,
        "kv_passes": passes, "resolved_kernel": "planted kernel",
    }  # fmt: skip


def split(q_len, context_len, batch):
    return kernel(q_len, context_len, batch, splits=33)


def unsplit(q_len, context_len, batch):
    return kernel(q_len, context_len, batch, packed=False)


def packed_unsplit(q_len, context_len, batch):
    return kernel(q_len, context_len, batch)


def decode8(q_len, context_len, batch):
    return kernel(q_len, context_len, batch, splits=8)


def per_head(q_len, context_len, batch):
    return kernel(q_len, context_len, batch, splits=33, packed=False)


def per_token(q_len, context_len, batch):
    return kernel(q_len, context_len, batch, splits=33, per_token=True)


def verify_unsplit(q_len, context_len, batch):
    return (split if q_len == 1 else unsplit)(q_len, context_len, batch)


def bad_decode(q_len, context_len, batch):
    return (unsplit if q_len == 1 else split)(q_len, context_len, batch)


def split_up_to_8(q_len, context_len, batch):
    return (split if q_len <= 8 else unsplit)(q_len, context_len, batch)


def falls_back_at_64k(q_len, context_len, batch):
    """Another kernel from 64K on, by name too."""
    chosen = split if context_len < 65536 else unsplit
    return chosen(q_len, context_len, batch) | {"resolved_kernel": chosen.__name__}


def slower_at_64k(q_len, context_len, batch):
    """The same, with one name for both."""
    return (split if context_len < 65536 else unsplit)(q_len, context_len, batch)


def renamed(q_len, context_len, batch):
    """A tile size in the name changes, the cost does not."""
    return split(q_len, context_len, batch) | {"resolved_kernel": f"split, tile {'b' if context_len > 8192 else 'a'}"}


def gathers(q_len, context_len, batch):
    """Copies the pages in each call: ten times the floor at one pass, a little dearer with more query tokens."""
    cell = kernel(q_len, context_len, batch, splits=33, efficiency=0.1 / q_len**0.4)
    return cell | {"kv_passes": 1, "num_splits": None, "num_programs": None, "resolved_kernel": "gather + sdpa"}


def library(make, *, programs=True):
    """The same kernel behind a library that does not tell splits and passes, nor programs unless asked."""

    def wrapped(q_len, context_len, batch):
        cell = make(q_len, context_len, batch) | {"num_splits": None, "kv_passes": None}
        return cell if programs else cell | {"num_programs": None}

    return wrapped


def rows_of(make, *, q_lens=(1, 2, 8), contexts=CONTEXTS, batch=1, seed=0, noise=0.03, run_id=RUN):
    rng = np.random.default_rng(seed)
    records = [
        {"backend": "planted", "backend_digest": "d", "q_len": q_len, "context_len": float(context_len)}
        | make(q_len, context_len, batch)
        | {"round": index, "scale": np.exp(rng.normal(0, noise))}
        for q_len in q_lens
        for context_len in contexts
        for index in range(5)
    ]
    rows = pd.DataFrame(records).assign(
        gpu="nvidia-h200", batch_size=batch, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        page_size=16, q_dtype="bfloat16", kv_dtype="bfloat16", run_id=run_id, status="ok",
    )  # fmt: skip
    rows["attention_ms"] = rows.pop("attention_us") * rows.pop("scale") / 1e3
    rows["gb_per_s"] = rows["kv_bytes_read"] / rows["attention_ms"] / 1e6
    return rows


PLANTED = {
    "split": (split, {}, "healthy", "measured"),
    "split, batch 16": (split, {"batch": 16}, "healthy", "measured"),
    "decode and verify unsplit": (unsplit, {}, "no KV split", "measured"),
    "packed, unsplit": (packed_unsplit, {}, "no KV split", "measured"),
    "unsplit library": (library(unsplit), {}, "no KV split", "likely"),
    "unsplit library without programs": (library(unsplit, programs=False), {}, "no KV split", "likely"),
    "decode capped at 8 splits": (decode8, {}, "too few KV splits", "measured"),
    "one query head per program": (per_head, {}, "KV read per query head", "measured"),
    "one query head per program, library": (library(per_head), {}, "KV read per query head", "likely"),
    "one query token per call": (per_token, {}, "KV read per draft token", "measured"),
    "one query token per call, q 8 alone": (per_token, {"q_lens": (16,)}, "KV read per draft token", "measured"),
    "one query token per call, library": (library(per_token, programs=False), {}, "KV read per draft token", "likely"),
    "short contexts": (split, {"contexts": (256, 512, 1024, 4096)}, "launch-bound", "measured"),
    "verify falls out of the split": (verify_unsplit, {}, "other path at (q 2, context 1K)", "measured"),
    "same, library": (library(verify_unsplit), {}, "other path at (q 2, context 1K)", "likely"),
    "split up to q 8": (
        split_up_to_8, {"q_lens": (1, 4, 8, 16)}, "other path at (q 16, context 1K)", "measured",
    ),
    "only decode is unsplit": (bad_decode, {}, "other path at (q 2, context 1K)", "measured"),
    "another kernel at 64K": (falls_back_at_64k, {"q_lens": (1, 8)}, "other path at (q 1, context 64K)", None),
    "another path at 64K, one name": (slower_at_64k, {"q_lens": (1, 8)}, "other path at (q 1, context 64K)", None),
    "another name, same cost": (renamed, {}, "healthy", "measured"),
    "copies the pages": (gathers, {}, "unknown", ""),
    "two contexts": (unsplit, {"contexts": (1024, 65536)}, "unknown", ""),
    "contexts too close": (unsplit, {"contexts": (1024, 1536, 2048)}, "unknown", ""),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("case", PLANTED)
def test_planted_causes(case, seed):
    make, options, label, sure = PLANTED[case]
    found = diagnose(rows_of(make, seed=seed, **options), SIDECARS).iloc[0]
    assert found["diagnosis"] == label, found["because"]
    assert found["sure"] == sure or sure is None
    assert found["because"]


@pytest.mark.parametrize("make", [unsplit, packed_unsplit, library(unsplit), library(unsplit, programs=False)])
@pytest.mark.parametrize("q_lens", [(1, 8), (1, 2, 4, 8, 16, 32), (8,)])
@pytest.mark.parametrize("batch", [1, 4])
def test_both_unsplit_is_never_healthy(make, q_lens, batch):
    found = diagnose(rows_of(make, q_lens=q_lens, batch=batch), SIDECARS).iloc[0]
    if len(q_lens) > 1:
        assert found["verify_decode_slope_ratio"] == pytest.approx(1, abs=0.15)
    assert found["verify_slope_over_floor"] > 2
    assert found["diagnosis"] not in ("healthy", "launch-bound")


def test_slopes_and_tile_time():
    table = slope_table(rows_of(unsplit, noise=0.0), SIDECARS)
    assert table["q_len"].tolist() == [1, 2, 8]
    assert table["tile_us"].to_numpy() == pytest.approx(TAU_US)
    floor_us_per_1k = 2 * KV_HEADS * HEAD_DIM * BYTES * 1024 / READ_GB_PER_S / 1e3
    assert table["slope_over_floor"].to_numpy() == pytest.approx(TAU_US * 16 / floor_us_per_1k)
    assert table["fixed_us"].to_numpy() == pytest.approx(LAUNCH_US, abs=0.1)
    # Not all programs at once: the time of a tile cannot be told.
    assert slope_table(rows_of(unsplit, batch=4), SIDECARS)["tile_us"].isna().all()
    assert slope_table(rows_of(split), SIDECARS)["tile_us"].isna().all()


def test_without_a_read_bandwidth_nothing_is_claimed():
    found = diagnose(rows_of(unsplit)).iloc[0]
    assert found["diagnosis"] == "unknown"
    assert "read bandwidth" in found["because"]
    assert np.isnan(found["verify_slope_over_floor"])


def test_runs_versions_and_settings_stay_apart():
    other = RUN.replace("aaaaaa", "bbbbbb")
    frame = pd.concat([rows_of(split), rows_of(unsplit, run_id=other), rows_of(split, batch=4)])
    slower = {other: {"calibration": {"read_gb_per_s": READ_GB_PER_S / 2, "num_sms": SMS}}}
    found = diagnose(frame, SIDECARS | slower)
    assert found.groupby(["run_id", "batch_size"])["diagnosis"].first().to_dict() == {
        (RUN, 1): "healthy",
        (RUN, 4): "healthy",
        (other, 1): "no KV split",
    }
    assert degenerate_paths(found)["run_id"].tolist() == [other]
    # The floor is that of the run's own bandwidth.
    alone = diagnose(rows_of(unsplit), SIDECARS)["verify_slope_over_floor"].iloc[0]
    halved = found.loc[found["run_id"] == other, "verify_slope_over_floor"].iloc[0]
    assert halved == pytest.approx(alone / 2, rel=1e-6)


def test_needs_no_torch():
    code = "import sys, labkit.decide.diagnosis; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
