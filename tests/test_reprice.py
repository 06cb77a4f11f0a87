"""A recorded generation under other costs, forced acceptance as instrument, and the field's formulas."""

import numpy as np
import pandas as pd
import pytest
import torch

from labkit.accept import accept_forced
from labkit.breakeven import breakeven
from labkit.decide.composed import cost_rows as cost_rows_of
from labkit.decide.forcing import all_reject_ratio, forcing_check
from labkit.decide.formulas import (
    fitted_chance,
    formula_errors,
    formula_table,
    formulas,
    geometric_length,
    leviathan,
    magicdec,
)
from labkit.decide.reprice import measured_speedup, reprice, reprice_check
from labkit.decide.step_costs import step_costs
from labkit.drafting.forced import ForcedDrafter, fixed_acceptance
from labkit.drafting.ngram import NgramDrafter
from labkit.errors import InputError
from labkit.experiments import loop
from labkit.models.target import ModelTarget
from labkit.models.weights import load_model
from labkit.results import load_runs
from labkit.rows import fixed_context
from labkit.speculation import speculate
from tests.best_k_worlds import geometric
from tests.worlds import CostWorld, Noise, cost_rows

CONTEXTS = (1024, 2048, 4096)


def step_ms(context: float, j: int) -> float:
    """Planted: linear in context, and a price per draft."""
    return 10.0 + context / 1024 + j * (1 + context / 2048)


WORLD = CostWorld(
    lambda _, context: 10.0 + context / 1024, lambda _, context, j: step_ms(context, j), context_lens=CONTEXTS
)


def recorded(seed: int = 0, num_prompts: int = 6, noise: float = 0.0) -> pd.DataFrame:
    """Both arms of real generations at contexts between the cost cells, timed by the planted costs."""
    rng, rows = np.random.default_rng(seed), []
    for prompt in range(num_prompts):
        context = 1100.0
        for index in range(60):
            drafted = int(rng.choice([0, 4], p=[0.3, 0.7]))
            kept = int(min(rng.geometric(0.4) - 1, drafted))
            common = {"prompt_id": f"p{prompt}", "group": f"p{prompt}", "round": 0, "step_index": index}
            common |= {"context_len": context, "run_id": "real", "target": "tiny", "status": "ok", "origin": "measured"}
            common |= {"weight_dtype": "float32", "kv_dtype": "float32", "decode_backend": None, "verify_backend": None}
            common |= {"imposed_acceptance": None}
            time = step_ms(context, drafted) * np.exp(rng.normal(0, noise))
            speculative = {"arm": "speculative", "num_drafted_tokens": drafted, "num_accepted_tokens": float(kept)}
            speculative |= {"verify_backend": "sdpa", "drafter": "ngram", "num_speculative_tokens": 4.0}
            rows.append(common | speculative | {"step_ms": time, "verify_ms": time - 1, "draft_ms": 1.0})
            for token in range(kept + 1):
                plain = {"arm": "plain", "num_drafted_tokens": 0, "num_accepted_tokens": 0.0, "decode_backend": "sdpa"}
                rows.append(common | plain | {"step_ms": 10.0 + (context + token) / 1024})
            context += kept + 1
    return pd.DataFrame(rows)


def test_the_own_costs_give_back_what_was_measured() -> None:
    trace = recorded()
    found = reprice(trace, cost_rows(WORLD))
    truth = measured_speedup(trace)["speedup"].iloc[-1]
    assert found.speedup == pytest.approx(truth, rel=2e-3)
    assert found.low == found.high == found.speedup  # exact costs have no spread
    assert found.text_low < truth < found.text_high
    assert (found.notes, found.origin) == ((), "modelled")


def test_another_pairing_context_and_k_follow_the_planted_costs() -> None:
    trace = recorded()
    steps = trace[trace["arm"] == "speculative"]
    drafted, kept = (steps[name].to_numpy() for name in ("num_drafted_tokens", "num_accepted_tokens"))
    at = reprice(trace, cost_rows(WORLD), context_len=3072)
    wanted = (kept + 1).sum() * 13.0 / sum(step_ms(3072, j) for j in drafted)
    assert at.speedup == pytest.approx(wanted)
    cut = reprice(trace, cost_rows(WORLD), context_len=3072, k=2)
    per_token = sum(step_ms(3072, min(j, 2)) for j in drafted) / (np.minimum(kept, 2) + 1).sum()
    assert cut.speedup == pytest.approx(13.0 / per_token, rel=0.02)
    assert cut.notes == ("cut from k = 4",)
    slow = WORLD.with_(
        verify_backends=("sdpa", "per_token"),
        step_ms=lambda name, context, j: step_ms(context, j) * (2 if name == "per_token" else 1),
    )
    half = reprice(trace, cost_rows(slow), where={"verify_backend": "per_token"})
    assert half.speedup == pytest.approx(reprice(trace, cost_rows(WORLD)).speedup / 2)


def test_the_interval_holds_what_other_launches_measure() -> None:
    noisy = WORLD.with_(noise=Noise(sample=0.03, spikes=0.05), num_rounds=16)
    inside = []
    for seed in range(10):
        trace = recorded(seed, noise=0.03)
        found = reprice(trace, cost_rows(noisy, np.random.default_rng(seed)))
        inside.append(found.low <= measured_speedup(trace)["speedup"].iloc[-1] <= found.high)
    assert np.mean(inside) >= 0.7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 5}, "k must lie between 1 and the recorded 4"),
        ({"where": {"verify_backend": "fa3"}}, "verify_backend 'fa3' was not measured; there is sdpa"),
        ({"context_len": 65536}, "costs only at 1024 to 4096"),
    ],
)
def test_what_cannot_be_priced_is_refused(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        reprice(recorded(), cost_rows(WORLD), **options)
    plain = recorded()
    with pytest.raises(InputError, match="want speculative steps"):
        reprice(plain[plain["arm"] == "plain"], cost_rows(WORLD))


def test_far_beyond_is_refused_and_near_is_said() -> None:
    trace = recorded()
    near = reprice(trace.assign(context_len=900.0), cost_rows(WORLD))
    assert near.notes == ("100% of the steps lie outside the measured contexts: priced at the nearest",)
    other = reprice(trace.assign(launch_mode="graph"), cost_rows(WORLD))
    assert other.notes == ("launch_mode: trace graph, costs eager",)


def test_the_recorded_generations_lie_inside_the_predicted_interval() -> None:
    """Committed rows: SmolLM2 on a CPU, real generations of one run priced by the cost cells of another."""
    stored = load_runs("loop")
    real = stored[(stored["origin"] == "measured") & (stored["weight_dtype"] == "float32")]
    (row,) = reprice_check(real, fixed_context(stored)).to_dict("records")
    assert row["inside"], row
    assert abs(row["error"]) < 0.1
    assert row["num_prompts"] == 12


# ---- forced acceptance ----------------------------------------------------------------------------------------------


def test_forcing_leaves_the_work_of_a_step_unchanged() -> None:
    """Imposed 0 or k of k: the same forwards of the same widths, and one draft call, in every step."""
    decoder, calls = load_model("random:tiny"), {}
    for accepted in (0, 3):
        target = ModelTarget(decoder, batch_size=1, max_context_len=128, verify_backend="sdpa")
        seen: list[tuple[str, int]] = []
        forward = target._forward

        def counted(requests, tokens, backend, forward=forward, seen=seen):
            seen.append((backend, tokens.shape[1]))
            return forward(requests, tokens, backend)

        target._forward = counted
        drafter = ForcedDrafter(NgramDrafter(), accepted=fixed_acceptance(accepted), length=3)
        prompt = torch.arange(1, 33).tolist()
        options = {"num_speculative_tokens": 3, "max_new_tokens": 64, "max_steps": 6, "accept": accept_forced}
        (generation,) = speculate(target, drafter, [prompt], **options)
        assert {step.num_accepted_tokens for step in generation.steps} == {accepted}
        calls[accepted] = seen
    assert calls[0] == calls[3]
    assert set(calls[0]) == {("sdpa", 4)}


def forced(*, kept_verify: float = 1.0, rejected: float = 1.0, noise: float = 0.01, seed: int = 0) -> pd.DataFrame:
    """A forced run at two contexts: cost rows, and full drafts again at imposed rates 0 and 1, in the same rounds.

    kept_verify, rejected : factors on verify of steps that keep all drafts, and on a whole step at rate 0.
    """
    world = WORLD.with_(noise=Noise(sample=noise), context_lens=(1024, 4096), num_rounds=12)
    parts = [cost_rows(world, np.random.default_rng(seed)).assign(imposed_acceptance=np.nan)]
    for rate, kept in ((0.0, 0), (1.0, 4)):
        again = cost_rows(world, np.random.default_rng(seed + 1 + int(rate)))
        again = again[(again["arm"] == "speculative") & (again["num_drafted_tokens"] == 4)]
        parts.append(again.assign(imposed_acceptance=rate, num_accepted_tokens=kept))
    rows = pd.concat(parts, ignore_index=True)
    clock = np.exp(np.random.default_rng(seed + 9).normal(0, 0.05, 12))  # shared by the arms of a round
    rows["step_ms"] *= clock[rows["round"]] * np.where(rows["imposed_acceptance"] == 0, rejected, 1.0)
    draft_ms = np.where(rows["arm"] == "speculative", 0.2 * rows["step_ms"], 0.0)
    verify_ms = (rows["step_ms"] - draft_ms) * np.where(rows["imposed_acceptance"] == 1, kept_verify, 1.0)
    return rows.assign(draft_ms=draft_ms, verify_ms=verify_ms)


def test_planted_forcing_is_neutral_or_not() -> None:
    found = forcing_check(forced(noise=0.005)).set_index("part")
    assert found["neutral"].all()
    assert found["resolved"].all()
    assert (found["num_units"] == 24).all()  # rounds of both contexts
    found = forcing_check(forced(kept_verify=1.1)).set_index("part")
    assert (found.loc["draft_ms", "neutral"], found.loc["verify_ms", "neutral"]) == (True, False)
    assert found.loc["verify_ms", "ratio"] == pytest.approx(1.1, rel=0.02)
    real = forcing_check(recorded(noise=0.002)).set_index("part")  # prompts are the units of real generations
    assert (real["num_units"] == 6).all()
    with pytest.raises(InputError, match="want steps that keep all drafts"):
        forcing_check(forced().query("imposed_acceptance != 1"))


def test_the_all_reject_ratio_equals_the_relative_cost_of_its_run() -> None:
    rows = forced()
    table = all_reject_ratio(rows)
    assert table["inside"].all()
    assert table["resolved"].all()
    truths = [step_ms(context, 4) / (10 + context / 1024) for context in (1024, 4096)]
    assert table["all_reject"].to_numpy() == pytest.approx(truths, rel=0.02)
    cells = breakeven(fixed_context(rows), 3.0).cells
    assert table["relative_step_cost"].to_numpy() == pytest.approx(cells["relative_step_cost"].to_numpy(), rel=1e-4)
    assert table["context_len"].tolist() == [1024, 4096]
    assert not all_reject_ratio(forced(rejected=1.05))["inside"].any()
    with pytest.raises(InputError, match="acceptance=forced` makes them"):
        all_reject_ratio(rows[rows["imposed_acceptance"] != 0])


@pytest.mark.parametrize(("num_worlds", "least"), [(20, 0.86), pytest.param(60, 0.90, marks=pytest.mark.soak)])
def test_the_all_reject_interval_holds_the_truth(num_worlds: int, least: float) -> None:
    """Two planted cells a world, without a difference: the interval misses 0 about one time in twenty.

    The bound is two and a half standard errors under 95%: of 40 cells here, of 120 in `make soak`.
    """
    inside = [all_reject_ratio(forced(seed=10 * seed))["inside"] for seed in range(num_worlds)]
    assert least <= np.concatenate(inside).mean() <= 1.0


def test_generations_at_an_imposed_rate_are_no_costs() -> None:
    rows = forced(rejected=3.0)
    assert fixed_context(rows)["imposed_acceptance"].isna().all()
    assert cost_rows_of(rows)["step_ms"].tolist() == fixed_context(rows)["step_ms"].tolist()
    relative = [breakeven(part, 3.0).cells["relative_step_cost"].tolist() for part in (rows, fixed_context(rows))]
    assert relative[0] == relative[1]


def test_a_forced_run_of_a_tiny_model_holds_both_rates_in_the_rounds_of_its_costs() -> None:
    """`labkit run loop --set acceptance=forced`: what is imposed happens, and both checks read the rows."""
    axes = {"target": ["random:tiny"], "context_len": [64], "num_speculative_tokens": [3], "num_rounds": [3]}
    backends = {"verify_backend": ["sdpa"], "decode_backend": ["sdpa"]}
    arms = loop.points("ci", acceptance=["forced"], **axes, **backends)
    found = [
        pd.DataFrame(rows).assign(**(arm | {"status": "ok"}))
        for arm, rows in zip(arms, loop.measure(arms), strict=True)
    ]
    rows = pd.concat(found, ignore_index=True).assign(run_id="run", gpu="cpu")
    full = rows[rows["num_drafted_tokens"] == 3].fillna({"imposed_acceptance": -1})
    kept = {rate: set(own["num_accepted_tokens"]) for rate, own in full.groupby("imposed_acceptance")}
    assert kept == {0.0: {0}, 1.0: {3}, -1.0: {0}}
    assert (full.groupby("round")["imposed_acceptance"].nunique() == 3).all()
    assert set(forcing_check(rows)["part"]) == {"draft_ms", "verify_ms"}
    assert all_reject_ratio(rows)["num_rounds"].tolist() == [3]


def test_acceptance_does_not_change_the_verify_time_of_the_recorded_steps() -> None:
    stored = load_runs("loop")
    real = stored[(stored["origin"] == "measured") & (stored["weight_dtype"] == "float32")]
    found = forcing_check(real)
    verify = found[found["part"] == "verify_ms"]
    assert verify["neutral"].all()
    assert verify.loc[verify["num_units"] == verify["num_units"].max(), "resolved"].all()  # with twelve prompts


# ---- formulas -------------------------------------------------------------------------------------------------------


def test_formulas_by_hand() -> None:
    assert leviathan(0.8, 4, 0.1) == pytest.approx((1 - 0.8**5) / (0.2 * 1.4))
    assert magicdec(0.8, 4, 0.1, 1.3) == pytest.approx((1 - 0.8**5) / 0.2 / 1.7)
    # A gain for some k if and only if the chance exceeds the cost of a draft (Corollary 3.9).
    assert leviathan(0.3, 1, 0.29) > 1 > leviathan(0.3, 1, 0.31)
    assert fitted_chance(geometric_length(0.63, 5), 5) == pytest.approx(0.63)


def test_in_their_own_world_the_formulas_are_right_and_elsewhere_their_error_is_told() -> None:
    """Drafts kept with one chance, drafting apart, verify a fifth dearer than decode: MagicDec holds, Leviathan not."""
    rows = pd.concat([
        cost_rows(CostWorld(lambda *_: 10.0, lambda _, __, j: 10.0 + (2.0 + 0.5 * j) * (j > 0),
                            num_speculative_tokens=k, run_id=f"r{k}")) for k in (2, 4)])  # fmt: skip
    rows["draft_ms"] = 0.5 * rows["num_drafted_tokens"]
    cells = breakeven(rows, pd.concat([geometric(k, 0.6) for k in (2, 4)]), resamples=200).cells
    table = formula_table(step_costs(rows), cells)
    errors = table.set_index(["formula", "k"])["error"]
    assert errors["MagicDec"].tolist() == pytest.approx([0, 0], abs=1e-3)
    assert errors["Forced rejection"].tolist() == pytest.approx([0, 0], abs=1e-3)
    assert errors["Leviathan et al.", 4] == pytest.approx((12 + 2) / 12 - 1, rel=1e-2)
    worst = formula_errors(table).set_index("formula")["worst_error"]
    assert worst["Leviathan et al."] == pytest.approx(errors["Leviathan et al."].max())


def test_every_formula_has_assumptions_and_a_citation() -> None:
    table = formulas()
    assert set(table.loc[table["drawn"] == "yes", "name"]) == {"Leviathan et al.", "MagicDec", "Forced rejection"}
    assert table[["formula", "assumptions", "leaves_out", "source"]].ne("").all(axis=None)
