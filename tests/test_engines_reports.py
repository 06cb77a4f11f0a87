"""Every published case with numbers: its figures in the engine's own form, and what the importer must make of them."""

import pytest

from labkit.engines.checks import compare_arms
from labkit.engines.conclusions import arms, cases, conclusions_answer, conclusions_table, jumps, one_off
from labkit.engines.diagnose import diagnose
from labkit.engines.importing import Reader

REPORTS = cases()
CASES = list(REPORTS.values())


# Of the 55 rows of reports those without a figure that a source printed: (row, why).
WITHOUT_FIGURES = {
    3: "a definition: the bonus came into vLLM's length; the forms of 0.8 and 0.9 are in engine_forms",
    23: "the figures are not in the stored part of the thread",
    25: "a definition: trtllm-bench's length; its form is in engine_forms",
    45: "a percentage, and the window of a client's own formula",
    49: "no figure: public models gain, a private one loses",
    73: "the figures are not in the stored part of the thread",
    95: "a spread in percent over seeds, of no named length",
    105: "no figure: two more clients that counted chunks",
}


def test_every_row_with_figures_is_a_case():
    assert sorted([*REPORTS, *WITHOUT_FIGURES]) == list(range(1, 110, 2))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['row']}-{case['engine']}")
def test_case(case):
    records = arms(case)
    for arm, index, field, value in case["wanted"]:
        record = records[arm][index]
        if field == "warning":
            assert any(value in text for text in record.warnings), record.warnings
            continue
        if field == "no warning":
            assert not any(value in text for text in record.warnings), record.warnings
            continue
        found = getattr(record, field) if hasattr(record, field) else record.details[field]
        if isinstance(value, float):
            assert found == pytest.approx(value, rel=1e-3), field
        else:
            assert found == value, field
    for plain, arm, speedup, cost in case["pairs"]:
        found = compare_arms(records[plain][-1], records[arm][-1])
        assert found["speedup"] == pytest.approx(speedup, abs=0.006)
        assert found["relative_step_cost"] == (None if cost is None else pytest.approx(cost, abs=0.011))
        assert found["warning"] is None


def test_one_compilation_is_told_from_the_cost_of_a_step():
    case = REPORTS.get(61)
    assert one_off([records[0] for records in arms(case).values()]) == pytest.approx(case["fit"], rel=2e-3)


def test_a_cliff_is_told_from_a_slope():
    case = REPORTS.get(75)
    (jump,) = jumps(arms(case)["table"])
    assert jump["ratio"] == pytest.approx(case["jump"]["ratio"], abs=0.01)
    assert [round(context, -3) for context in jump["between"]] == [4000, 8000]


def test_a_length_that_is_only_bounded_bounds_the_cost():
    case = REPORTS.get(65)
    records = arms(case)
    speedup = compare_arms(records["plain"][0], records["k=2"][0])["speedup"]
    rate = records["k=2"][0].acceptance_rate_per_pos[0]
    lengths = [1 + rate, 1 + 2 * rate]
    assert lengths == pytest.approx(case["bounds"]["length"], abs=0.01)
    assert [length / speedup for length in lengths] == pytest.approx(case["bounds"]["cost"], abs=0.05)


def test_acceptance_that_falls_with_context():
    case, reader = REPORTS.get(79), Reader()
    found = diagnose(reader.read_text(case["files"]["log"], "log", reader.server), reader.server)
    assert found.acceptance == case["acceptance"]


def test_a_speedup_above_the_length_is_suspicious():
    case = REPORTS.get(7)
    records = arms(case)
    records["k=2"][0].mean_acceptance_length = 1.2
    assert "baseline is slow" in compare_arms(records["plain"][0], records["k=2"][0])["warning"]


def test_table_and_answer_are_computed():
    table = conclusions_table(REPORTS)
    closes = dict(zip((case["row"] for case in CASES), table["closes"], strict=True))
    assert closes[51] == closes[101] == "yes"
    assert closes[53] == closes[65] == closes[63] == "no"
    assert f"Of {len(CASES)} published cases" in conclusions_answer(table)
    assert table["numbers"].str.len().min() > 0
