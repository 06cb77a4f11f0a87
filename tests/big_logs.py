"""A mixed server log of any size: ``python -m tests.big_logs FILE MIB [--dense]``; .gz is compressed.

Of ten lines one is a decode line, in four captures (plain, ANSI colour, docker compose prefix, docker's JSON); the rest
is what servers print else: access lines, structured JSON lines, warnings, progress bars, prefill lines. ``--dense``:
decode lines only. Lengths are 2.80 of 4 draft tokens, step times known by context.
"""

import gzip
import json
import sys
from pathlib import Path

ARGS = (
    "server_args=ServerArgs(model_path='org/Llama-3.3-70B-x', attention_backend='triton', version='0.5.21', "
    "speculative_algorithm='EAGLE3', speculative_num_steps=3, speculative_eagle_topk=1, "
    "speculative_num_draft_tokens=4)\nDevice: NVIDIA H200\n"
)
LENGTHS = (("2.80", "0.60"), ("2.86", "0.62"), ("2.74", "0.58"))
CAPTURES = (
    "{}".format,
    "\x1b[32m{}\x1b[0m".format,
    "sglang-1  | {}".format,
    lambda line: json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-06-03T10:00:00Z"}),
)
NOISE = (
    '[2026-06-03 10:00:00] INFO:     127.0.0.1:53122 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    '{"level":"info","ts":1780480800.1,"msg":"request finished","request_id":"8f3a","tokens":412,"reason":"stop"}',
    "2026-06-03 10:00:00,123 WARNING [scheduler.py:512] request 8f3a waits for a slot, 3 in the queue of this rank",
    "Capturing batches (bs=8): 10%|#         |\rCapturing batches (bs=8): 100%|##########|",
)
STEP_MS, STEP_MS_PER_1K = 20.0, 1.0


def decode_line(i: int) -> str:
    """One of 5,000 contexts over seven octaves from 1K."""
    context = int(1024 * 2 ** (7 * (i % 5000) / 5000))
    length, rate = LENGTHS[i % 3]
    tokens_per_s = 1000 * float(length) / (STEP_MS + STEP_MS_PER_1K * context / 1024)
    return (
        f"[2026-06-03 {10 + i // 3600 % 12:02d}:{i // 60 % 60:02d}:{i % 60:02d} TP0] Decode batch, #running-req: 1, "
        f"#token: {context}, token usage: 0.02, accept len: {length}, accept rate: {rate}, cuda graph: True, "
        f"gen throughput (token/s): {tokens_per_s:.2f}, #queue-req: 0"
    )


def part(dense: bool) -> tuple[bytes, int]:
    """Some MiB of lines, and how many decode lines are in it."""
    lines = []
    for i in range(5000):
        lines.append(decode_line(i) if dense else CAPTURES[i % 4](decode_line(i)))
        lines += [] if dense else [NOISE[(i + j) % 4] for j in range(9)]
    return ("\n".join(lines) + "\n").encode(), 5000


def write(path: Path, mib: int, *, dense: bool = False) -> int:
    """Write a log of at least this many MiB before compression; how many decode lines it has."""
    block, count = part(dense)
    repeats = -(-(mib << 20) // len(block))
    with gzip.open(path, "wb", compresslevel=1) if path.suffix == ".gz" else path.open("wb") as file:
        file.write(ARGS.encode())
        for _ in range(repeats):
            file.write(block)
    return repeats * count


if __name__ == "__main__":
    print(write(Path(sys.argv[1]), int(sys.argv[2]), dense="--dense" in sys.argv), "decode lines")
