"""Attention figures and the tables under them."""

import numpy as np
import pandas as pd
import pytest

from labkit.errors import InputError
from labkit.plots import style
from labkit.plots.attention import figure_attention, plot_attention_time, plot_bandwidth_share
from labkit.plots.attention_table import attention_table, fitting_context, kernel_segments, one_setting, slope_us_per_1k
from tests.drawn import SIDECARS, assert_well_placed, curves, end_texts, note_texts
from tests.synthetic import CPU, GPU, attention_rows


def test_attention_table_and_slopes():
    rows = attention_rows(GPU)
    table = attention_table(rows, 4000.0)
    assert len(table) == 3 * 2 * len(GPU.contexts)
    cell = table[(table["backend"] == "per_token") & (table["q_len"] == 1)].iloc[-1]
    assert cell["floor_us"] == pytest.approx(2 * 8 * 128 * 2 * (131072 + 1) / 4000 / 1e3)
    assert 0.5 < cell["share"] < 1
    assert cell["attention_us_low"] < cell["attention_us"] < cell["attention_us_high"]
    assert attention_table(rows)["share"].isna().all()  # unknown bandwidth, unknown share
    assert slope_us_per_1k(np.array([1024.0, 2048.0]), np.array([3.0, 5.0])) == pytest.approx(2.0)
    assert np.isnan(slope_us_per_1k(np.array([1024.0]), np.array([3.0])))
    split = table[(table["backend"] == "triton_split") & (table["q_len"] == 8)]
    assert [len(part) for part in kernel_segments(split)] == [4, 4]
    assert fitting_context(table, 2 * 8 * 128 * 2 * 1000) == pytest.approx(1000, rel=1e-3)


def test_attention_table_refuses_mixtures():
    rows = attention_rows(GPU)
    with pytest.raises(InputError, match="want one page_size; got 16, 64"):
        attention_table(pd.concat([rows, rows.assign(page_size=64)]))
    with pytest.raises(InputError, match="none has status ok"):
        attention_table(rows.assign(status="error"))


LATER = "20260201T000000Z-dddddd"


def test_a_cell_of_several_runs_comes_from_the_latest_with_its_own_floor():
    rows = attention_rows(GPU).assign(backend_digest="a")
    again = rows[rows["context_len"] == 1024].assign(run_id=LATER, attention_ms=9.0)
    table = attention_table(pd.concat([again, rows]), {rows["run_id"].iloc[0]: 4000.0, LATER: 2000.0})
    assert table["newest"].all()
    assert len(table) == len(attention_table(rows))
    new = table["run_id"] == LATER
    assert set(table.loc[new, "context_len"]) == {1024}
    assert set(table.loc[new, "attention_us"]) == {9000.0}
    floor_us = table["kv_bytes"] / np.where(new, 2000.0, 4000.0) / 1e3
    assert table["floor_us"].to_numpy() == pytest.approx(floor_us.to_numpy())


def test_older_versions_of_a_backend_are_faint_lines_behind(ax):
    rows = attention_rows(GPU).assign(backend_digest="a")
    edited = rows[rows["backend"] == "per_token"]
    edited = edited.assign(run_id=LATER, backend_digest="b", attention_ms=edited["attention_ms"] / 2)
    both = pd.concat([rows, edited])
    table = attention_table(both)
    assert table.groupby(["backend", "backend_digest"])["newest"].first().to_dict() == {
        ("per_token", "a"): False,
        ("per_token", "b"): True,
        ("triton_nosplit", "a"): True,
        ("triton_split", "a"): True,
    }
    plot_attention_time(both, ax=ax, read_gb_per_s=4000.0)
    (faint,) = curves(ax, 0.6)
    assert faint.get_alpha() < 0.5
    newest = next(line for line in curves(ax) if line.get_color() == faint.get_color())
    assert faint.get_ydata()[-1] == pytest.approx(2 * newest.get_ydata()[-1])
    assert faint.get_zorder() < newest.get_zorder()
    assert sum(text.startswith("per_token") for text in end_texts(ax)) == 1
    legend = [text.get_text() for text in figure_attention(both, sidecars=SIDECARS).legends[0].get_texts()]
    assert "older version of the backend" in legend


def test_one_setting_is_the_fullest_with_its_failed_points():
    rows = attention_rows(GPU).assign(status="ok")
    failed = rows[rows["context_len"] == 131072].assign(status="oom", attention_ms=np.nan, l2_state=None)
    small = rows[rows["context_len"] < 4096].assign(batch_size=4)
    mixed = pd.concat([small, rows[rows["context_len"] < 131072], failed])
    chosen = one_setting(mixed)
    assert set(chosen["batch_size"]) == {1}
    assert set(chosen["status"]) == {"ok", "oom"}
    assert set(one_setting(mixed, batch_size=4)["batch_size"]) == {4}
    with pytest.raises(InputError, match="batch_size: want one of 1, 4; got 2"):
        one_setting(mixed, batch_size=2)


def ten_backends() -> pd.DataFrame:
    rows = attention_rows(GPU)
    names = ["flashinfer_fa2", "flashinfer_fa3", "fa3", "sdpa", "flex", "triton_per_token", "triton_segmented_2d"]
    names += ["triton_ladder_split", "triton_ladder_packed"]
    source = rows[rows["backend"] == "triton_split"]
    more = [
        source.assign(backend=name, attention_ms=source["attention_ms"] * (1 + 0.01 * index), resolved_kernel=name)
        for index, name in enumerate(names)
    ]
    return pd.concat([rows, *more], ignore_index=True)


@pytest.mark.parametrize("width_in", [style.TEXT_WIDTH_IN, style.COLUMN_WIDTH_IN])
def test_ten_backends_do_not_overlap_and_the_rest_is_counted(width_in):
    figure = figure_attention(ten_backends(), sidecars=SIDECARS, width_in=width_in)
    assert_well_placed(figure)
    texts = " ".join(text.get_text() for text in figure.texts)
    assert "10 of 12 backends" in texts
    assert "pages of 16" in texts
    assert "plan not included" in texts
    assert not any(text.startswith("triton_ladder") for text in end_texts(figure.axes[0]))
    few = figure_attention(ten_backends(), sidecars=SIDECARS, backends=["fa3", "triton_ladder_split"])
    assert {text.split("\n")[0] for text in end_texts(few.axes[0])} == {"fa3", "triton_ladder_split", "floor"}
    with pytest.raises(InputError, match=r"backends: want some of .*; got 'fa9'"):
        figure_attention(ten_backends(), backends=["fa9"])


def test_attention_time_axes(ax):
    plot_attention_time(attention_rows(GPU), ax=ax, read_gb_per_s=4000.0, cache_bytes=50 << 20)
    assert ax.get_yscale() == "log"
    labels = end_texts(ax)
    assert any(text.startswith("triton_nosplit\n+4") and text.endswith("us per 1K") for text in labels)
    assert labels[-1].startswith("floor\n+1.0")
    assert note_texts(ax) == ["keys split"]
    solid, dashed = curves(ax), curves(ax, 0.8)
    assert len(solid) == len(dashed) == 4  # three backends, one of them in two pieces: the gap at the kernel change
    assert {line.get_color() for line in solid} == {line.get_color() for line in dashed}
    zone = ax.patches[0]
    assert zone.get_x() + zone.get_width() == pytest.approx((50 << 20) / (2 * 8 * 128 * 2), rel=1e-3)


def test_bandwidth_share_axes(ax):
    plot_bandwidth_share(attention_rows(GPU), ax=ax, read_gb_per_s=4000.0)
    assert ax.get_ylim() == (0.0, 1.08)
    assert "read bandwidth" in end_texts(ax)
    with pytest.raises(InputError, match="read_gb_per_s: want the read bandwidth"):
        plot_bandwidth_share(attention_rows(GPU), ax=ax)
    with pytest.raises(InputError, match="q_len: want one of 1, 8; got 4"):
        plot_bandwidth_share(attention_rows(GPU), ax=ax, read_gb_per_s=4000.0, q_len=4)


@pytest.mark.parametrize("width_in", [style.TEXT_WIDTH_IN, style.COLUMN_WIDTH_IN])
def test_attention_figures_are_well_placed(width_in):
    for world in (CPU, GPU):
        figure = figure_attention(attention_rows(world), sidecars=SIDECARS, width_in=width_in)
        assert len(figure.axes) == 2
        assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()
        assert_well_placed(figure)
    assert len(figure_attention(attention_rows(CPU), width_in=width_in).axes) == 1  # no bandwidth: no share
