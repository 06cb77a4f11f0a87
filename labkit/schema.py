"""The columns of stored rows. `data/README.md` and `labkit check` are made from these tables.

Rows are long form, one per sample. A missing value is null, never 0, "" or NaN. Counts are stored, ratios are
not.
"""

import functools
from dataclasses import dataclass

import pyarrow as pa

from labkit.errors import InputError

SCHEMA_VERSION = 1

STATUSES = ("ok", "unsupported", "oom", "wrong", "timeout", "crashed", "error", "skipped")
FINAL_STATUSES = ("ok", "unsupported", "oom", "wrong")  # measuring such a point again would tell nothing new
ORIGINS = ("measured", "imported", "forced", "modelled", "interpolated", "transferred", "published", "cited")
ORIGIN_ALIASES = {"synthetic": "forced", "simulated": "forced"}

TEXT, COUNT, REAL = pa.string(), pa.int64(), pa.float64()
SERIES, HISTOGRAM, LIST = pa.list_(REAL), pa.list_(pa.list_(COUNT)), pa.list_(COUNT)


@dataclass(frozen=True)
class Column:
    """One column. ``nullable=False``: set in every row with status ok (a failed row has no results)."""

    name: str
    type: pa.DataType
    unit: str
    meaning: str
    nullable: bool = False
    choices: tuple[str, ...] = ()


def _text(name: str, meaning: str, choices: tuple[str, ...] = (), nullable: bool = False) -> Column:
    return Column(name, TEXT, "", meaning, nullable, choices)


def _count(name: str, unit: str, meaning: str, nullable: bool = False) -> Column:
    return Column(name, COUNT, unit, meaning, nullable)


def _real(name: str, unit: str, meaning: str, nullable: bool = False) -> Column:
    return Column(name, REAL, unit, meaning, nullable)


def _series(name: str, unit: str, meaning: str) -> Column:
    return Column(name, SERIES, unit, meaning, True)


def _may_be_null(column: Column) -> Column:
    return Column(column.name, column.type, column.unit, column.meaning, True, column.choices)


# Set in every row, failed or not.
IDENTITY = ("run_id", "experiment", "origin", "status", "gpu", "point_key", "group")

COMMON = (
    _text("run_id", "one immutable run, `<utc yyyymmddThhmmssZ>-<6 hex>`; no ratio crosses run_ids"),
    _text("experiment", "the data set: attention, step, acceptance, loop, replay"),
    _text(
        "origin",
        "where the number comes from; forced = acceptance was imposed, the times are real",
        ORIGINS,
    ),
    _text("status", "ok, or how the point failed; a failed point is one row without samples", STATUSES),
    _text("reason", "why the status is not ok, in one line", nullable=True),
    _text("quality", "ok, or why the samples are doubtful; null: not judged", nullable=True),
    _text("group", "what was interleaved together; pairs are (run_id, group, round)"),
    _count("round", "", "the round inside the group; intervals resample rounds", nullable=True),
    _count("sample", "", "index of the sample, within its round when there are rounds", nullable=True),
    _text("gpu", "slug of the device (`nvidia-h200`, `cpu-amd-epyc`)"),
    _text("point_key", "every parameter of the point and the digest of its backend"),
)

_BATCH_SIZE = _count("batch_size", "requests", "requests in one call")
_Q_LEN = _count("q_len", "tokens", "query tokens per request in one call; k+1 when a chain is verified")
_CONTEXT_LEN = _real(
    "context_len", "tokens", "tokens in the cache before the step (the join key); mean over the requests"
)
_TARGET = _text("target", "the model that verifies; a local folder as its name and a digest, `name@1a2b3c4d`")
_DRAFTER = _text("drafter", "who proposes the draft tokens; null without one", nullable=True)
_K = _count("num_speculative_tokens", "tokens", "drafts asked for per verify step, the root not counted (k)", True)
_LINEAR_BACKEND = _text("linear_backend", "what runs the linear layers", nullable=True)
_WEIGHT_DTYPE = _text("weight_dtype", "dtype of the target's weights")
_KV_DTYPE = _text("kv_dtype", "dtype of the KV cache")
_LAUNCH_MODE = _text("launch_mode", "how the kernels were launched", ("eager", "graph"))
_WORKLOAD = _text("workload", "the kind of text", nullable=True)
_PROMPT_ID = _text("prompt_id", "the prompt in its workload", nullable=True)
_GAP_MS = _real("gap_ms", "ms", "wall time of the step minus its timed parts, of one clock pair", True)
_DRAFTED = _count("num_drafted_tokens", "tokens", "draft tokens proposed (D)")
_ACCEPTED = _count("num_accepted_tokens", "tokens", "draft tokens kept before the first rejection, no bonus (A)")

_ATTENTION = (
    _text("backend", "who computes the attention"),
    _text("variant", "setting of the backend that is under test", nullable=True),
    _text("backend_digest", "digest of the backend's source, knobs and compiler", nullable=True),
    _text("resolved_kernel", "the kernel that really ran", nullable=True),
    _text("diagnosis", "what explains the time (unsplit, KV read once per query token, ...)", nullable=True),
    _text("phase", "what the call is for", ("decode", "verify", "draft", "draft_extend", "prefill")),
    _BATCH_SIZE,
    _Q_LEN,
    _CONTEXT_LEN,
    _count("context_len_max", "tokens", "longest context of the batch"),
    _count("num_qo_heads", "heads", "query heads"),
    _count("num_kv_heads", "heads", "key and value heads"),
    _count("head_dim", "elements", "size of one head"),
    _count("page_size", "tokens", "tokens per page of the cache"),
    _text("page_order", "where the pages of a request lie", ("sequential", "permuted")),
    _text("q_dtype", "dtype of queries and output"),
    _KV_DTYPE,
    _text("mask", "the mask; causal is lower-right aligned", ("causal", "window", "tree", "none"), nullable=True),
    _count("window", "tokens", "sliding window; null: none", nullable=True),
    _count("shared_prefix_len", "tokens", "context that all requests share; null: none", nullable=True),
    _LAUNCH_MODE,
    _text("l2_state", "whether the last-level cache was displaced before each sample", ("cold", "warm")),
    _count(
        "bytes_touched",
        "bytes",
        "distinct bytes touched from sample to sample, displacement included; warm below the cache size",
        nullable=True,
    ),
    _real("attention_ms", "ms", "one call, metadata not included"),
    _real("plan_ms", "ms", "making the metadata, once per step; not in attention_ms", nullable=True),
    _count("kv_bytes_read", "bytes", "keys and values of the call, each byte counted once", nullable=True),
    _real("gb_per_s", "1e9 B/s", "key and value bytes, each once, / attention_ms", nullable=True),
    _count("num_programs", "count", "programs (thread blocks) launched", nullable=True),
    _count("num_splits", "count", "parts the keys of one request are split into", nullable=True),
    _real("kv_passes", "count", "times one call brings each key and value to a processor", nullable=True),
    _real("tile_us", "us", "serial time of one block per 64-key tile (unsplit kernels)", nullable=True),
    _count("workspace_bytes", "bytes", "scratch memory of the backend", nullable=True),
    _real("error", "share", "max abs(out - ref) / max abs(ref) on the timed inputs", nullable=True),
    _text("verified_at", "UTC time of the comparison with the oracle", nullable=True),
    _real("sm_clock_mhz", "MHz", "clock of the device beside the sample", nullable=True),
    _real("power_w", "W", "power of the device beside the sample", nullable=True),
)

_STEP = (
    _TARGET,
    _DRAFTER,
    _text("phase", "which forward this is", ("decode", "verify", "draft", "draft_extend", "prefill")),
    _text("backend", "who computes the attention"),
    _LINEAR_BACKEND,
    _BATCH_SIZE,
    _Q_LEN,
    _CONTEXT_LEN,
    _WEIGHT_DTYPE,
    _KV_DTYPE,
    _count("shared_prefix_len", "tokens", "context that all requests share; null: none", nullable=True),
    _count("num_gpus", "count", "devices the step ran on; null on the CPU", nullable=True),
    _LAUNCH_MODE,
    _real("forward_ms", "ms", "device time of one model forward, sampling included"),
    _real("attention_ms", "ms", "attention of all layers", nullable=True),
    _real("linear_ms", "ms", "linear layers", nullable=True),
    _real("other_ms", "ms", "norms, activations, embeddings", nullable=True),
    _real("sampling_ms", "ms", "from logits to tokens; in forward_ms", nullable=True),
    _real("communication_ms", "ms", "between devices", nullable=True),
    _real("gap_ms", "ms", "no kernel ran: between the first and the last of the forward", nullable=True),
    _count("weight_bytes_read", "bytes", "weights of one forward, each byte counted once", nullable=True),
    _count("kv_bytes_read", "bytes", "keys and values of one forward, each byte counted once", nullable=True),
    _count("state_bytes", "bytes", "states of gated-delta layers, read once and written once per token", nullable=True),
    _count("peak_memory_bytes", "bytes", "most device memory in use", nullable=True),
    _real("energy_j", "J", "counter difference over num_steps steps, at least 2 s", nullable=True),
    _count("num_steps", "count", "steps in the energy window", nullable=True),
)

_ACCEPTANCE = (
    _TARGET,
    Column("drafter", TEXT, "", "who proposes the draft tokens"),
    Column(_K.name, COUNT, _K.unit, _K.meaning),
    _count("draft_depth", "tokens", "depth of the draft tree; null: a chain", nullable=True),
    _count("num_draft_nodes", "tokens", "nodes of the draft tree; null: a chain", nullable=True),
    Column("workload", TEXT, "", _WORKLOAD.meaning),
    Column("prompt_id", TEXT, "", _PROMPT_ID.meaning),
    _real("temperature", "", "of the target; 0 = greedy"),
    _real("top_p", "share", "nucleus of the target; null: off", nullable=True),
    _count("seed", "", "of the sampling"),
    _count("context_len_low", "tokens", "lower limit of the context band, included"),
    _count("context_len_high", "tokens", "upper limit of the context band, excluded"),
    _count("num_verify_steps", "steps", "target passes, those without a draft included, the prefill token not"),
    _count(
        "num_truncated_steps",
        "steps",
        "steps cut by a stop token, or with room for fewer than k drafts (length limit); not in num_verify_steps",
    ),
    _count("num_drafted_steps", "steps", "verify steps with at least one draft token"),
    _DRAFTED,
    _ACCEPTED,
    _count("num_output_tokens", "tokens", "tokens generated"),
    Column(
        "accepted_by_draft_length",
        HISTOGRAM,
        "steps",
        "[k+1][k+1]: row = draft length, column = accepted; truncated steps not in it",
    ),
    _count("num_prompt_tokens", "tokens", "length of the prompt"),
    _real("context_len", "tokens", "mean over the verify steps"),
    _text("prompt_digest", "digest of the messages that were sent, filler included"),
    _WEIGHT_DTYPE,
    _KV_DTYPE,
    _text("verify_backend", "attention of the verify step"),
    _real("repeated_ngram_share", "share", "share of the output's n-grams that occurred before", nullable=True),
    _count("answer_correct", "", "1: the output ends in the prompt's answer; null: it has none", nullable=True),
    Column(
        "match_lengths",
        LIST,
        "tokens",
        "drafts that would be kept behind each output token but the last, at the largest k; null elsewhere",
        nullable=True,
    ),
)

_LOOP = (
    _TARGET,
    _DRAFTER,
    _K,
    _text("verify_backend", "attention of the verify step; null in the plain arm", nullable=True),
    _text("decode_backend", "attention of the plain step; null in the speculative arm", nullable=True),
    _text("draft_backend", "attention of the drafter; null without a draft model", nullable=True),
    _LINEAR_BACKEND,
    _text("arm", "a speculative step or a plain decode step", ("speculative", "plain")),
    _BATCH_SIZE,
    _CONTEXT_LEN,
    _count("step_index", "", "index of the step in its generation", nullable=True),
    _Q_LEN,
    _real("draft_ms", "ms", "proposing the draft tokens", nullable=True),
    _real("verify_ms", "ms", "the target's forward", nullable=True),
    _real("accept_ms", "ms", "from logits to kept tokens", nullable=True),
    _GAP_MS,
    _real("step_ms", "ms", "wall time of the whole step; of the plain arm: decode_ms"),
    _real("draft_prefill_ms", "ms", "the drafter reading the prompt, once per request", nullable=True),
    _WEIGHT_DTYPE,
    _KV_DTYPE,
    _WORKLOAD,
    _PROMPT_ID,
    _DRAFTED,
    _may_be_null(_ACCEPTED),
    _LAUNCH_MODE,
)

# What can go wrong with one request. The last three complete, with contents that do not fit.
FAULTS = (
    *("connection", "timeout", "http_429", "http_4xx", "http_5xx", "cut_stream", "malformed_event", "error_event"),
    *("wrong_usage", "duplicate_event", "wrong_length"),
)

_REPLAY = (
    _text(
        "record", "one request, counters between two scrapes, or steps of one window", ("request", "counters", "steps")
    ),
    _text("engine", "who serves, as far as it tells", nullable=True),
    _text("engine_version", "its version, as far as it tells", nullable=True),
    _text("endpoint", "the arm: the name given to a server or an engine setting"),
    _text("launch", "one start of the server; requests of one launch share what differs from start to start"),
    _text("scene", "the kind of load"),
    _WORKLOAD,
    _PROMPT_ID,
    _text("request_digest", "SHA-256 of the bytes that were sent, first 16 hex digits", nullable=True),
    _text(
        "stage",
        "first: the first request of a scene, one at a time; neither it nor warm-up is compared",
        ("warm_up", "first", "measured"),
    ),
    _count("turn", "", "turn of a conversation, from 0", nullable=True),
    _count("concurrency", "requests", "requests kept in flight (closed loop)"),
    _count("batch_size", "requests", "requests in one engine step, where that is known", nullable=True),
    _TARGET,
    _DRAFTER,
    _K,
    _text("arm", "whether the engine speculates, where that is known", ("speculative", "plain"), nullable=True),
    _text("verify_backend", "attention of the verify step, by the engine's name", nullable=True),
    _text("decode_backend", "attention of the plain step, by the engine's name", nullable=True),
    _may_be_null(_WEIGHT_DTYPE),
    _may_be_null(_KV_DTYPE),
    _may_be_null(_CONTEXT_LEN),
    _text("fault", "what went wrong with the request; null: nothing", FAULTS, nullable=True),
    _count("http_status", "", "status of the last answer", nullable=True),
    _count("num_attempts", "count", "times the request was sent", nullable=True),
    _count("num_prompt_tokens", "tokens", "prompt, as the engine counts it", nullable=True),
    _count("num_cached_tokens", "tokens", "of it, taken from the prefix cache; null: not reported", nullable=True),
    _count("num_output_tokens", "tokens", "generated tokens, as the engine counts them", nullable=True),
    _count("num_chunks", "count", "stream events that held text", nullable=True),
    _real("ttft_ms", "ms", "from sending to the first event with text", nullable=True),
    _real("duration_ms", "ms", "from sending to the end of the answer", nullable=True),
    _series("chunk_ms", "ms", "arrival of each event with text, from sending"),
    _series("chunk_sizes", "characters", "length of the text of each such event"),
    _real("engine_prefill_ms", "ms", "prefill time that the engine tells", nullable=True),
    _real("engine_decode_ms", "ms", "decode time that the engine tells", nullable=True),
    _count(
        "num_verify_steps",
        "steps",
        "target passes per request, those without a draft included; where not counted: tokens - accepted - requests",
        nullable=True,
    ),
    _count("num_drafted_steps", "steps", "verify steps with at least one draft token", nullable=True),
    _may_be_null(_DRAFTED),
    _may_be_null(_ACCEPTED),
    _series("accepted_per_pos", "tokens", "accepted drafts at each position; counts"),
    _count("num_steps", "steps", "engine steps in step_times_ms", nullable=True),
    _series("step_times_ms", "ms", "wall time of each engine step of the window"),
    _real("draft_ms", "ms", "proposing drafts, per engine step, on the host", nullable=True),
    _real(
        "device_busy_ms", "ms", "device time per engine step, of a profiled window beside the timed ones", nullable=True
    ),
    _real("attention_busy_ms", "ms", "attention kernels in device_busy_ms", nullable=True),
    _text("resolved_kernel", "attention kernels that really ran", nullable=True),
    _real("energy_j", "J", "energy of the device from the first request to the last, at least 2 s", nullable=True),
    _real("sm_clock_mhz", "MHz", "clock of the device beside the window", nullable=True),
    _real("power_w", "W", "power of the device beside the window", nullable=True),
    _text("finish_reason", "why the engine ended the answer", nullable=True),
    _text("answer", "of a request whose answer is known", ("right", "wrong", "none"), nullable=True),
    _text("output_digest", "SHA-256 of the text, first 16 hex digits", nullable=True),
    _text("output_text", "the text", nullable=True),
)

EXPERIMENTS: dict[str, tuple[Column, ...]] = {
    "attention": COMMON + _ATTENTION,
    "step": COMMON + _STEP,
    "acceptance": COMMON + _ACCEPTANCE,
    "loop": COMMON + _LOOP,
    "replay": COMMON + _REPLAY,
}

# Two ok rows of one run must differ in one of these; else a sample was stored twice.
SAMPLE_KEYS: dict[str, tuple[str, ...]] = {
    "attention": (
        "point_key",
        "group",
        "backend",
        "variant",
        "phase",
        "q_len",
        "context_len",
        "round",
        "sample",
    ),
    "step": (
        "point_key",
        "group",
        "phase",
        "drafter",
        "backend",
        "q_len",
        "batch_size",
        "context_len",
        "round",
        "sample",
    ),
    "acceptance": (
        "point_key",
        "group",
        "workload",
        "prompt_id",
        "num_speculative_tokens",
        "context_len_low",
        "sample",
    ),
    "loop": (
        *("point_key", "group", "arm", "decode_backend", "verify_backend", "drafter", "num_drafted_tokens"),
        *("prompt_id", "step_index", "round", "sample"),
    ),
    "replay": ("point_key", "group", "record", "round", "sample"),
}


def columns(experiment: str) -> tuple[Column, ...]:
    """The columns of an experiment.

    Raises InputError: unknown experiment.
    """
    if experiment not in EXPERIMENTS:
        raise InputError(f"experiment: wanted one of {', '.join(EXPERIMENTS)}, got {experiment!r}")
    return EXPERIMENTS[experiment]


@functools.cache
def arrow_schema(experiment: str) -> pa.Schema:
    """The Arrow schema of an experiment; only the identity columns are declared not null."""
    return pa.schema([pa.field(c.name, c.type, c.name not in IDENTITY) for c in columns(experiment)])


def dictionary() -> str:
    """The data dictionary as Markdown: one table for the common columns, one per experiment."""
    tables = {"Every row": COMMON} | {name: cols[len(COMMON) :] for name, cols in EXPERIMENTS.items()}
    lines = []
    for title, table in tables.items():
        lines += [f"### {title}", "", "| column | type | unit | null | meaning |", "|---|---|---|---|---|"]
        for c in table:
            meaning = c.meaning + (f" ({', '.join(c.choices)})" if c.choices else "")
            null = "yes" if c.nullable else ("never" if c.name in IDENTITY else "if not ok")
            lines.append(f"| `{c.name}` | {c.type} | {c.unit} | {null} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(dictionary())
