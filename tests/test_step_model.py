"""The step-cost model on planted physics: coefficients come back, what it must not do it refuses."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import nnls

from labkit.errors import InputError
from labkit.steps.heldout import held_out
from labkit.steps.model import fit_step_models, model_table
from labkit.steps.terms import nonnegative_fit
from tests.step_worlds import NUM_SMS, Physics, StepWorld, step_rows

NOISY = StepWorld(noise=0.02, drift=0.02, batches=(1, 4, 16), contexts=(1024, 8192, 32768, 65536, 131072))
BOTH_DTYPES = ("bfloat16", "float8_e4m3fn")
POINT = {"batch_size": 1, "q_len": 8, "context_len": 50_000, "weight_dtype": "bfloat16", "kv_dtype": "bfloat16"}


def sidecars(world: StepWorld, read_gb_per_s: float = 4390.0, num_sms: int = NUM_SMS) -> dict:
    calibration = {"read_gb_per_s": read_gb_per_s, "matrix_tflops_per_s": {"bfloat16": 700.0}, "num_sms": num_sms}
    return {world.run_id: {"calibration": calibration}}


def fitted(world: StepWorld, **options):
    return fit_step_models(step_rows(world), sidecars(world), **options)


def terms(model) -> pd.DataFrame:
    return model.terms.set_index("term")


def test_nonnegative_fit_is_that_of_scipy():
    rng = np.random.default_rng(3)
    for _ in range(30):
        matrix, targets = rng.normal(size=(12, 4)) * [1, 1e3, 1e-3, 1], rng.normal(size=(12, 3))
        wanted = np.column_stack([nnls(matrix, column)[0] for column in targets.T])
        np.testing.assert_allclose(nonnegative_fit(matrix, targets), wanted, rtol=1e-6, atol=1e-9)


def test_planted_coefficients_come_back_exactly_without_noise():
    (model,) = fitted(StepWorld(weight_dtypes=BOTH_DTYPES, batches=(1, 4)), separate=("kv_dtype",))
    found, physics = terms(model)["value"], Physics()
    assert model.kv_path == "keys read once"
    assert model.ridge == 0
    assert found["fixed"] == pytest.approx(physics.fixed_ms, rel=1e-6)
    assert found["weights"] == pytest.approx(physics.weight_gb_per_s, rel=1e-6)
    assert found["attention"] == pytest.approx(physics.kv_gb_per_s, rel=1e-6)
    assert found["tokens"] == pytest.approx(physics.token_us, rel=1e-6)
    assert model.findings == ()


def test_intervals_hold_the_planted_coefficients():
    truth = {"fixed": 0.8, "weights": 3900.0, "attention": 4000.0, "tokens": 6.0}
    inside = []
    for seed in range(4):
        world = NOISY.with_(weight_dtypes=BOTH_DTYPES, num_rounds=12)
        (model,) = fit_step_models(step_rows(world, seed), sidecars(world), separate=("kv_dtype",))
        found = terms(model).loc[list(truth)]
        inside += list((found["low"] <= list(truth.values())) & (found["high"] >= list(truth.values())))
    assert np.mean(inside) >= 0.85


def test_weights_of_one_size_are_one_term_with_the_fixed_cost():
    (model,) = fitted(StepWorld())
    assert list(model.terms["term"]) == ["fixed and weights", "attention", "tokens"]
    assert terms(model)["value"]["fixed and weights"] == pytest.approx(0.8 + 15e9 / 3900 / 1e6, rel=1e-6)
    with pytest.raises(InputError, match="weights of one size"):
        model.predict(pd.DataFrame([POINT]), weight_bytes=4e9)


@pytest.mark.parametrize(
    ("backend", "path"), [("per_token", "keys read per query token"), ("triton_nosplit", "serial tiles, no split")]
)
def test_the_attention_path_is_found(backend, path):
    (model,) = fitted(NOISY.with_(backends=(backend,)))
    assert model.kv_path == path
    if backend == "triton_nosplit":  # 32 query heads on 132 processors: four requests run at once
        assert terms(model)["value"]["attention"] == pytest.approx(3.0, rel=0.05)
        several = pd.DataFrame([POINT | {"batch_size": batch} for batch in (4, 5, 8)])
        times = model.predict(several)["forward_ms"].to_numpy()
        assert times / times[0] == pytest.approx([1.0, 1.93, 1.93], rel=0.02)


def test_at_batch_1_the_plausible_path_wins():
    """One batch size cannot tell bytes from tiles by the error; 100 GB/s on a card that reads 4,390 can."""
    (model,) = fitted(NOISY.with_(backends=("triton_nosplit",), batches=(1,)))
    assert model.kv_path == "serial tiles, no split"
    (model,) = fitted(NOISY.with_(batches=(1,)))
    assert model.kv_path == "keys read once"


def test_a_planted_kink_raises_the_residual_and_is_reported():
    world = StepWorld(noise=0.01)
    (straight,), (kinked,) = fitted(world), fitted(world.with_(physics=Physics(kink_at=30_000, kink=3.0)))
    worst = [model.points["residual"].abs().max() for model in (straight, kinked)]
    assert worst[1] > 5 * worst[0]
    assert not any("residual jumps" in finding for finding in straight.findings)
    assert any("between 16K and 64K" in finding for finding in kinked.findings)
    assert "another path?" in model_table([kinked])["findings"][0]


def test_what_no_device_can_do_is_a_finding():
    fast = StepWorld(physics=Physics(kv_gb_per_s=9000.0, weight_gb_per_s=9000.0), noise=0.01)
    (model,) = fitted(fast)
    assert any("above the 4,390 GB/s that the run read" in finding for finding in model.findings)
    assert any("of reading the weights" in finding for finding in model.findings)
    (honest,) = fitted(StepWorld(noise=0.01))
    assert honest.findings == ()


def test_computing_beyond_the_ridge():
    rows = step_rows(StepWorld(batches=(1, 8, 16, 32), contexts=(1024, 4096), noise=0.005))
    tokens = rows["batch_size"] * rows["q_len"]
    rows["forward_ms"] += (tokens - 128).clip(lower=0) * 0.025
    (model,) = fit_step_models(rows, sidecars(StepWorld()))
    assert model.ridge == 128
    assert terms(model)["value"]["tokens beyond the ridge"] == pytest.approx(25.0, rel=0.15)


def test_communication_is_a_term_of_its_own():
    world = StepWorld(batches=(1, 8))
    rows = step_rows(world)
    rows["communication_ms"] = 0.4 + 0.002 * rows["batch_size"] * rows["q_len"]
    rows["forward_ms"] += rows["communication_ms"]
    (model,) = fit_step_models(rows, sidecars(world))
    assert terms(model)["value"]["communication, fixed"] == pytest.approx(0.4, rel=1e-6)
    assert terms(model)["value"]["communication, tokens"] == pytest.approx(2.0, rel=1e-6)
    assert model.points["residual"].abs().max() < 1e-6
    several = rows.assign(num_gpus=2)
    assert fit_step_models(several, sidecars(world))[0].findings == ()
    silent = fit_step_models(several.assign(communication_ms=None), sidecars(world))[0].findings
    assert any("communication of 2 devices: not measured" in finding for finding in silent)


def test_states_of_gated_delta_layers_are_a_term_where_the_batch_varies():
    world = StepWorld(batches=(1, 4, 16))
    rows = step_rows(world)
    rows["state_bytes"] = 150_000_000 * rows["batch_size"] * (1 + rows["q_len"])
    rows["forward_ms"] += rows["state_bytes"] / 2500 / 1e6
    (model,) = fit_step_models(rows, sidecars(world))
    assert terms(model)["value"]["states"] == pytest.approx(2500, rel=1e-6)
    (single,) = fit_step_models(rows[rows["batch_size"] == 1], sidecars(world))
    assert "states" not in terms(single).index
    assert single.points["residual"].abs().max() < 1e-6


def test_predictions_have_an_interval_and_an_origin():
    (model,) = fitted(NOISY.with_(weight_dtypes=BOTH_DTYPES), separate=("kv_dtype",))
    point = model.predict(pd.DataFrame([POINT])).iloc[0]
    truth = sum(Physics().parts("triton_split", 1, 50_000, 8, 1.0, 1.0).values())
    assert point["origin"] == "modelled"
    assert point["low"] < truth < point["high"]
    assert point["forward_ms"] == pytest.approx(truth, rel=0.02)
    quarter = model.predict(pd.DataFrame([POINT | {"weight_dtype": "4-bit"}]), weight_bytes=15e9 * 4.5 / 16)
    assert point["forward_ms"] - quarter["forward_ms"][0] == pytest.approx(15 * 11.5 / 16 / 3.9, rel=0.05)


@pytest.mark.parametrize(
    ("axis", "value", "limit"), [("context_len", 10**6, "524288"), ("batch_size", 128, "64"), ("q_len", 32, "16")]
)
def test_extrapolation_is_refused(axis, value, limit):
    (model,) = fitted(NOISY.with_(noise=0.0, drift=0.0))
    with pytest.raises(InputError, match=f"{axis}: wanted .* to {limit} "):
        model.predict(pd.DataFrame([POINT | {axis: value}]))
    with pytest.raises(InputError, match="kv_dtype: wanted one of bfloat16"):
        model.predict(pd.DataFrame([POINT | {"kv_dtype": "float8_e4m3fn"}]))


def test_too_few_points():
    with pytest.raises(InputError, match="want 6 decode and verify points"):
        fitted(StepWorld(contexts=(1024,)))


def test_held_out_error_is_that_of_the_planted_noise():
    world = NOISY.with_(backends=("triton_split", "triton_nosplit"))
    result = held_out(step_rows(world), sidecars(world))
    assert result.holds
    assert 0.001 < result.median_error < 0.03
    points = result.points
    assert set(points["held_out"]) == {"inside", "longer context", "larger batch"}
    assert (points.loc[points["context_len"] == 131072, "held_out"] == "longer context").all()
    assert (points["num_fitted"] == points["num_points"] // 3).all()
    assert len(points) == 2 * (60 - 20)
    assert result.summary()["within_interval"].mean() > 0.85


def test_held_out_error_shows_a_kink_in_the_part_not_seen():
    world = NOISY.with_(physics=dataclasses.replace(Physics(), kink_at=100_000, kink=2.0))
    result = held_out(step_rows(world), sidecars(world))
    assert not result.holds
    by_kind = result.points.groupby("held_out")["relative_error"].agg(lambda errors: errors.abs().median())
    assert by_kind["longer context"] > 5 * by_kind["inside"]
    far = NOISY.with_(batches=(1, 16))  # a model of batch 1 is not asked about 16
    assert set(held_out(step_rows(far), sidecars(far)).points["batch_size"]) == {1}
    with pytest.raises(InputError, match="18 or more"):
        held_out(step_rows(StepWorld(contexts=(1024, 4096))))
