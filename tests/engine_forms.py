"""One run of 200 steps, k = 3, 600 drafts, 360 accepted, as every engine and tool prints it."""

import gzip
import json

import pytest

from labkit.engines.importing import import_files

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
