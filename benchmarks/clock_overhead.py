"""What the loop's clock costs: the same generation with the null clock and with the host clock, in turn.

Prints the wall time of both and the median ratio with a 95 % bootstrap interval over rounds.
"""

import argparse
import random
import time

import numpy as np

from labkit.drafting.ngram import NgramDrafter
from labkit.models.target import ModelTarget
from labkit.models.tokenizer import load_tokenizer
from labkit.models.weights import load_model
from labkit.speculation import speculate
from labkit.timing import HostClock, NullClock
from labkit.workloads import load_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    decoder = load_model("smollm2-135m", dtype=arguments.dtype)
    messages = load_prompts("code_editing", limit=1)[0].messages
    prompt = load_tokenizer("smollm2-135m").encode_chat(list(messages))
    room = len(prompt) + arguments.new_tokens + 8
    target = ModelTarget(decoder, batch_size=1, max_context_len=room, verify_backend="sdpa")

    def run(clock: NullClock | HostClock) -> float:
        begin = time.perf_counter()
        speculate(
            target, NgramDrafter(), [prompt], num_speculative_tokens=4, max_new_tokens=arguments.new_tokens, clock=clock
        )
        return time.perf_counter() - begin

    order, seconds = random.Random(0), {"null": [], "host": []}
    run(NullClock())
    for _ in range(arguments.rounds):
        names = ["null", "host"]
        order.shuffle(names)
        for name in names:
            seconds[name].append(run(NullClock() if name == "null" else HostClock()))
    logs = np.log(np.array(seconds["host"]) / np.array(seconds["null"]))
    draws = np.median(np.random.default_rng(0).choice(logs, (4000, len(logs))), axis=1)
    low, high = np.exp(np.percentile(draws, [2.5, 97.5]))
    null, host = (np.median(seconds[name]) * 1e3 for name in ("null", "host"))
    ratio = np.exp(np.median(logs))
    print(f"null clock {null:.1f} ms, host clock {host:.1f} ms, ratio {ratio:.4f} [{low:.4f}, {high:.4f}]")


if __name__ == "__main__":
    main()
