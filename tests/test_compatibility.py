"""Published rules of overlap and content, held against planted texts."""

import numpy as np
import pandas as pd
import pytest

from labkit.decide.compatibility import compatibility_table, content_table, threshold_table
from labkit.errors import InputError
from tests.test_agreement import K, kept, texts


def overlapping(*matches, overlap, hit=0.5, **columns):
    return texts(*matches).assign(top_k_overlap=overlap, top_k_hit=hit, **columns)


def test_a_measure_that_decides_the_length_foretells_it_and_noise_does_not():
    rng = np.random.default_rng(0)
    shares = rng.uniform(0.2, 0.9, 30)
    rows = overlapping(*(kept(rng, share, 3000) for share in shares), overlap=0.0, hit=rng.random(30))
    lengths = [
        1 + sum(x * n for x, n in enumerate(np.sum(h, axis=0))) / np.sum(h) for h in rows["accepted_by_draft_length"]
    ]
    table = compatibility_table(rows.assign(top_k_overlap=np.array(lengths) / 9)).set_index("measure")
    assert table.loc["top_k_overlap", "rank_correlation"] == pytest.approx(1)
    assert table.loc["top_k_overlap", "fit_error"] == pytest.approx(0, abs=1e-9)
    assert table.loc["top1_agreement", "fit_error"] < 0.3 * table.loc["top1_agreement", "error_of_mean"]
    noise = table.loc["top_k_hit"]
    assert noise["rank_low"] < 0 < noise["rank_high"]
    left_out = []
    for i in range(30):  # the same, one fit at a time
        others = np.arange(30) != i
        line = np.polyfit(rows["top_k_hit"][others], np.array(lengths)[others], 1)
        left_out.append(
            (np.polyval(line, rows["top_k_hit"][i]) - lengths[i], np.mean(np.array(lengths)[others]) - lengths[i])
        )
    assert noise[["fit_error", "error_of_mean"]].tolist() == pytest.approx(
        np.sqrt(np.mean(np.square(left_out), axis=0))
    )


def test_a_text_without_a_complete_step_is_left_out():
    rng = np.random.default_rng(0)
    many = [kept(rng, share, 99) for share in (0.2, 0.4, 0.7, 0.9)]
    rows = overlapping(*many, [K], overlap=[0.2, 0.3, 0.6, 0.9, 0.1])  # a stop inside the first draft
    table = compatibility_table(rows)
    assert set(table["num_prompts"]) == {4}
    pd.testing.assert_frame_equal(table, compatibility_table(rows.iloc[:4]))


def test_contexts_of_one_prompt_are_one_text():
    rng = np.random.default_rng(0)
    once = overlapping(*(kept(rng, share, 500) for share in (0.2, 0.4, 0.6, 0.8)), overlap=[0.3, 0.4, 0.5, 0.7])
    thrice = pd.concat([once.assign(context_len_low=low) for low in (256, 512, 1024)])
    pd.testing.assert_frame_equal(compatibility_table(once), compatibility_table(thrice))


def test_a_single_prompt_and_a_constant_measure_are_unknown():
    one = compatibility_table(overlapping([1, 0, 2], overlap=0.4))
    assert one[["rank_correlation", "fit_error", "error_of_mean"]].isna().all(axis=None)
    two = compatibility_table(overlapping([1, 0, 2], [0, 0, 1], overlap=[0.4, 0.5]))
    assert two["fit_error"].isna().all()
    rng = np.random.default_rng(0)
    table = compatibility_table(overlapping(*(kept(rng, share, 99) for share in (0.2, 0.5, 0.9)), overlap=0.4))
    assert table.set_index("measure").loc["top_k_overlap", ["rank_correlation", "fit_error"]].isna().all()


@pytest.mark.parametrize(
    ("overlap", "share", "above", "below"),
    [
        (0.8, 0.95, "consistent", "undecidable here"),
        (0.8, 0.2, "not", "undecidable here"),
        (0.3, 0.2, "undecidable here", "consistent"),
        (0.3, 0.95, "undecidable here", "undecidable here"),  # long, yet its steps may be dear
        (0.6, 0.95, "undecidable here", "undecidable here"),  # between the limits nothing was said
    ],
)
def test_the_overlap_rule(overlap, share, above, below):
    rng = np.random.default_rng(0)
    table = threshold_table(overlapping(*(kept(rng, share, 200) for _ in range(8)), overlap=overlap))
    assert table["rule"].droplevel("drafter").to_dict() == {"above 65%": above, "below 50%": below}
    assert (table["p10"] <= table["p90"])[table["num_prompts"] > 0].all()


def test_one_text_above_the_limit_decides_nothing():
    assert threshold_table(overlapping([K] * 40, overlap=0.9))["rule"].unique().tolist() == ["undecidable here"]


@pytest.mark.parametrize("rows", [texts([1, 0]), overlapping([1, 0], overlap=None)])
@pytest.mark.parametrize("table", [compatibility_table, threshold_table])
def test_runs_without_overlap_are_said_to_be_so(rows, table):
    with pytest.raises(InputError, match="want top_k_overlap"):
        table(rows)


def content(shares, **columns):
    rng = np.random.default_rng(1)
    frames = [
        texts(*(kept(rng, share, 400) for _ in range(12))).assign(workload=name) for name, share in shares.items()
    ]
    return pd.concat(frames, ignore_index=True).assign(**columns)


def steps(workload, arm, drafter, accepted, step_ms):
    row = {"run_id": "r", "status": "ok", "origin": "measured", "workload": workload, "arm": arm, "drafter": drafter}
    return pd.DataFrame([row | {"num_accepted_tokens": kept, "step_ms": step_ms} for kept in accepted])


def test_contents_are_set_against_prose_with_bounds():
    shares = {"code_writing": 0.9, "code_editing": 0.6, "prose": 0.595, "chat": 0.3}
    rows = content(shares)
    extra = content({"prose": 0.99}).assign(context_len_low=99_999)  # at a context that the others lack
    drafted = steps("chat", "speculative", rows["drafter"][0], [1, 2], 3.0)
    loop = pd.concat([steps("chat", "plain", None, [None] * 4, 2.0), drafted])
    table = content_table(pd.concat([rows, extra]), loop).set_index(["workload", "against"])
    said = table["published_order"].to_dict()
    assert said == {
        ("code_writing", "prose"): "consistent",
        ("code_writing", "code_editing"): "consistent",
        ("code_editing", "prose"): "undecidable here",
        ("chat", "prose"): "",
    }
    length = {name: 1 + share + share**2 + share**3 for name, share in shares.items()}
    for (one, other), row in table.iterrows():
        assert row["ratio_low"] < length[one] / length[other] < row["ratio_high"]
    assert table["real_speedup"].dropna().to_dict() == {("chat", "prose"): pytest.approx((5 / 6) / (1 / 2))}
    turned = content_table(content({"code_editing": 0.2, "prose": 0.8}), loop[:0])
    assert turned["published_order"].tolist() == ["not"]


def test_content_without_prose_is_refused():
    with pytest.raises(InputError, match="want prose"):
        content_table(content({"chat": 0.5}), steps("chat", "plain", None, [None], 1.0))
