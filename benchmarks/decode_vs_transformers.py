"""Plain greedy decode of labkit's decoder against ``transformers.generate`` on the same SmolLM2 weights, on the CPU.

Both generate from the same prompt in interleaved rounds, so drift of the machine hits both. The clock starts at
the first output token, so the prefill is not in it. Beside the ratio stand the read bandwidth of this process (a plain
sum over memory), the time to read weights and keys at that rate, and the share of that floor that is reached.

    python benchmarks/decode_vs_transformers.py --dtype float32 bfloat16 --rounds 7 --new-tokens 48
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from labkit.models.decoder import Decoder
from labkit.models.gguf import dequantised_folder, smollm2_gguf
from labkit.models.tokenizer import load_tokenizer
from labkit.models.weights import DTYPES, load_model

QUESTION = "Explain why bridges need gaps between their parts."
FILLER = "The road over the river was closed in winter, and the ferry ran when the ice allowed it. "


def prompt_ids(num_tokens: int) -> list[int]:
    """The question in the chat template, padded in front with filler to exactly `num_tokens` where it is longer."""
    tokenizer = load_tokenizer("smollm2-135m")
    ids = tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    filler = tokenizer.encode(FILLER * (num_tokens // 10))
    return filler[: max(0, num_tokens - len(ids))] + ids


def measure_read_gb_per_s() -> float:
    """Best of 10 sums over 512 MB, in 1e9 bytes per second."""
    data = torch.ones(128 * 2**20)
    return data.nbytes / min(seconds(data.sum) for _ in range(10)) / 1e9


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Stopwatch:
    """Time stamps of the output tokens; what ``transformers.generate`` calls a streamer."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def put(self, value: object) -> None:
        self.stamps.append(time.perf_counter())

    def end(self) -> None:
        pass

    def tokens_per_s(self, num_new: int) -> float:
        """Rate after the first output token, which belongs to the prefill."""
        first, last = self.stamps[-num_new], self.stamps[-1]
        return (num_new - 1) / (last - first)


def labkit_generate(decoder: Decoder, token_ids: list[int], num_new: int, backend: str, watch: Stopwatch) -> None:
    cache = decoder.new_cache(1, len(token_ids) + num_new)
    token = int(decoder.prefill(token_ids, cache, 0, backend=backend).argmax())
    watch.put(token)
    for _ in range(num_new - 1):
        token = int(decoder.forward(torch.tensor([[token]]), cache, backend=backend)[0, -1].argmax())
        watch.put(token)


def interval(ratios: list[float], num_draws: int = 2000) -> tuple[float, float]:
    """95% interval of the median over resampled rounds."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(num_draws))
    return medians[int(0.025 * num_draws)], medians[int(0.975 * num_draws)]


def forward_table(decoder: Decoder, backend: str, rounds: int) -> None:
    """Median ms of one forward at each q_len and context, and its ratio to q_len 1."""
    for context_len in (64, 2048, 6144):
        cache = decoder.new_cache(1, context_len + 8)
        cache.fill_random(context_len, torch.Generator().manual_seed(0))
        times: dict[int, list[float]] = {q_len: [] for q_len in (1, 2, 3, 5, 8)}
        for round_index in range(rounds + 1):
            for q_len, samples in times.items():
                token_ids = torch.arange(q_len)[None] + 100
                elapsed = seconds(partial(decoder.forward, token_ids, cache, backend=backend))
                cache.truncate(context_len)
                if round_index:
                    samples.append(1e3 * elapsed)
        medians = {q_len: statistics.median(samples) for q_len, samples in times.items()}
        cells = [f"q_len {q_len}: {ms:6.1f} ms ({ms / medians[1]:.2f}x)" for q_len, ms in medians.items()]
        print(f"  context {context_len:5d}  {'  '.join(cells)}")


def compare(
    arguments: argparse.Namespace, dtype: str, num_prompt: int, gb_per_s: float, decoder: Decoder, model
) -> None:
    token_ids = prompt_ids(num_prompt)
    tensor, num_new = torch.tensor([token_ids]), arguments.new_tokens

    def transformers_run(watch: Stopwatch) -> None:
        model.generate(tensor, max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False, streamer=watch)

    def labkit_run(watch: Stopwatch) -> None:
        labkit_generate(decoder, token_ids, num_new, arguments.backend, watch)

    rates: dict[str, list[float]] = {"labkit": [], "transformers": []}
    for round_index in range(arguments.rounds + 1):
        for name, run in (("labkit", labkit_run), ("transformers", transformers_run)):
            watch = Stopwatch()
            run(watch)
            # Round 0 warms up.
            if round_index:
                rates[name].append(watch.tokens_per_s(num_new))
    ours, theirs = (statistics.median(rates[name]) for name in ("labkit", "transformers"))
    ratios = [a / b for a, b in zip(rates["labkit"], rates["transformers"], strict=True)]
    low, high = interval(ratios)
    floor_ms = decoder.floor_bytes([len(token_ids) + num_new // 2]) / gb_per_s / 1e6
    print(
        f"{dtype} ({decoder.linear_backend}), prompt {len(token_ids)}: labkit {ours:.1f} tok/s, transformers "
        f"{theirs:.1f} tok/s, ratio {statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}]; read {gb_per_s:.1f} GB/s, "
        f"floor {floor_ms:.1f} ms, reached {floor_ms * ours / 1e3:.0%} of it"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=DTYPES)
    parser.add_argument("--prompt-tokens", nargs="+", type=int, default=[46, 500])
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--backend", default="sdpa", help="attention backend of labkit")
    parser.add_argument("--linear-backend", default="auto")
    parser.add_argument("--forward", action="store_true", help="also print forward ms by q_len and context")
    parser.add_argument("--no-transformers", action="store_true", help="only what --forward prints")
    arguments = parser.parse_args()
    if arguments.new_tokens < 2 or arguments.rounds < 1:
        parser.error("wanted --new-tokens of at least 2 and --rounds of at least 1")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    for dtype in arguments.dtype:
        decoder = load_model("smollm2-135m", dtype=dtype, linear_backend=arguments.linear_backend)
        if arguments.forward:
            print(f"{dtype} ({decoder.linear_backend}), forward:")
            forward_table(decoder, arguments.backend, arguments.rounds)
        if arguments.no_transformers:
            continue
        from transformers import AutoModelForCausalLM

        folder = dequantised_folder(smollm2_gguf())
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        for num_prompt in arguments.prompt_tokens:
            compare(arguments, dtype, num_prompt, measure_read_gb_per_s(), decoder, model)


if __name__ == "__main__":
    main()
