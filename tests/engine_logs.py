"""Planted logs of a server, and their diagnosis."""

import random
from datetime import datetime, timedelta

from labkit.engines.diagnose import diagnose
from labkit.engines.importing import Reader
from labkit.engines.server import Server
from labkit.shapes import model_shape

ARGS = "server_args=ServerArgs(model_path='org/Llama-3.3-70B-x', attention_backend={backend!r}, "
ARGS += "speculative_algorithm='EAGLE3', speculative_num_steps=3, speculative_eagle_topk=1, "
ARGS += "speculative_num_draft_tokens=4, version={version!r})\n"


def log(
    *, ms_per_1k, intercept=20.0, length=lambda context: 2.8, backend="triton", version="0.5.21", graph=True, count=240
):
    """Decode lines over 1K to 128K, batch 1, with a known step time and length."""
    rng, now = random.Random(7), datetime(2026, 6, 3, 10)
    lines = [ARGS.format(backend=backend, version=version), "Device: NVIDIA H200\n"]
    for i in range(count):
        context = int(1024 * 2 ** (7 * i / (count - 1)))
        tokens = length(context) + rng.gauss(0, 0.05)
        step = (intercept + ms_per_1k * context / 1024) * (1 + rng.gauss(0, 0.01))
        now += timedelta(seconds=2)
        lines.append(
            f"[{now:%Y-%m-%d %H:%M:%S}] Decode batch, #running-req: 1, #token: {context}, token usage: 0.02, "
            f"accept len: {tokens:.2f}, accept rate: {(tokens - 1) / 3:.2f}, cuda graph: {graph}, "
            f"gen throughput (token/s): {1000 * tokens / step:.2f}, #queue-req: 0\n"
        )
    return "".join(lines)


def diagnosed(text, **options):
    reader = Reader()
    records = reader.read_text(text, "log", reader.server)
    return diagnose(records, reader.server, **options)


SHAPE = model_shape("llama-3.3-70b")
FLOOR = SHAPE.kv_bytes_per_token("bfloat16") * 1024 / 4800 / 1e6


def server(engine="sglang", version="0.5.21", gpu=None, named=None, **args):
    made = Server(engine=engine, version=version, gpu=gpu, named=dict(named or {}))
    made.take_args(args)
    return made


SPECULATIVE = "{'method': 'eagle3', 'model': 'yuhuili/EAGLE3-LLaMA3.1-Instruct-8B', 'num_speculative_tokens': 3}"
NON_DEFAULT = "non-default args: {'model': 'meta-llama/Llama-3.1-8B-Instruct', 'hosts': [], 'speculative_config': "
NON_DEFAULT += SPECULATIVE + "}\n"
CONFIG = (
    "Initializing a V1 LLM engine (v0.33.0) with config: model='meta-llama/Llama-3.1-8B-Instruct', speculative_config="
    "SpeculativeConfig(method='eagle3', model='yuhuili/EAGLE3-LLaMA3.1-Instruct-8B', num_spec_tokens=3), "
    "dtype=torch.bfloat16, enforce_eager=False\n"
)
LAUNCH = (
    "sglang serve --model-path m --speculative-algorithm EAGLE3 --speculative-num-steps {} --speculative-eagle-topk {} "
)
LAUNCH += "--speculative-num-draft-tokens {}"
