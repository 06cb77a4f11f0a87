"""Agreement, drift and repetition of planted greedy texts."""

import numpy as np
import pandas as pd
import pytest

from labkit.acceptance import AcceptanceCounts
from labkit.decide.agreement import agreement_table, drift_table, repetition_table, temperature_table
from labkit.drafting.matches import Matches, simulate
from labkit.errors import InputError
from tests.worlds import rows_of_counts

K = 3


def texts(*matches, repeated=0.0):
    """One row per text with these drafts right behind each token, counted as the loop would."""
    counts = []
    for matched in matches:
        text = Matches(10, len(matched) + 1, [K] * len(matched), list(matched))
        steps = [(s.num_drafted_tokens, s.num_accepted_tokens) for s in simulate(text, K, 10**6) if not s.truncated]
        counts.append(AcceptanceCounts.from_steps(steps, K))
    columns = {"match_lengths": [np.array(matched) for matched in matches], "repeated_ngram_share": repeated}
    return rows_of_counts(counts).assign(**columns)


def kept(rng, share, places):
    """Drafts right behind each place where every token is right with the same probability."""
    right = np.append(rng.random(places) < share, [False] * K)
    return [next((i for i in range(K) if not right[place + i]), K) for place in range(places)]


def test_independent_tokens_are_foretold():
    rng = np.random.default_rng(0)
    table = agreement_table(texts(*(kept(rng, share, 4000) for share in (0.3, 0.5, 0.7, 0.9)))).iloc[0]
    assert table["top1_agreement"] == pytest.approx(0.6, abs=0.02)
    assert table["prompt_error"] < 0.02
    assert table["rank_correlation"] == 1


def test_a_text_that_is_always_right_takes_whole_drafts():
    table = agreement_table(texts([K] * 40, [K] * 40)).iloc[0]
    assert (table["foretold"], table["measured"], table["error"]) == (K + 1, K + 1, 0)


def test_drift_is_the_mean_of_all_places_of_a_band():
    table = drift_table(texts([0] * 32 + [2] * 32 + [1] * 16))
    assert table.iloc[0].to_dict() == {"0 to 32": 1.0, "32 to 64": 3.0, "64 to 128": 2.0}


def test_repeating_texts_stand_apart():
    table = repetition_table(texts([0] * 40, [K] * 40, repeated=[0.1, 0.3]))["mean_acceptance_length"]
    assert table.droplevel([0, 1]).to_dict() == {"varied": 1.0, "repeating": K + 1}


def test_rows_without_matches_are_refused():
    with pytest.raises(InputError, match="want match_lengths"):
        agreement_table(texts([1, 0]).assign(match_lengths=None))


def test_sampled_texts_stand_beside_greedy_ones_of_the_same_prompts():
    greedy = texts([3] * 40, [3] * 40, [0] * 40, repeated=[0.3, 0.1, 0.0]).assign(temperature=0.0, context_len_low=0)
    sampled = texts([0] * 40, [0] * 40, repeated=[0.1, 0.1]).assign(temperature=0.7, context_len_low=0)
    rows = pd.concat([greedy, sampled, sampled])
    table = temperature_table(rows).reset_index().set_index("temperature")
    # The third greedy text was not sampled, so it is left out.
    assert table["mean_acceptance_length"].to_dict() == {0.0: 4.0, 0.7: 1.0}
    assert table["num_prompts"].tolist() == [2, 2]
    assert table["num_texts"].tolist() == [2, 4]
    assert table["repeating"].tolist() == [0.5, 0.0]
    with pytest.raises(InputError, match="above 0"):
        temperature_table(greedy)
