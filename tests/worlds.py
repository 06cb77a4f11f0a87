"""Synthetic worlds with known costs and acceptance, as frames of the row contract."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from labkit.acceptance import AcceptanceCounts, prompt_histograms
from labkit.breakeven import breakeven


@dataclass(frozen=True)
class Noise:
    """What timing does to a planted cost; all zero = exact.

    `sample` is the sd of the log of each sample, `drift` that of a random walk over the rounds shared by all arms of
    a round, `spikes` the share of samples that take 1.5 to 4 times as long, `autocorrelation` that of an arm's noise
    from round to round.
    """

    sample: float = 0.0
    drift: float = 0.0
    spikes: float = 0.0
    autocorrelation: float = 0.0


TYPICAL_NOISE = Noise(sample=0.03, drift=0.02, spikes=0.05)


@dataclass(frozen=True)
class CostWorld:
    """Planted times in ms.

    `decode_ms(backend, context_len)` of a plain step, `step_ms(verify_backend, context_len, num_drafted_tokens)` of a
    speculative one.
    """

    decode_ms: Callable[[str, int], float]
    step_ms: Callable[[str, int, int], float]
    decode_backends: tuple[str, ...] = ("sdpa",)
    verify_backends: tuple[str, ...] = ("sdpa",)
    context_lens: tuple[int, ...] = (1024,)
    num_speculative_tokens: int = 4
    num_rounds: int = 8
    samples_per_round: int = 2
    noise: Noise = Noise()
    run_id: str = "run-1"
    gpu: str = "cpu"
    target: str = "tiny"
    drafter: str = "ngram"
    batch_size: int = 1

    def with_(self, **changes: Any) -> "CostWorld":
        """A copy with some fields changed."""
        return replace(self, **changes)


def cost_rows(world: CostWorld, rng: np.random.Generator | None = None) -> pd.DataFrame:
    """Loop rows: per context and verify backend one group; in each round every plain backend and every draft length."""
    rng = rng or np.random.default_rng(0)
    k = world.num_speculative_tokens
    frames = []
    for context_len in world.context_lens:
        for verify in world.verify_backends:
            plain = [("plain", None, name, 0, world.decode_ms(name, context_len)) for name in world.decode_backends]
            steps = [("speculative", verify, None, j, world.step_ms(verify, context_len, j)) for j in range(k + 1)]
            arms = pd.DataFrame(
                [*plain, *steps], columns=["arm", "verify_backend", "decode_backend", "num_drafted_tokens", "true_ms"]
            )
            group = f"{context_len}/{verify}/{k}"
            frames.append(_sampled(arms, world, rng).assign(context_len=context_len, group=group))
    rows = pd.concat(frames, ignore_index=True)
    speculative = rows["arm"] == "speculative"
    return rows.assign(
        experiment="loop",
        run_id=world.run_id,
        origin="forced",
        status="ok",
        reason=None,
        quality="ok",
        gpu=world.gpu,
        target=world.target,
        drafter=pd.Series(world.drafter, index=rows.index).where(speculative, None),
        draft_backend=None,
        linear_backend="torch",
        num_speculative_tokens=np.where(speculative, k, np.nan),
        batch_size=world.batch_size,
        q_len=rows["num_drafted_tokens"] + 1,
        num_accepted_tokens=0,
        weight_dtype="float32",
        kv_dtype="float32",
        launch_mode="eager",
    )


def _sampled(arms: pd.DataFrame, world: CostWorld, rng: np.random.Generator) -> pd.DataFrame:
    noise, shape = world.noise, (world.num_rounds, len(arms), world.samples_per_round)
    logs = rng.normal(0, noise.sample, shape)
    for index in range(1, world.num_rounds):
        fresh = np.sqrt(1 - noise.autocorrelation**2)
        logs[index] = noise.autocorrelation * logs[index - 1] + fresh * logs[index]
    logs += rng.normal(0, noise.drift, (world.num_rounds, 1, 1)).cumsum(axis=0)
    spikes = np.where(rng.random(shape) < noise.spikes, rng.uniform(1.5, 4, shape), 1.0)
    times = arms["true_ms"].to_numpy()[None, :, None] * np.exp(logs) * spikes
    round_index, arm_index, sample = (index.ravel() for index in np.indices(shape))
    rows = arms.drop(columns="true_ms").iloc[arm_index].reset_index(drop=True)
    return rows.assign(round=round_index, sample=sample, step_ms=times.ravel())


@dataclass(frozen=True)
class AcceptanceWorld:
    """Prompts whose chance of keeping each further draft token is drawn from a Beta distribution.

    A prompt emits about `tokens_per_prompt` tokens, so texts that accept little take more steps. A step drafts k tokens
    with the chance `drafted_share`, otherwise none. `spread` is the sd of the chance of keeping between prompts, 0 for
    none; `share_spread` that of the chance of drafting, which goes with it (a lookup that finds more keeps more).
    """

    keep: float = 0.6
    spread: float = 0.15
    num_prompts: int = 16
    tokens_per_prompt: int = 128
    drafted_share: float = 1.0
    share_spread: float = 0.0
    num_speculative_tokens: int = 4
    target: str = "tiny"
    drafter: str = "ngram"
    workload: str = "prose"
    context_len_low: int = 0
    context_len_high: int = 1 << 20

    def with_(self, **changes: Any) -> "AcceptanceWorld":
        """A copy with some fields changed."""
        return replace(self, **changes)

    def chances(self, num_prompts: int, rng: np.random.Generator) -> np.ndarray:
        """Chance of keeping a draft token, per prompt."""
        if not self.spread:
            return np.full(num_prompts, self.keep)
        concentration = self.keep * (1 - self.keep) / self.spread**2 - 1
        return rng.beta(self.keep * concentration, (1 - self.keep) * concentration, num_prompts)

    def shares(self, chances: np.ndarray) -> np.ndarray:
        """Chance that a step drafts, per prompt; it rises with the chance of keeping."""
        slope = self.share_spread / self.spread if self.spread else 0.0
        return np.clip(self.drafted_share + slope * (chances - self.keep), 0.02, 1.0)

    def steps_and_length(self, chances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Verify steps and expected acceptance length of prompts with these chances."""
        kept = sum(chances**i for i in range(1, self.num_speculative_tokens + 1))
        length = 1 + self.shares(chances) * kept
        return np.maximum(1, np.round(self.tokens_per_prompt / length)), length

    def truth(self) -> tuple[float, float]:
        """Mean acceptance length and share of steps that draft, pooled over a very large number of prompts."""
        chances = self.chances(200_000, np.random.default_rng(1))
        steps, length = self.steps_and_length(chances)
        return tuple(float((steps * values).sum() / steps.sum()) for values in (length, self.shares(chances)))


def acceptance_rows(world: AcceptanceWorld, rng: np.random.Generator | None = None) -> pd.DataFrame:
    """One acceptance row per prompt."""
    rng = rng or np.random.default_rng(0)
    k = world.num_speculative_tokens
    chances = world.chances(world.num_prompts, rng)
    histograms = []
    for chance, share, steps in zip(chances, world.shares(chances), world.steps_and_length(chances)[0], strict=True):
        kept = chance ** np.arange(k + 1) * np.append(np.full(k, 1 - chance), 1.0)
        num_drafted = rng.binomial(int(steps), share)
        histogram = np.zeros((k + 1, k + 1), dtype=int)
        histogram[k] = rng.multinomial(num_drafted, kept)
        histogram[0, 0] = int(steps) - num_drafted
        histograms.append(AcceptanceCounts(tuple(map(tuple, histogram.tolist()))))
    return rows_of_counts(histograms, world)


def rows_of_counts(prompts: Sequence[AcceptanceCounts], world: AcceptanceWorld | None = None) -> pd.DataFrame:
    """One acceptance row per given set of counts, described as `world` says."""
    world = world or AcceptanceWorld()
    return pd.DataFrame(
        [
            {
                **counts.columns(),
                "run_id": "run-a",
                "experiment": "acceptance",
                "origin": "measured",
                "status": "ok",
                "gpu": "cpu",
                "target": world.target,
                "drafter": world.drafter,
                "workload": world.workload,
                "prompt_id": f"{world.workload}-{index}",
                "temperature": 0.0,
                "context_len_low": world.context_len_low,
                "context_len_high": world.context_len_high,
                "num_output_tokens": 1 + counts.num_verify_steps + counts.num_accepted_tokens,
                "weight_dtype": "float32",
                "kv_dtype": "float32",
            }
            for index, counts in enumerate(prompts)
        ]
    )


# As n-gram lookup on SmolLM2 in the committed runs: `spread_between_prompts`.
TYPICAL_TEXTS = AcceptanceWorld(spread=0.2, drafted_share=0.7, share_spread=0.2, tokens_per_prompt=256)


def spread_between_prompts(acceptance: pd.DataFrame, relative_costs: np.ndarray) -> tuple[float, float]:
    """Speed-up of acceptance rows, and the sd between prompts of what each adds to its log (the ratio's linear part).

    relative_costs : of steps with 0..k drafts.
    """
    histograms = prompt_histograms(acceptance)
    tokens = histograms.sum(axis=(1, 2)) + histograms.sum(axis=1) @ np.arange(len(relative_costs))
    costs = histograms.sum(axis=2) @ relative_costs
    return tokens.sum() / costs.sum(), float(np.std(tokens / tokens.mean() - costs / costs.mean(), ddof=1))


@dataclass(frozen=True)
class Calibration:
    """How intervals and verdicts did in many planted worlds: shares of worlds, 0..1."""

    covered: float
    cost_covered: float
    length_covered: float
    wrong: float
    decided_when_clear: float
    median_log_width: float


def calibrate(
    num_worlds: int,
    *,
    num_prompts: int = 16,
    num_rounds: int = 16,
    samples_per_round: int = 4,
    noise: Noise = TYPICAL_NOISE,
    texts: AcceptanceWorld = TYPICAL_TEXTS,
    resamples: int = 600,
    seed: int = 0,
) -> Calibration:
    """Plant `num_worlds` speed-ups between about 0.7 and 1.5 and judge them all in one call.

    Rounds and samples are those of the GPU preset of `labkit run loop`. A clear world has a speed-up at least 10% from
    1. A verdict is wrong when it says pays or loses of the other side.
    """
    rng = np.random.default_rng(seed)
    costs, acceptances, truths = [], [], {}
    base = texts.with_(num_prompts=num_prompts)
    length, share = base.truth()
    for index in range(num_worlds):
        name, slope = f"world-{index}", rng.uniform(0.05, 0.45)
        cost = CostWorld(
            lambda backend, _: {"sdpa": 1.0, "per_token": 1.04}[backend],
            lambda _, __, j, slope=slope: 1.1 + slope * j,
            decode_backends=("sdpa", "per_token"),
            num_rounds=num_rounds,
            samples_per_round=samples_per_round,
            noise=noise,
            target=name,
            run_id=name,
        )
        costs.append(cost_rows(cost, rng))
        acceptances.append(acceptance_rows(base.with_(target=name), rng))
        truths[name] = 1.1 + share * 4 * slope
    cells = breakeven(pd.concat(costs), pd.concat(acceptances), resamples=resamples).cells
    relative = cells["target"].map(truths)
    truth = length / relative
    decided = cells["verdict"].isin(("pays", "loses", "cannot_pay"))
    return Calibration(
        covered=truth.between(cells["speedup_low"], cells["speedup_high"]).mean(),
        cost_covered=relative.between(cells["relative_step_cost_low"], cells["relative_step_cost_high"]).mean(),
        length_covered=np.mean(
            (cells["mean_acceptance_length_low"] <= length) & (length <= cells["mean_acceptance_length_high"])
        ),
        wrong=(decided & ((cells["verdict"] == "pays") != (truth > 1))).mean(),
        decided_when_clear=decided[(truth - 1).abs() >= 0.1].mean(),
        median_log_width=np.log(cells["speedup_high"] / cells["speedup_low"]).median(),
    )


@dataclass(frozen=True)
class StepWorld:
    """Planted forwards of a target and an autoregressive drafter, in ms, as step rows without noise unless asked for.

    Weights cost `weights_ms`, one KV read of 1K tokens `kv_ms_per_1k`; verify reads the cache `reads(backend, q_len)`
    times. A draft forward costs `draft_ms`, plus `draft_reads` reads of the target's cache; no drafter: no draft rows.
    """

    reads: Callable[[str, int], float] = lambda _, __: 1.0
    backends: tuple[str, ...] = ("triton_split",)
    context_lens: tuple[int, ...] = (1024, 4096, 16384, 65536)
    batch_sizes: tuple[int, ...] = (1,)
    q_lens: tuple[int, ...] = (4, 8)
    drafter: str | None = "eagle3"
    weights_ms: float = 10.0
    kv_ms_per_1k: float = 0.05
    draft_ms: float = 0.4
    draft_reads: float = 0.0
    sampling_ms: float = 0.1
    num_rounds: int = 6
    noise: float = 0.0
    target: str = "qwen3-8b"
    gpu: str = "nvidia-h200"
    run_id: str = "run-s"

    def with_(self, **changes: Any) -> "StepWorld":
        """A copy with some fields changed."""
        return replace(self, **changes)


def step_rows(world: StepWorld, rng: np.random.Generator | None = None) -> pd.DataFrame:
    """Step rows: per batch and context decode and verify on every backend, and the drafter on the first."""
    rng = rng or np.random.default_rng(0)
    rows = []
    for batch_size, context_len in [(batch, context) for batch in world.batch_sizes for context in world.context_lens]:
        kv_ms = world.kv_ms_per_1k * context_len / 1024 * batch_size
        calls = [("decode", backend, 1, kv_ms * world.reads(backend, 1)) for backend in world.backends]
        calls += [("verify", name, q, kv_ms * world.reads(name, q)) for name in world.backends for q in world.q_lens]
        calls += [("draft", world.backends[0], 1, kv_ms * world.draft_reads)] if world.drafter else []
        for phase, backend, q_len, attention in calls:
            for index in range(world.num_rounds):
                rest = world.draft_ms if phase == "draft" else world.weights_ms
                factor = float(np.exp(rng.normal(0, world.noise)))
                call = {"phase": phase, "backend": backend, "q_len": q_len, "attention_ms": attention * factor}
                call |= {"round": index, "batch_size": batch_size, "context_len": float(context_len)}
                sampling = world.sampling_ms if phase != "draft" else np.nan  # part of the forward
                call |= {
                    "forward_ms": (rest + attention + np.nan_to_num(sampling)) * factor,
                    "sampling_ms": sampling * factor,
                }
                call |= {"drafter": world.drafter if phase == "draft" else None}
                rows.append(call | {"group": f"{batch_size}/{context_len}"})
    same = {
        "run_id": world.run_id,
        "gpu": world.gpu,
        "target": world.target,
        "experiment": "step",
        "origin": "measured",
    }
    same |= {"status": "ok", "quality": "ok", "weight_dtype": "bfloat16", "kv_dtype": "bfloat16", "num_gpus": 1}
    return pd.DataFrame(rows).assign(**same, linear_backend="torch", launch_mode="graph", gap_ms=np.nan, sample=0)
