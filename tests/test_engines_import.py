"""The importer: one run of 200 steps, k = 3, 600 drafts, 360 accepted, in the form of every engine and tool."""

import contextlib
import gzip
import io
import json
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from labkit.cli import main
from labkit.engines.importing import Reader, import_files
from labkit.engines.reading import Input, clean
from labkit.engines.tables import formats, pairs
from labkit.errors import InputError

SG = "#token: 5120, token usage: 0.02, accept len: 2.80"
TAIL = "gen throughput (token/s): 410.20, #queue-req: 0"
GRAPH = "cuda graph: True, "
V1 = "Accepted: 360 tokens, Drafted: 600 tokens, Per-position acceptance rate: 0.800, 0.600, 0.400"
COMPANION = (
    "INFO 05-08 10:00:00 [loggers.py:257] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: "
    "56.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 7.4%, Prefix cache hit rate: 0.0%\n"
)
LATER = "Mean acceptance length: 2.80, Accepted throughput: 36.00 tokens/s, Drafted throughput: 60.00 tokens/s, "
TRT = {
    "engine": {"model": "m", "version": "1.2"},
    "request_info": {"num_requests": 8, "avg_num_concurrent_requests": 4.0},
    "performance": {"system_output_throughput_tok_s": 400.0},
    "decoding_stats": {"acceptance_length_percentiles": {"average": 2.8}},
}
BENCH = {
    "mean_e2e_latency_ms": 900.0,
    "total_output_tokens": 560,
    "output_throughput": 56.0,
    "concurrency": 1.0,
    "accept_length": 2.8,
}
SERVE = {
    "model_id": "m",
    "duration": 10.0,
    "output_throughput": 56.0,
    "total_token_throughput": 60.0,
    "spec_decode_acceptance_rate": 60.0,
    "spec_decode_acceptance_length": 2.8,
    "spec_decode_num_drafts": 200,
    "spec_decode_draft_tokens": 600,
    "spec_decode_accepted_tokens": 360,
    "spec_decode_per_position_acceptance_rates": [0.8, 0.6, 0.4],
}
CONSOLE = """============ Serving Benchmark Result ============
Successful requests:                     1
Output token throughput (tok/s):         56.00
---------------Speculative Decoding---------------
Acceptance rate (%):                     60.00
Acceptance length:                       2.80
Drafts:                                  200
Draft tokens:                            600
Accepted tokens:                         360
Per-position acceptance (%):
  Position 0:                            80.00
  Position 1:                            60.00
  Position 2:                            40.00
==================================================
"""
HISTOGRAM = {
    "acceptance_histogram": [40, 40, 40, 80],
    "num_spec_steps": 200,
    "num_accepted_draft_tokens": 360,
    "num_draft_tokens": 600,
    "num_spec_tokens": 3,
}
PREVIEW = {"0": 40, "1": 40, "2": 40, "3": 80}
GUIDE = {"metrics": {"inter_token_latency_ms": {"successful": {"mean": 17.9}}}}
GUIDE["metrics"]["output_tokens_per_iteration"] = {"successful": {"mean": 2.8}}
AIPERF = {
    "output_token_throughput": {"avg": 56.0},
    "inter_token_latency": {"avg": 17.9},
    "token_weighted_acceptance_length": {"avg": 2.8},
    "acceptance_length": {"avg": 2.9},
}
FULL = {"mean_acceptance_length": 2.8, "draft_acceptance_rate": 0.6, "num_speculative_tokens": 3}
COUNTED = FULL | {"num_drafted_tokens": 600, "num_accepted_tokens": 360}
DRAFTED = COUNTED | {"num_drafted_steps": 200}
POSITIONS = {"acceptance_rate_per_pos": [0.8, 0.6, 0.4]}
STEP = {"step_ms": pytest.approx(4 * 2.8 / 410.2 * 1000), "step_ms_source": "derived", "context_len": 1280.0}
# name -> (text, fields of the last record)
FORMS = {
    "sglang early 2025": (
        f"[2025-02-03 10:00:00 TP0] Decode batch. #running-req: 4, {SG}, gen throughput (token/s): 410.20, "
        "largest-len: 0, #queue-req: 0,",
        STEP | {"mean_acceptance_length": 2.8, "batch_size": 4.0, "cuda_graph": None, "scope": "window"},
    ),
    "sglang summer 2025": (
        f"[2025-06-03 10:00:00 DP1 TP1] Decode batch. #running-req: 4, {SG}, {GRAPH}{TAIL}",
        STEP | {"cuda_graph": True, "draft_acceptance_rate": None, "num_speculative_tokens": None},
    ),
    "sglang old rate": (
        f"[2025-12-03 10:00:00] Decode batch, #running-req: 4, {SG}, accept rate: 0.70, {GRAPH}{TAIL}",
        FULL | STEP,
    ),
    "sglang strict rate": (
        f"[2026-06-03 10:00:00] Decode batch [7], #running-req: 4, {SG}, accept rate: 0.60, {GRAPH}{TAIL}",
        FULL | STEP,
    ),
    "sglang plain": (
        f"[2026-06-03 10:00:00] Decode batch, #running-req: 4, #token: 5120, {GRAPH}{TAIL}",
        {"mean_acceptance_length": 1.0, "step_ms": pytest.approx(4 / 410.2 * 1000)},
    ),
    "sglang hybrid model": (
        f"[2026-06-03 10:00:00] Decode batch, #running-req: 4, #full token: 5120, full token usage: 0.02, #swa token: "
        f"9, swa token usage: 0.01, accept len: 2.80, {GRAPH}{TAIL}",
        STEP,
    ),
    "sglang meta_info": (
        '{"meta_info": {"spec_accept_rate":0.6,"spec_accept_length":2.805,"spec_num_correct_drafts":360,'
        '"spec_num_proposed_drafts":600,"spec_verify_ct":200,"spec_correct_drafts_histogram":[40,40,40,80],'
        '"completion_tokens":561}}',
        COUNTED | POSITIONS | {"num_verify_steps": 200, "scope": "request", "zero_draft_steps": "counted"},
    ),
    "sglang meta_info, first names": (
        '{"spec_accept_token_num":360,"spec_draft_token_num":600,"spec_verify_ct":200,"completion_tokens":561}',
        COUNTED,
    ),
    "sglang meta_info, second names": (
        '{"spec_accepted_drafts":360,"spec_proposed_drafts":600,"spec_verify_ct":200,"completion_tokens":561}',
        COUNTED,
    ),
    "sglang bench_serving": (json.dumps(BENCH), {"mean_acceptance_length": 2.8, "batch_size": 1.0, "scope": "run"}),
    "sglang bench_one_batch": (
        '{"run_name":"x","batch_size":4,"input_len":512,"output_len":64,"median_decode_latency":0.00975}',
        {"step_ms": 9.75, "step_ms_source": "printed", "mean_acceptance_length": 1.0, "batch_size": 4.0},
    ),
    "sglang server_info": (
        json.dumps({"version": "0.5.21", "internal_states": [{"avg_spec_accept_length": 2.8}]}),
        {"mean_acceptance_length": 2.8, "engine_version": "0.5.21", "scope": "since_start"},
    ),
    "sglang metrics": (
        'sglang:spec_accept_length{model_name="m",tp_rank="0"} 2.8\nsglang:num_running_reqs{model_name="m"} 4.0\n'
        'sglang:gen_throughput{model_name="m"} 410.2\n',
        {"mean_acceptance_length": 2.8, "batch_size": 4.0, "model": "m"},
    ),
    "vllm V0": (
        "INFO 08-20 10:00:00 metrics.py:427] Speculative metrics: Draft acceptance rate: 0.700, System efficiency: "
        "0.700, Number of speculative tokens: 3, Number of accepted tokens: 420, Number of draft tokens: 600, "
        "Number of emitted tokens: 560.",
        DRAFTED | {"scope": "since_start", "zero_draft_steps": "excluded", "num_verify_steps": None},
    ),
    "vllm 0.8": (
        "INFO 04-10 10:00:00 [metrics.py:86] SpecDecoding metrics: Draft acceptance rate: 60.0%, "
        f"Mean acceptance length: 1.80, {V1}",
        DRAFTED | POSITIONS,
    ),
    "vllm 0.8, first form": (
        "INFO 04-01 10:00:00 [metrics.py:72] SpecDecoding metrics: Draft acceptance rate: 60.0%, "
        "Accepted: 360 tokens, Drafted: 600 tokens",
        {"draft_acceptance_rate": 0.6, "mean_acceptance_length": None, "num_accepted_tokens": 360}
        | {"warnings": ["no acceptance length and no steps in the line (vLLM 0.8): only the rate is known"]},
    ),
    "vllm 0.9": (
        "INFO 06-10 10:00:00 [metrics.py:86] SpecDecoding metrics: Draft acceptance rate: 60.0%, "
        f"Mean acceptance length: 2.80, {V1}",
        DRAFTED | POSITIONS,
    ),
    "vllm later, with its throughput line": (
        f"{COMPANION}(APIServer pid=1) INFO 05-08 10:00:00 [metrics.py:101] SpecDecoding metrics: {LATER}{V1}, "
        "Avg Draft acceptance rate: 60.0%",
        DRAFTED | {"batch_size": 1.0, "output_tokens_per_s": 56.0, "step_ms": pytest.approx(50.0)}
        | {"time": "05-08 10:00:00", "num_verify_steps": 200, "zero_draft_steps": "counted", "prefill_mixed": False},
    ),
    "vllm request": (json.dumps({"metrics": {"speculative_decoding": HISTOGRAM}}), DRAFTED | POSITIONS),
    "vllm request, preview": (
        json.dumps({"choices": [{"speculative_decoding_stats": HISTOGRAM | {"acceptance_histogram": PREVIEW}}]}),
        DRAFTED | POSITIONS,
    ),
    "vllm bench serve": (json.dumps(SERVE, indent=2), DRAFTED | POSITIONS | {"output_tokens_per_s": 56.0}),
    "vllm bench serve console": (CONSOLE, DRAFTED | POSITIONS | {"output_tokens_per_s": 56.0}),
    "sglang bench_serving console": (
        "============ Serving Benchmark Result ============\nBackend:                                 sglang\n"
        "Output token throughput (tok/s):         56.00\nConcurrency:                             1.00\n"
        "Accept length:                           2.80\n==================================================\n",
        {"mean_acceptance_length": 2.8, "batch_size": 1.0, "engine": "sglang"},
    ),
    "sglang bench_serving console, plain": (
        "============ Serving Benchmark Result ============\nBackend:                                 sglang\n"
        "Output token throughput (tok/s):         56.00\n==================================================\n",
        {"mean_acceptance_length": None, "output_tokens_per_s": 56.0, "engine": "sglang"},
    ),
    "vllm offline script": (
        "total_num_output_tokens: 561\nnum_drafts: 200\nnum_draft_tokens: 600\nnum_accepted_tokens: 360\n"
        "mean acceptance length: 2.80\nacceptance at token 0: 0.80\nacceptance at token 1: 0.60\n"
        "acceptance at token 2: 0.40\n",
        DRAFTED | POSITIONS,
    ),
    "llama.cpp timings": (
        '{"timings":{"cache_n":0,"prompt_n":512,"prompt_ms":400.0,"predicted_n":561,"predicted_ms":10020.0,'
        '"predicted_per_second":55.99,"draft_n":600,"draft_n_accepted":360}}',
        {"mean_acceptance_length": 2.8, "num_verify_steps": 200, "step_ms": pytest.approx(50.1), "context_len": 792.5},
    ),
    "llama.cpp slot, old": (
        "prompt eval time =     400.00 ms /   512 tokens (    0.78 ms per token)\n"
        "       eval time =   10020.00 ms /   561 tokens (   17.86 ms per token,    55.99 tokens per second)\n"
        "draft acceptance rate = 0.60000 (  360 accepted /   600 generated)",
        {"mean_acceptance_length": 2.8, "num_verify_steps": 200, "context_len": 792.5},
    ),
    "llama.cpp slot on the draft line only": (
        "prompt eval time =     400.00 ms /   512 tokens (    0.78 ms per token)\n"
        "       eval time =   10020.00 ms /   561 tokens (   17.86 ms per token,    55.99 tokens per second)\n"
        "slot print_timing: id  0 | task 0 | draft acceptance rate = 0.60000 (  360 accepted /   600 generated)",
        {"mean_acceptance_length": 2.8, "num_verify_steps": 200, "context_len": 792.5},
    ),
    "llama.cpp slot, new": (
        "slot print_timing: id  0 | task 7 | draft acceptance = 0.60000 (  360 accepted /   600 generated), mean "
        "acceptance length =  2.80, acceptance rate per position = (0.800, 0.600, 0.400)",
        FULL | POSITIONS | {"scope": "request"},
    ),
    "llama.cpp statistics": (
        "statistics draft-mtp: #calls(b,g,a) = 1 200 200, #gen drafts = 200, #acc drafts = 160, #gen tokens = 600, "
        "#acc tokens = 360, #mean acc len = 2.80, #acc rate/pos = (0.800, 0.600, 0.400), "
        "dur(b,g,a) = 0.005, 1300.000, 0.200 ms",
        DRAFTED | POSITIONS | {"scope": "since_start"},
    ),
    "llama.cpp metrics": (
        "llamacpp:spec_decode_num_drafts_total 200\nllamacpp:spec_decode_num_draft_tokens_total 600\n"
        "llamacpp:spec_decode_num_accepted_tokens_total 360\n",
        DRAFTED,
    ),
    "llama-speculative": (
        "n_draft   = 3\nn_predict = 560\nn_drafted = 600\nn_accept  = 360\naccept    = 60.000%\n",
        COUNTED | {"num_verify_steps": 200},
    ),
    "llama-bench tg": ("| llama | 4 GiB | 7 B | CUDA | 99 | tg128 @ d8192 | 50.00 ± 0.20 |", {"step_ms": 20.0}),
    "llama-bench pp": ("| llama | 4 GiB | 7 B | CUDA | 99 | pp4 @ d8192 | 50.00 ± 0.20 |", {"step_ms": 80.0}),
    "sweep-bench": ("| 512 | 128 | 4096 | 0.4 | 1280.0 | 2.0 | 64.0 |", {"step_ms": 15.625, "context_len": 4160.0}),
    "batched-bench": (
        "| 512 | 128 | 4 | 2560 | 0.4 | 5120.0 | 2.0 | 256.0 | 2.4 | 1066.7 |",
        {"step_ms": 15.625, "batch_size": 4.0},
    ),
    "spec-bench": (
        "| code | 1 | mtp | 561 | eog | 10.020 | 55.99 | 200 | 360/600 | 60.00% | 2.80 | 80.0% 60.0% 40.0% |",
        DRAFTED | POSITIONS,
    ),
    "trtllm-bench": (json.dumps(TRT), {"mean_acceptance_length": 2.8, "engine_version": "1.2", "batch_size": 4.0}),
    "trtllm-bench console": ("[DT] AVERAGE: 600\n[AL] AVERAGE: 2.80\n", {"mean_acceptance_length": 2.8}),
    "trtllm iteration": (
        '{"iterLatencyMS": 50.0, "specDecodingStats": {"numDraftTokens": 3, "numAcceptedTokens": 2, '
        '"acceptanceLength": 3.0, "numRequestsWithDraftTokens": 1}}',
        {"mean_acceptance_length": 3.0, "step_ms": 50.0, "step_ms_source": "printed", "num_drafted_tokens": 3},
    ),
    "trtllm metrics": (
        'trtllm_spec_decode_num_draft_tokens_total{model_name="m"} 600\n'
        'trtllm_spec_decode_num_accepted_tokens_total{model_name="m"} 360\n'
        'trtllm_spec_decode_acceptance_length{model_name="m"} 2.8\n',
        {"draft_acceptance_rate": 0.6, "mean_acceptance_length": 2.8, "num_drafted_tokens": 600},
    ),
    "aiperf": (json.dumps(AIPERF), {"mean_acceptance_length": 2.8, "output_tokens_per_s": 56.0, "engine": "aiperf"}),
    "guidellm": (json.dumps({"benchmarks": [GUIDE]}), {"mean_acceptance_length": None, "engine": "guidellm"}),
    "trtllm request": (
        '{"acceptance_rate": 0.6, "total_accepted_draft_tokens": 360, "total_draft_tokens": 600}',
        {"draft_acceptance_rate": 0.6, "mean_acceptance_length": None, "scope": "request"},
    ),
    "specforge": (
        '{"average_acceptance_length": 2.9, "output_tokens": 560, "spec_verify_count": 200}',
        {"mean_acceptance_length": 2.8, "num_verify_steps": 200},
    ),
    "mlx-vlm": (
        '{"timings": {"draft_rounds": 200, "draft_n": 600, "draft_n_accepted": 360, "predicted_per_second": 56.0}}',
        DRAFTED,
    ),
    "sglang, prefill and decode split, hybrid model, all meters": (
        "[2026-06-03 10:00:00 DP1 TP0 EP0] Decode batch, #running-req: 4, #full token: 5120, full token usage: 0.02, "
        "mamba num: 4, mamba usage: 0.01, accept len: 2.80, accept rate: 0.60, pre-allocated usage: 0.03, "
        f"#prealloc-req: 1, #transfer-req: 0, #retracted-req: 0, npu graph: True, {TAIL}, est. decode TFLOPS/s (per "
        "GPU): 12.50, est. read BW (GB/s per GPU): 2100.00, est. write BW (GB/s per GPU): 12.00, fwd occupancy: 93%",
        FULL | STEP | {"cuda_graph": True, "read_gb_per_s": 2100.0, "forward_occupancy": 0.93, "rank": "DP1 TP0 EP0"},
    ),
    "sglang DSPARK": (
        f"[2026-06-03 10:00:00] Decode batch, #running-req: 4, {SG}, accept rate: 0.60, cap len: 4.00, block accept "
        f"len: 2.80, cpu graph: False, {TAIL}",
        FULL | STEP | {"cuda_graph": False},
    ),
    "sglang spec_tokens_details": (
        '{"usage": {"completion_tokens": 561}, "sglext": {"spec_tokens_details": {"spec_verify_ct": 200, '
        '"spec_num_correct_drafts": 360, "spec_num_proposed_drafts": 600}}}',
        COUNTED | {"num_verify_steps": 200, "scope": "request"},
    ),
    "sglang bench_one_batch console": (
        "Prefill. latency: 0.40000 s, throughput:   5120.00 token/s\nDecode 0. Batch size: 4, latency: 0.00990 s, "
        "throughput:    404.04 token/s\nDecode.  median latency: 0.00975 s, median throughput:    410.26 token/s\n"
        "Total. latency:  1.024 s, throughput:   2500.00 token/s",
        {"step_ms": 9.75, "step_ms_source": "printed", "mean_acceptance_length": 1.0, "batch_size": 4.0},
    ),
    "sglang bench_one_batch_server": (
        '{"run_name":"x","batch_size":4,"latency":1.4,"output_throughput":410.2,"acc_length":2.8}',
        {"mean_acceptance_length": 2.8, "batch_size": 4.0, "acceptance_scope": "since_start"},
    ),
    "sglang counters and latencies": (
        "sglang:spec_verify_calls_total 200\nsglang:generation_tokens_total 561\nsglang:num_requests_total 1\n"
        "sglang:spec_num_draft_tokens 4\nsglang:spec_num_steps 3\nsglang:spec_accept_rate 0.6\n"
        "sglang:time_to_first_token_seconds_sum 2.0\nsglang:time_to_first_token_seconds_count 10\n",
        {"num_verify_steps": 200, "num_speculative_tokens": 3, "ttft_mean_ms": 200.0, "output_tokens": 561.0},
    ),
    "vllm request, detailed": (
        json.dumps({"metrics": {"speculative_decoding": HISTOGRAM | {"per_step_accepted": [3, 1], "per_step_drafted":
        [3, 3], "acceptance_histogram_by_draft_length": {"3": [40, 40, 40, 80]}}}}),
        DRAFTED | POSITIONS,
    ),
    "vllm latencies": (
        'vllm:spec_decode_num_drafts_total{engine="0"} 200\nvllm:spec_decode_num_draft_tokens_total{engine="0"} 600\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 360\nvllm:time_to_first_token_seconds_sum 2.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 160\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 120\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 80\n'
        "vllm:time_to_first_token_seconds_count 10\nvllm:inter_token_latency_seconds_sum 10.0\n"
        "vllm:inter_token_latency_seconds_count 200\nvllm:prefix_cache_hits_total 64\n",
        DRAFTED | POSITIONS | {"ttft_mean_ms": 200.0, "itl_mean_ms": 50.0, "cached_tokens": 64.0},
    ),
    "vllm V0 metrics": (
        "vllm:spec_decode_draft_acceptance_rate 0.7\nvllm:spec_decode_efficiency 0.7\n"
        "vllm:spec_decode_num_accepted_tokens_total 420\nvllm:spec_decode_num_draft_tokens_total 600\n"
        "vllm:spec_decode_num_emitted_tokens_total 560\n",
        DRAFTED | {"num_matches": 420},
    ),
    "llama.cpp timings, plain, streamed": (
        'data: {"timings":{"cache_n":0,"prompt_n":512,"prompt_ms":400.0,"predicted_n":200,"predicted_ms":9950.0,'
        '"predicted_per_second":20.1}}',
        {"mean_acceptance_length": 1.0, "num_drafted_tokens": None, "step_ms": pytest.approx(50.0), "batch_size": 1.0},
    ),
    "llama.cpp progress": (
        "slot update_slots: id  0 | task 7 | n_decoded = 100, tg = 56.0 t/s",
        {"output_tokens": 100.0, "output_tokens_per_s": 56.0, "mean_acceptance_length": None, "slot": "0"},
    ),
    "llama.cpp progress, later": (
        "slot update_slots: id  1 | task 7 | n_gen = 100, tg = 56.0 t/s, tg_3s = 58.5 t/s",
        {"output_tokens": 100.0, "output_tokens_per_s": 56.0, "output_tokens_per_s_over_3_s": 58.5, "slot": "1"},
    ),
    "llama.cpp metrics, names of a fork": (
        "llamacpp:draft_tokens_total 600\nllamacpp:draft_tokens_accepted_total 360\n"
        "llamacpp:draft_verify_steps_total 200\nllamacpp:n_busy_slots_per_decode 1.5\n",
        DRAFTED | {"busy_slots_per_decode": 1.5},
    ),
    "llama.cpp metrics, names of a proposal": (
        "llamacpp:tokens_drafted_total 600\nllamacpp:draft_tokens_accepted_total 360\n",
        {"draft_acceptance_rate": 0.6, "mean_acceptance_length": None, "num_drafted_tokens": 600},
    ),
    "llama-speculative, speed": (
        "encoded  512 tokens in    0.400 seconds, speed: 1280.000 t/s\n"
        "decoded  561 tokens in   10.020 seconds, speed:   55.988 t/s",
        {"output_tokens": 561.0, "duration_s": 10.02, "output_tokens_per_s": 55.988, "mean_acceptance_length": None},
    ),
    "llama.cpp speed-bench": (
        '{"base_avg_pred_t/s": 20.0, "spec_avg_pred_t/s": 36.0, "decode_speedup": 1.8, "accept_rate": 0.6}',
        {"draft_acceptance_rate": 0.6, "output_tokens_per_s": 36.0, "printed_speedup": 1.8},
    ),
    "trtllm-bench console, all tags": (
        "[DT] AVERAGE: 600.00\n[ADT] AVERAGE: 360.00\n[DAR] MINIMUM: 0.50\n[DAR] AVERAGE: 0.60\n[AL] MAXIMUM: 4.00\n"
        "[AL] AVERAGE: 2.80\n[TPOT] AVERAGE: 17.90\n[TTFT] AVERAGE: 200.00\n[GTPS] AVERAGE: 55.90\n",
        {"mean_acceptance_length": 2.8, "draft_acceptance_rate": 0.6, "tpot_ms": 17.9, "ttft_ms": 200.0}
        | {"num_drafted_tokens_of_requests": 600.0, "output_tokens_per_s_per_user": 55.9},
    ),
    "trtllm-bench console, older build": (
        "[AR] MINIMUM: 1.90\n[AR] AVERAGE: 2.80\n",
        {"mean_acceptance_length": 2.8, "draft_acceptance_rate": None},
    ),
    "trtllm-bench, older build": (
        json.dumps(TRT | {"decoding_stats": {"draft_acceptance_rate_percentiles": {"average": 2.8}}}),
        {"mean_acceptance_length": 2.8, "draft_acceptance_rate": None},
    ),
    "trtllm, several iterations": (
        json.dumps([{"iterLatencyMS": ms, "specDecodingStats": {"numDraftTokens": 3, "numAcceptedTokens": 2,
        "acceptanceLength": 3.0, "draftOverhead": 0.2}, "inflightBatchingStats": {"avgNumDecodedTokensPerIter": 2.9}}
        for ms in (40.0, 50.0)]),
        {"mean_acceptance_length": 3.0, "step_ms": 50.0, "draft_overhead": 0.2, "tokens_per_iteration": 2.9},
    ),
    "aiperf, histogram": (
        json.dumps(AIPERF | {"pooled_spec_decode_acceptance_histogram": [40, 40, 40, 80]}),
        {"mean_acceptance_length": 2.8, "num_drafted_steps": 200, "num_accepted_tokens": 360} | POSITIONS,
    ),
    "aiperf, one request": (
        json.dumps({"metadata": {"benchmark_phase": "profiling"}, "metrics": {"inter_token_latency": {"value": 17.9}},
        "spec_decode_acceptance": {"engine": "vllm"} | HISTOGRAM | {"acceptance_histogram": PREVIEW}}),
        DRAFTED | POSITIONS | {"scope": "request"},
    ),
    "vllm request, end of a stream": (
        'data: {"choices": [], "usage": {"completion_tokens": 561}, "metrics": {"speculative_decoding": '
        + json.dumps(HISTOGRAM) + "}}",
        DRAFTED | POSITIONS,
    ),
    "vllm plain": (
        2 * COMPANION,
        {"mean_acceptance_length": 1.0, "batch_size": 1.0, "step_ms": pytest.approx(1000 / 56), "kv_usage": 0.074}
        | {"definition": "plain decode: no speculative line with this one, one token per step and request"},
    ),
    "vllm metrics, load and latencies": (
        'vllm:spec_decode_num_drafts_total{engine="0"} 200\nvllm:spec_decode_num_draft_tokens_total{engine="0"} 600\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 360\nvllm:spec_decode_num_drafts_created 1.7e9\n'
        "vllm:num_requests_running 4\nvllm:num_requests_waiting 2\nvllm:request_decode_time_seconds_sum 10.0\n"
        "vllm:request_decode_time_seconds_count 10\nvllm:e2e_request_latency_seconds_sum 20.0\n"
        "vllm:e2e_request_latency_seconds_count 10\nvllm:iteration_tokens_total_sum 561\n"
        "vllm:iteration_tokens_total_count 201\n",
        DRAFTED | {"batch_size": 4.0, "num_queued": 2.0},
    ),
    "sglang early, prefill line": (
        f"[2025-02-03 10:00:00 TP0] Prefill batch. #new-seq: 1, #new-token: 2048, #cached-token: 64, token usage: "
        f"0.02, #running-req: 4, #queue-req: 0,\n[2025-02-03 10:00:00 TP0] Decode batch. #running-req: 4, {SG}, "
        "gen throughput (token/s): 410.20, largest-len: 0, #queue-req: 0,",
        {"prefill_mixed": True, "cached_tokens": 64.0, "step_ms": None},
    ),
    "sglang meta_info, histogram under its alias": (
        '{"meta_info": {"spec_verify_ct":200,"spec_accept_histogram":[40,40,40,80],"completion_tokens":561,'
        '"e2e_latency":10.5,"cached_tokens":0,"prompt_tokens":512}}',
        {"mean_acceptance_length": 2.8, "num_accepted_tokens": 360, "num_verify_steps": 200} | POSITIONS,
    ),
    "llama.cpp print_timing without a slot": (
        "print_timing: draft acceptance rate = 0.60000 (  360 accepted /   600 generated)",
        {"draft_acceptance_rate": 0.6, "mean_acceptance_length": None, "num_drafted_tokens": 600},
    ),
    "llama.cpp metrics, load": (
        "llamacpp:prompt_tokens_total 512\nllamacpp:tokens_predicted_total 561\nllamacpp:n_decode_total 201\n"
        "llamacpp:tokens_predicted_seconds_total 10.02\nllamacpp:predicted_tokens_seconds 55.99\n"
        "llamacpp:requests_processing 1\nllamacpp:requests_deferred 0\nllamacpp:spec_decode_num_drafts 200\n"
        "llamacpp:spec_decode_num_draft_tokens 600\nllamacpp:spec_decode_num_accepted_tokens 360\n"
        'llamacpp:spec_decode_num_accepted_tokens_per_pos{position="0"} 160\n'
        'llamacpp:spec_decode_num_accepted_tokens_per_pos{position="1"} 120\n'
        'llamacpp:spec_decode_num_accepted_tokens_per_pos{position="2"} 80\n',
        DRAFTED | POSITIONS | {"batch_size": 1.0},
    ),
    "llama-bench tg, as asked": (
        "| llama | 4 GiB | 7 B | CUDA | 99 | tg128 | 55.99 +- 0.20 |",
        {"step_ms": pytest.approx(1000 / 55.99)},
    ),
    "trtllm metrics, all": (
        "trtllm_spec_decode_num_draft_tokens_total 600\ntrtllm_spec_decode_num_accepted_tokens_total 360\n"
        "trtllm_spec_decode_acceptance_length 2.8\ntrtllm_spec_decode_draft_overhead 0.2\n"
        "trtllm_avg_decoded_tokens_per_iter 2.8\ntrtllm_time_to_first_token_seconds_sum 2.0\n"
        "trtllm_time_to_first_token_seconds_count 10\ntrtllm_time_per_output_token_seconds_sum 10.0\n"
        "trtllm_time_per_output_token_seconds_count 200\n",
        {"mean_acceptance_length": 2.8, "ttft_mean_ms": 200.0, "draft_overhead": 0.2},
    ),
    "llama-benchy": (
        '{"version":"0.3","benchmarks":[{"concurrency":1,"context_size":4096,"response_size":512,"tg_throughput":'
        '{"mean":56.0},"peak_throughput":{"mean":60.0},"e2e_ttft":{"mean":200.0},"ttfr":{"mean":190.0}}]}',
        {"output_tokens_per_s": 56.0, "context_len": 4096.0, "batch_size": 1.0, "mean_acceptance_length": None},
    ),
}  # fmt: skip


def records_of(tmp_path, content, name="x.log", engine="auto"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(import_files([path], engine))


def check(record, wanted):
    for name, value in wanted.items():
        found = getattr(record, name) if hasattr(record, name) else record.details[name]
        if isinstance(value, float | list):
            assert found == pytest.approx(value), name
        else:
            assert found == value, name


@pytest.mark.parametrize("name", FORMS)
def test_form(tmp_path, name):
    text, wanted = FORMS[name]
    record = records_of(tmp_path, text + "\n")[-1]
    check(record, wanted)
    assert record.definition
    assert record.scope in ("window", "request", "run", "since_start")
    assert not any("contradiction" in warning for warning in record.warnings)


READ = formats("json", "labels", "regex")


def test_every_format_of_the_table_is_reachable():
    assert all((item.definition and item.scope) or item.read == "server" for item in READ)
    engines = {item.engine for item in formats("json", "labels", "regex", "block", "metrics")}
    assert engines >= {"sglang", "vllm", "llamacpp", "trtllm", "aiperf", "guidellm", "llamabenchy"}


DECODE = FORMS["sglang strict rate"][0]
CAPTURES = {
    "crlf": lambda line: f"{line}\r\n{line}\r\n",
    "colour": lambda line: f"\x1b[32m{line[:40]}\x1b[0m{line[40:]}\n" * 2,
    "docker json": lambda line: (json.dumps({"log": line + "\n", "stream": "stderr", "time": "t"}) + "\n") * 2,
    "docker compose": lambda line: f"sglang-1  | {line}\n" * 2,
    "kubernetes": lambda line: f"2026-06-03T10:00:00.123456789Z stdout F {line}\n" * 2,
    "journald": lambda line: f"Jun 03 10:00:00 gpu1 sglang[1234]: {line}\n" * 2,
    "journald json": lambda line: (json.dumps({"MESSAGE": line, "_PID": "1"}) + "\n") * 2,
    "progress bar": lambda line: f"Loading:  10%|#  |\rLoading: 100%|###|\r{line}\n{line}\n",
    "no last line end": lambda line: f"{line}\n{line}",
    "cut off": lambda line: f"{line}\n{line}\n{line[:120]}",
    "not utf-8": lambda line: f"caf\xe9 {line}\n".encode("latin-1") * 2,
    "utf-16": lambda line: f"{line}\n{line}\n".encode("utf-16"),
    "utf-16, the other order": lambda line: b"\xfe\xff" + f"{line}\n{line}\n".encode("utf-16-be"),
    "utf-16 in gzip": lambda line: gzip.compress(f"{line}\r\n{line}\r\n".encode("utf-16")),
    "gzip": lambda line: gzip.compress(f"{line}\n{line}\n".encode()),
}


@pytest.mark.parametrize("capture", CAPTURES)
def test_captured_in_any_way(tmp_path, capture):
    records = records_of(tmp_path, CAPTURES[capture](DECODE))
    assert len(records) == 2
    check(records[1], FULL | STEP)


def test_cut_gzip_keeps_what_came_before(tmp_path):
    path = tmp_path / "x.gz"
    lines = "".join(f"{DECODE.replace('5120', str(5120 + i))}\n" for i in range(3000))
    path.write_bytes(gzip.compress(lines.encode())[:-200])
    reader = Reader()
    assert len(list(import_files([path], reader=reader))) > 10
    assert "cut off" in reader.notes[0]


def test_mixed_file_and_forced_engine(tmp_path):
    text = "\n".join(
        [FORMS[name][0] for name in ("sglang old rate", "vllm 0.9", "llama.cpp statistics", "sglang meta_info")]
    )
    engines = [record.engine for record in records_of(tmp_path, text + "\nnoise | noise\n")]
    assert sorted(engines) == ["llamacpp", "sglang", "sglang", "vllm"]
    assert {record.engine for record in records_of(tmp_path, text, engine="vllm")} == {"vllm"}
    with pytest.raises(InputError, match="no figures of trtllm"):
        records_of(tmp_path, text, engine="trtllm")


def test_truncated_json_with_whole_lines(tmp_path):
    lines = "\n".join(json.dumps(BENCH) for _ in range(3))
    assert len(records_of(tmp_path, lines + '\n{"mean_e2e_lat')) == 3
    with pytest.raises(InputError, match="cut off"):
        records_of(tmp_path, json.dumps(SERVE, indent=1)[:-20])


def test_ambiguous_rate_is_null_until_another_line_decides(tmp_path):
    line = DECODE.replace("accept len: 2.80, accept rate: 0.60", "accept len: {}, accept rate: {}")
    (alone,) = records_of(tmp_path, line.format("2.00", "0.50") + "\n")
    assert alone.draft_acceptance_rate is None
    assert any("both forms" in text for text in alone.warnings)
    first, second = records_of(tmp_path, f"{line.format('2.00', '0.50')}\n{line.format('2.80', '0.70')}\n")
    assert (first.num_speculative_tokens, second.num_speculative_tokens) == (3, 3)
    assert first.draft_acceptance_rate == pytest.approx(1 / 3)
    (none,) = records_of(tmp_path, line.format("2.80", "0.95") + "\n")
    assert none.draft_acceptance_rate is None
    assert any("neither form" in text for text in none.warnings)


def test_undecidable_bonus_is_null(tmp_path):
    text = "INFO 04-10 10:00:00 SpecDecoding metrics: Mean acceptance length: 9.99, Accepted: 360 tokens, "
    text += "Drafted: 600 tokens"
    (record,) = records_of(tmp_path, text + "\n")
    assert record.mean_acceptance_length is None
    assert record.draft_acceptance_rate == pytest.approx(0.6)
    assert any("bonus" in text for text in record.warnings)


def test_prefill_and_queue_and_cache_are_told(tmp_path):
    prefill = (
        "[2026-06-03 10:00:01] Prefill batch, #new-seq: 1, #new-token: 64, #cached-token: 448, token usage: 0.02, "
    )
    prefill += "#running-req: 4, #queue-req: 3,\n"
    text = f"{DECODE}\n{DECODE}\n{prefill}{DECODE.replace('#queue-req: 0', '#queue-req: 3')}\n{DECODE}\n"
    warned = records_of(tmp_path, text)[2]
    assert warned.prefill_mixed is True
    assert warned.step_ms is None
    for word in ("prefill-mixed", "waiting", "prefix cache"):
        assert any(word in text for text in warned.warnings)


def test_two_scrapes_are_a_run(tmp_path):
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")

    def page(*counts):
        lines = [
            f'vllm:spec_decode_{name}_total{{engine="{engine}"}} {count}'
            for name, count in zip(names, counts, strict=True)
            for engine in (0, 1)
        ]
        return "\n".join(lines) + "\n"

    before, after = tmp_path / "before.txt", tmp_path / "after.txt"
    before.write_text(page(10, 30, 30))
    after.write_text(page(110, 330, 210) + 'vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9\n')
    run = list(import_files([before, after]))[-1]
    check(run, DRAFTED | {"scope": "run"})


def engine_page(*counts_of_engines):
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return "".join(
        f'vllm:spec_decode_{name}_total{{engine="{engine}"}} {count}\n'
        for engine, counts in enumerate(counts_of_engines)
        for name, count in zip(names, counts, strict=True)
    )


def test_pages_in_reverse_order_are_told(tmp_path):
    before, after = tmp_path / "before.txt", tmp_path / "after.txt"
    before.write_text(engine_page((10, 30, 15)))
    after.write_text(engine_page((210, 630, 375)))
    turned = list(import_files([after, before]))
    assert [record.scope for record in turned] == ["since_start", "since_start"]
    assert any("reverse order" in text for text in turned[1].warnings)
    same = list(import_files([after, after]))
    assert any("nothing ran" in text for text in same[1].warnings)
    run = list(import_files([before, after]))[-1]
    check(run, DRAFTED | {"scope": "run", "warnings": []})


def test_engines_of_one_page_are_told_apart(tmp_path):
    (record,) = records_of(tmp_path, engine_page((100, 300, 220), (100, 300, 140)))
    check(record, DRAFTED)
    assert [engine["mean_acceptance_length"] for engine in record.details["engines"].values()] == [3.2, 2.4]
    assert any("2 engines lie between 2.40 and 3.20" in text for text in record.warnings)
    (alike,) = records_of(tmp_path, engine_page((100, 300, 182), (100, 300, 178)))
    assert alike.warnings == []
    page = engine_page((100, 300, 220), (100, 300, 140)) + engine_page((200, 600, 400), (200, 600, 320))
    run = records_of(tmp_path, page)[-1]
    assert [engine["mean_acceptance_length"] for engine in run.details["engines"].values()] == [2.8, 2.8]


def test_two_drafters_have_a_line_each(tmp_path):
    line = FORMS["llama.cpp statistics"][0]
    records = records_of(tmp_path, f"{line}\n{line.replace('draft-mtp', 'ngram-mod').replace('= 360', '= 180')}\n")
    lengths = {record.details["drafter"]: record.mean_acceptance_length for record in records}
    assert lengths == {"draft-mtp": pytest.approx(2.8), "ngram-mod": pytest.approx(1.9)}


def test_an_early_prefill_line_marks_the_window(tmp_path):
    early = (
        "[2025-02-03 10:00:01 TP0] Prefill batch. #new-seq: 1, #new-token: 2048, #cached-token: 0, token usage: 0.02, "
    )
    early += "#running-req: 4, #queue-req: 0,\n"
    line = FORMS["sglang early 2025"][0] + "\n"
    records = records_of(tmp_path, line + early + line)
    assert [record.prefill_mixed for record in records] == [False, True]


def test_a_value_may_be_a_list_and_a_line_may_be_cut():
    found = pairs(", #running-req: 4, note, accept len: 2.80, rates: 0.8, 0.6, dur(b,g,a) = 1, 2 ms, x y: nan,")
    values = {"#running-req": "4, note", "accept len": "2.80", "rates": "0.8, 0.6", "dur(b,g,a)": "1, 2 ms"}
    assert found == values | {"x y": "nan"}
    assert pairs(". #running-req: 4, accept len:") == {"#running-req": "4, accept len:"}


def test_sglang_counters_leave_the_prefill_tokens_out(tmp_path):
    page = "sglang:spec_verify_calls_total {}\nsglang:generation_tokens_total {}\nsglang:num_requests_total {}\n"
    path = tmp_path / "m.txt"
    path.write_text(page.format(100, 1000, 10) + page.format(300, 1561, 11))
    assert list(import_files([path]))[-1].mean_acceptance_length == pytest.approx(2.8)


def test_ranks_of_a_gauge_are_not_averaged(tmp_path):
    text = 'sglang:spec_accept_length{dp_rank="0"} 2.0\nsglang:spec_accept_length{dp_rank="1"} 3.0\n'
    text += 'sglang:gen_throughput{dp_rank="0"} 10\n'
    (record,) = records_of(tmp_path, text)
    assert record.mean_acceptance_length is None
    assert record.details["mean_acceptance_length_of_ranks"] == [2.0, 3.0]


def test_imposed_acceptance_is_forced(tmp_path):
    line = "non-default args: {'speculative_config': {'rejection_sample_method': 'synthetic'}}\n"
    (record,) = records_of(tmp_path, line + FORMS["vllm 0.9"][0] + "\n")
    assert record.origin == "forced"


def test_backend_that_is_not_told_is_null(tmp_path):
    lines = "Initializing a V1 LLM engine (v0.{}.0) with config: model='m'\n"
    lines += "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'FLASHINFER'].\n"
    for version in (15, 33):
        (record,) = records_of(tmp_path, lines.format(version) + FORMS["vllm 0.9"][0] + "\n")
        assert (record.backend["verify"], record.backend["decode"]) == ("FLASH_ATTN", "FLASH_ATTN")
        # Inherited; picked again, and another one than the target's would have a line of its own.
        assert record.backend["draft"] == "FLASH_ATTN"
    given = lines.format(33).replace(
        "FLASH_ATTN attention backend out of", "AttentionBackendEnum.FLASH_ATTN backend, not"
    )
    (record,) = records_of(tmp_path, given + FORMS["vllm 0.9"][0] + "\n")
    assert (record.backend["verify"], record.backend["draft"]) == ("FLASH_ATTN", None)


def test_llamacpp_rates_are_over_the_steps_with_a_draft(tmp_path):
    text, _ = FORMS["llama.cpp slot, new"]
    eval_time = "slot print_timing: id  0 | task 7 |        eval time =   10020.00 ms /   {} tokens\n"
    (longer,) = records_of(tmp_path, eval_time.format(661) + text + "\n")  # 100 steps without a draft
    assert longer.mean_acceptance_length == pytest.approx(1 + 360 / 300)
    assert longer.warnings == []
    (wrong,) = records_of(tmp_path, eval_time.format(501) + text + "\n")
    assert any("contradiction" in warning for warning in wrong.warnings)
    (wrong,) = records_of(tmp_path, eval_time.format(661) + text.replace("0.800", "0.900") + "\n")
    assert any("sum of rates" in warning for warning in wrong.warnings)


def test_negative_figures_are_null(tmp_path):
    for old, new, field in (("#token: 5120", "#token: -5", "context_len"), ("len: 2.80", "len: -2.85", "step_ms")):
        records = records_of(tmp_path, f"{DECODE}\n{DECODE.replace(old, new)}\n{DECODE}\n")
        assert getattr(records[1], field) is None
        assert any("below 0: not used" in text for text in records[1].warnings)
    assert records[1].mean_acceptance_length is None


def test_degenerate_text(tmp_path):
    (record,) = records_of(tmp_path, json.dumps(BENCH | {"total_output_tokens_retokenized": 250}))
    assert any("degenerate text" in text for text in record.warnings)


def test_contradictions_are_named(tmp_path):
    bad = HISTOGRAM | {"num_draft_tokens": 300, "acceptance_histogram": None}
    (record,) = records_of(tmp_path, json.dumps(bad))
    assert any("360 accepted of 300" in text for text in record.warnings)


def test_speedup_above_the_length_is_told(tmp_path):
    plain = {name: value for name, value in SERVE.items() if not name.startswith("spec")} | {"output_throughput": 10.0}
    paths = [tmp_path / "plain.json", tmp_path / "spec.json"]
    for path, content in zip(paths, (plain, SERVE), strict=True):
        path.write_text(json.dumps(content))
    first, second = import_files(paths)
    assert first.warnings == []
    assert any("speed-up 5.60 above the acceptance length 2.80" in text for text in second.warnings)


GARBLED = [
    DECODE.replace("2026-06-03", "2026-42-03"),
    DECODE.replace("2.80", "nan").replace("5120", "9" * 400),
    "llamacpp:spec_decode_num_draft_tokens_total " + "9" * 400,
    "| llama | pp" + "9" * 400 + " @ d8192 | 50.00 |",
    "draft acceptance = 0.6 (  360 accepted /   600 generated), mean acceptance length = " + "9" * 400,
    '{"internal_states": -1, "version": []}',
    '{"spec_verify_ct": [], "completion_tokens": {"a": 1}, "spec_accept_histogram": [null, "x", -1]}',
    "Decode batch, " + "#a (b): " * 5000,
]


@pytest.mark.parametrize("text", GARBLED)
def test_garbled_lines_do_no_harm(text):
    records = [record.to_dict() for record in Reader().read_text(f"{text}\n{DECODE}\n{text}", "x")]
    assert json.dumps(records, allow_nan=False)
    (alone,) = [record.to_dict() for record in Reader().read_text(DECODE, "x")]
    assert alone["mean_acceptance_length"] in [record["mean_acceptance_length"] for record in records]


def test_secrets_of_the_arguments_are_not_kept():
    reader = Reader()
    text = "server_args=ServerArgs(model_path='m', api_key='sk-1', attention_backend='fa3', version='0.5.21')\n"
    list(reader.read_text(text + DECODE, "x"))
    assert reader.server.args == {"attention_backend": "fa3"}


IMPORT = """
import sys
from labkit.engines.importing import import_files

def peak():  # ru_maxrss of a child starts at what its parent had
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) >> 10 for line in file if line.startswith("VmHWM"))

before = peak()
n = sum(1 for _ in import_files(sys.argv[1:]))
print(n, peak() - before)
"""


def run_import(path):
    """Number of records and MiB of memory that reading took; standard error."""
    done = subprocess.run([sys.executable, "-c", IMPORT, str(path)], capture_output=True, text=True)
    return done.stdout.split(), done.stderr


def test_long_logs_take_no_memory(tmp_path):
    path = tmp_path / "long.log"
    noise = "[2026-06-03 10:00:00] INFO: 127.0.0.1 - POST /generate HTTP/1.1 200 OK\n" * 50
    with path.open("w") as file:
        for i in range(12_000):
            file.write(noise + DECODE.replace("5120", str(5120 + i)) + "\n")
    (count, memory), progress = run_import(path)  # 45 MB
    assert int(count) == 12_000
    assert int(memory) < 50
    assert progress == ""


def test_one_endless_line_is_left_out(tmp_path):
    path = tmp_path / "line.log"
    with path.open("w") as file:
        file.write(DECODE + "\n")
        for _ in range(160):
            file.write("x" * (1 << 20))
        file.write("\n" + DECODE + "\n")
    (count, memory), progress = run_import(path)
    assert int(count) == 2
    assert int(memory) < 300
    assert "read line.log MiB" in progress


def test_bombs_and_deep_nesting(tmp_path):
    deep = tmp_path / "deep.json"
    deep.write_text('{"a":' * 200_000 + "1" + "}" * 200_000)
    with pytest.raises(InputError, match="nested too deep"):
        list(import_files([deep]))
    lines = records_of(tmp_path, "[" * 100_000 + "\n" + DECODE + "\n" + DECODE + "\n")
    assert len(lines) == 2
    bomb = tmp_path / "bomb.gz"
    with gzip.open(bomb, "wb", compresslevel=9) as file:
        for _ in range(300):
            file.write(b"\0" * (1 << 20))
    (*_,), error = run_import(bomb)
    assert "gzip bomb" in error


@pytest.mark.parametrize(
    ("content", "name", "wanted"),
    [
        (None, "no/such", "no such file"),
        ("nothing here\n", "x.log", "no figures of a known engine"),
        ('{"a": 1}', "x.json", "no figures"),
        (b"\x1f\x8bnot gzip", "x.gz", "gzip"),
        ("", "empty.log", "no figures"),
        (b"\0" * 4096, "zeros", "no figures"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tmp_path, capsys, content, name, wanted):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["import", str(path)]) == 2
    err = capsys.readouterr().err
    assert len(err.strip().splitlines()) == 1
    assert wanted in err


def test_unknown_engine_and_folder(tmp_path, capsys):
    assert main(["import", str(tmp_path), "--engine", "auto"]) == 2
    assert main(["import", "x", "--engine", "nosuch"]) == 2
    assert "wanted one of auto, sglang" in capsys.readouterr().err


def test_out_that_is_no_folder(tmp_path, capsys):
    path = tmp_path / "x.log"
    path.write_text(f"{DECODE}\n")
    assert main(["import", str(path), "--out", str(path)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_command_line_json_text_and_out(tmp_path, capsys):
    path = tmp_path / "x.log"
    path.write_text(f"{DECODE}\n{DECODE}\n")
    assert main(["import", str(path), "--json", "--out", str(tmp_path / "out")]) == 0
    records = json.loads(capsys.readouterr().out)
    names = "engine engine_version model time scope origin definition warnings num_verify_steps num_drafted_steps"
    names += " zero_draft_steps num_drafted_tokens num_accepted_tokens mean_acceptance_length draft_acceptance_rate"
    names += " acceptance_rate_per_pos num_speculative_tokens batch_size context_len output_tokens_per_s step_ms"
    names += " step_ms_source cuda_graph prefill_mixed"
    assert set(names.split()) <= set(records[0])
    written = pq.read_table(tmp_path / "out" / "import.parquet").to_pylist()
    nested = ("backend", "details")
    assert [row | {name: row[name] and json.loads(row[name]) for name in nested} for row in written] == records
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["import.parquet"]
    assert main(["import", str(path)]) == 0
    assert "2.80" in capsys.readouterr().out


def test_stdin():
    command = [sys.executable, "-m", "labkit", "import", "-", "--json"]
    for data in (f"{DECODE}\n".encode(), gzip.compress(f"{DECODE}\n".encode())):
        done = subprocess.run(command, input=data, capture_output=True)
        assert json.loads(done.stdout)[0]["mean_acceptance_length"] == 2.8


def test_pipe(tmp_path):
    path = tmp_path / "x.log"
    path.write_text(f"{DECODE}\n")
    command = f"{sys.executable} -m labkit import <(cat {path}) --json"
    done = subprocess.run(["bash", "-c", command], capture_output=True)
    assert json.loads(done.stdout)[0]["mean_acceptance_length"] == 2.8


def test_no_torch():
    code = "import labkit.engines.commands, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_clean_leaves_other_json_alone():
    assert clean('{"log": 3, "x": 1}') == '{"log": 3, "x": 1}'
    with contextlib.closing(io.BytesIO()):
        assert clean(json.dumps({"log": "\x1b[1mbold\x1b[0m\n"})) == "bold"
    with pytest.raises(InputError):
        Input("no/such/file")


def test_a_length_that_the_counts_deny_is_a_contradiction():
    for changed in ({"spec_decode_acceptance_length": 3.5}, {"spec_decode_acceptance_rate": 80.0}):
        (record,) = Reader().read_text(json.dumps(SERVE | changed), "x")
        assert any("contradiction: the printed" in text for text in record.warnings)
    start = "INFO 05-08 10:00:00 Speculative metrics: Draft acceptance rate: "
    tail = "Number of speculative tokens: 3, Number of accepted tokens: 360, Number of draft tokens: 600, "
    for rate, efficiency, wrong in ((0.6, 0.7, 0), (0.9, 0.7, 1), (0.6, 0.2, 1)):
        line = f"{start}{rate:.3f}, System efficiency: {efficiency:.3f}, {tail}Number of emitted tokens: 560."
        (record,) = Reader().read_text(line, "x")
        assert sum("contradiction" in text for text in record.warnings) == wrong
    line = "INFO SpecDecoding metrics: Mean acceptance length: {}, " + V1 + ", Avg Draft acceptance rate: {}%"
    for length, rate, wrong in ((2.8, 60.0, 0), (3.5, 60.0, 1), (2.8, 90.0, 1)):
        (record,) = Reader().read_text(line.format(length, rate), "x")
        assert sum("contradiction" in text for text in record.warnings) == wrong


def test_the_step_of_bench_serve_is_tpot_times_length():
    content = SERVE | {"max_concurrency": 1, "output_throughput": 5.0}
    (record,) = Reader().read_text(json.dumps(content | {"mean_tpot_ms": 7.0}), "x")
    assert record.step_ms == pytest.approx(7.0 * 2.8)
    assert record.details["step_ms_from"] == "TPOT x length"
    (record,) = Reader().read_text(json.dumps(content), "x")
    assert record.step_ms is None
    assert any("no TPOT" in text for text in record.warnings)


def test_no_figure_is_no_record(tmp_path, capsys):
    (tmp_path / "s.log").write_text("some statistics of the year\n")
    for name in ("s.log", "nope.log"):
        assert main(["import", str(tmp_path / name), "--out", str(tmp_path / "o2")]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "o2").exists()


@pytest.mark.parametrize("text", ["nan", "inf"])
def test_an_accept_len_that_is_no_number_is_told(text):
    line = f"[2026-05-08 10:00:00] Decode batch. #running-req: 1, {SG.replace('2.80', text)}, {GRAPH}{TAIL}"
    (record,) = Reader().read_text(line, "x")
    assert any("is no number" in warning for warning in record.warnings)


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("import - - < {log}", "only once"),
        ("import - <&-", "closed"),
        ("diagnose - <&-", "closed"),
        ("import {log} --out {folder}", "this is a folder"),
        ("import {log} > /dev/full", "No space left"),
        ("diagnose {log} --launch 'vllm serve m'", "one launch line alone"),
        ("diagnose --launch 'vllm serve m' --launch 'vllm serve n'", "one launch line alone"),
    ],
)
def test_input_and_output_that_cannot_be_used(tmp_path, command, wanted):
    (tmp_path / "import.parquet").mkdir()
    log = tmp_path / "x.json"
    log.write_text(json.dumps(SERVE))
    shell = f"{sys.executable} -m labkit {command.format(log=log, folder=tmp_path)}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1), done.stderr
    assert wanted in done.stderr


def test_a_console_of_one_stream_gives_its_step():
    lines = "Maximum request concurrency:             1\nMean TPOT (ms):                          7.17\n"
    (record,) = Reader().read_text(CONSOLE.replace("Output token", f"{lines}Output token"), "x")
    assert (record.batch_size, record.step_ms) == (1, pytest.approx(2.8 * 7.17))
    ranks = {
        "attention_backend": "fa3",
        "internal_states": [{}, {"avg_spec_accept_length": 2.9}, {"avg_spec_accept_length": 4}],
    }
    (record,) = Reader().read_text(json.dumps(ranks), "x")
    assert record.mean_acceptance_length is None
    assert any("2 of 3 ranks have a length, 2.90 to 4.00" in text for text in record.warnings)
