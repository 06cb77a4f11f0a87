"""Time of one set of rows over another: paired or not, launches, drift, intervals."""

import json

import numpy as np
import pandas as pd
import pytest

from labkit.decide.compare import compare_runs
from labkit.decide.ratios import ratio_table
from labkit.errors import InputError
from tests.compared_runs import SIDECAR, changed, kinds, planted
from tests.worlds import Noise


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


def test_one_round_gives_a_ratio_without_bounds_and_no_common_cell_is_refused() -> None:
    table = ratio_table(planted(12.0, "a", num_rounds=1), planted(12.0, "b", num_rounds=1))
    assert table["ratio"].notna().all()
    assert table["ratio_low"].isna().all()
    with pytest.raises(InputError, match="no cell in common"):
        ratio_table(planted(12.0, "a"), planted(12.0, "b", context_lens=(77,)))
    with pytest.raises(InputError, match="must both have one of"):
        ratio_table(planted(12.0, "a"), planted(12.0, "b").drop(columns="step_ms"))


@pytest.mark.parametrize(("noise", "least"), [(Noise(sample=0.03, spikes=0.05), 0.9), (Noise(drift=0.02), 0.0)])
def test_unpaired_ratios_cover_unless_the_clock_drifts(noise: Noise, least: float) -> None:
    contexts = tuple(range(150))
    tables = [planted(12.0, run, noise, seed, context_lens=contexts) for seed, run in enumerate("ab")]
    table = ratio_table(*[rows[rows["num_drafted_tokens"] == 3] for rows in tables])
    covered = ((table["ratio_low"] <= 1) & (table["ratio_high"] >= 1)).mean()
    assert least <= covered <= (1.0 if least else 0.7)


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


def test_generations_are_compared_by_draft_length_and_not_by_each_token_of_context() -> None:
    rows = planted(12.0, "a").query("arm == 'plain' or num_drafted_tokens == 4")
    rows = rows.assign(step_index=rows["sample"], context_len=1000.0 + rows["sample"])
    slower = rows.assign(run_id="b", step_ms=rows["step_ms"] * 1.25)
    table = ratio_table(rows, slower)
    assert "context_len" not in table
    assert table["ratio"].to_numpy() == pytest.approx(1.25)
