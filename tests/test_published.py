"""Published figures: every computed figure of the table comes out, and what does not close is said."""

from pathlib import Path

import pytest

from labkit.decide.published import COLUMNS, load_published, published_table
from labkit.errors import InputError
from labkit.paths import DATA

FIGURES = load_published()
TABLE = published_table(FIGURES).set_index(["case", "arm"])
COMPUTED = FIGURES[FIGURES["kind"] == "computed"]
OPEN = {
    ("backend switch at 120K", "flashinfer"): "the length is said to be the same, the figures give 2.49 and 3.27",
    ("engine upgrade, EAGLE", "EAGLE"): "length 3.21 is above the ceiling k+1 = 3",
    ("throughput against time per token", "load 1"): "throughput says 1.10x, time per token 0.92x",
    ("throughput against time per token", "load 2"): "throughput says 1.05x, time per token 0.82x",
}


def derivable(row: dict) -> bool:
    """Two of the computed figures rest on a text of the source, not on other figures of the table."""
    return row["case"] not in ("fixed cost per round", "batched tokens on a CPU")


@pytest.mark.parametrize(
    "row", [row for row in COMPUTED.to_dict("records") if derivable(row)],
    ids=lambda row: f"{row['case']}: {row['arm']} {row['quantity']}",
)  # fmt: skip
def test_computed_figures_come_out(row: dict) -> None:
    found = TABLE.loc[(row["case"], row["arm"]), row["quantity"]]
    assert found == pytest.approx(row["value"], abs=0.006 if row["value"] < 3 else 0.011)


def test_verdicts_follow_the_speedup() -> None:
    judged = TABLE[TABLE["verdict"] != "unknown"]
    assert ((judged["speedup"] > 1) == (judged["verdict"] == "pays")).all()
    streams = TABLE.loc["streams 1, 2, 4"]
    assert streams.loc["DFlash2 np1", "verdict"] == "pays"
    assert streams.loc["DFlash2 np2", "verdict"] == "loses"
    trees = TABLE.loc["EAGLE3 trees at batch 1"].drop("none")
    assert set(trees["verdict"]) == {"loses"}
    assert set(TABLE["origin"]) == {"published"}


def test_what_contradicts_itself_is_reported_as_not_closing() -> None:
    found = TABLE.loc[~TABLE["closes"], "why"].to_dict()
    assert found == OPEN


def test_a_bounded_length_bounds_the_step_cost() -> None:
    """0.93 at the first position: 1.93 to 2.86 tokens; 61.2 / 43.7 of them is the cost of a step."""
    speedup = TABLE.loc[("fixed cost per round", "MTP, shortest"), "speedup"]
    assert 1.93 / speedup == pytest.approx(2.7, abs=0.05)
    assert 2.86 / speedup == pytest.approx(4.0, abs=0.05)


def test_every_figure_has_its_source_unit_and_kind() -> None:
    assert FIGURES[["source", "unit", "quantity"]].ne("").all(axis=None)
    assert FIGURES["value"].notna().all()
    assert set(FIGURES["experiment"]) == {"published"}
    assert not FIGURES.duplicated(["case", "arm", "quantity"]).any()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (",quoted,", ",guessed,", "line 2: want a source, and kind quoted or computed; got 'guessed'"),
        ("value,unit", "number,unit", r"column\(s\) value missing"),
        (",193,ms", ",fast,ms", "value must be a number, got 'fast'"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (DATA / "published" / "measurements.csv").read_text()
    path = tmp_path / "other.csv"
    path.write_text(text.replace(old, new))
    with pytest.raises(InputError, match=message):
        load_published(path)
    assert text.startswith(",".join(COLUMNS))
    with pytest.raises(InputError, match="wanted a CSV file"):
        load_published(tmp_path / "none.csv")
