"""Mutation fuzzing of everything that reads files or words of others: `python -m tests.fuzzing TARGET COUNT [SEED]`.

A reader may refuse an input with InputError. Any other exception, 10 s for one input, or 1 GB of memory is a failure:
the input is kept under tests/fuzz_cases, where a test reads it ever after.
"""

import contextlib
import hashlib
import io
import json
import os
import random
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path

from labkit.errors import InputError

CASES = Path(__file__).parent / "fuzz_cases"
LIMIT_S, LIMIT_BYTES = 10, 1 << 30
TOKENS = [
    *(b'"', b"{", b"[", b"}", b"]", b",", b":", b"\\", b"\n", b"\r\n", b"\x00", b"\xff\xfe", b"\x1f\x8b"),
    *(b"-1", b"0", b"1e400", b"NaN", b"-Infinity", b"null", b"true", b"9" * 25, b"1" * 5000, b"-0.0", b"1e-320"),
    *(b"\xe2\x80\xa8", b"\x1b[31m", b"=", b"..", b"4k", b"|", b"[[[[", b'{"a":' * 30, b"../../x", b"\xef\xbb\xbf"),
]  # fmt: skip
_PLACE = re.compile(r'File ".*labkit/.*", line \d+')
_NUMBER = re.compile(rb"-?\d+(\.\d+)?")


def mutate(seeds: list[bytes], draw: random.Random) -> bytes:
    """One of the seeds with one to eight changes."""
    data = bytearray(draw.choice(seeds))
    for _ in range(draw.randint(1, 8)):
        place, kind = draw.randint(0, len(data)), draw.randrange(9)
        end = min(len(data), place + draw.choice([1, 2, 4, 8, 32, 256]))
        if kind == 0 and data:
            data[min(place, len(data) - 1)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[place:end] = bytes(draw.choice([0, 255, 127, 128]) for _ in range(end - place))
        elif kind == 2:
            del data[place:end]
        elif kind == 3:
            data[place:place] = data[place:end] * draw.choice([1, 2, 50])
        elif kind == 4:
            data[place:place] = draw.choice(TOKENS)
        elif kind == 5:
            data[place:end] = draw.choice(TOKENS)
        elif kind == 6:
            other = draw.choice(seeds)
            cut = draw.randint(0, len(other))
            data[place:end] = other[cut : cut + 256]
        elif kind == 7 and (found := list(_NUMBER.finditer(data[place : place + 400]))):
            match = draw.choice(found)
            data[place + match.start() : place + match.end()] = draw.choice(TOKENS[13:24])
        elif kind == 8 and draw.random() < 0.3:
            del data[place:]
        del data[1 << 20 :]
    return bytes(data)


# ---- targets: the seeds, and what reads one input in a folder of its own


def _importer_seeds() -> list[bytes]:
    from tests.engine_forms import CAPTURES, DECODE, FORMS

    captured = [capture(DECODE) for capture in CAPTURES.values()]
    texts = [text + "\n" for text, _ in FORMS.values()]
    return [part if isinstance(part, bytes) else part.encode() for part in texts + captured] + [
        "\n".join(texts).encode()
    ]


def _import(data: bytes, folder: Path) -> None:
    from labkit.engines.diagnose import diagnose
    from labkit.engines.importing import Reader
    from labkit.engines.report import render, summary
    from labkit.engines.stored import write

    (folder / "x").write_bytes(data)
    reader = Reader()
    records = list(reader.read(folder / "x"))
    json.dumps([record.to_dict() for record in records], allow_nan=False)
    summary(records)
    list(write(records, folder / "x.parquet", lambda record: record.to_dict()))
    if records:
        render(diagnose(iter(records), reader.server))


def _trace_seeds() -> list[bytes]:
    from tests.test_engines_trace import sglang_step, vllm_step

    steps = [[e for i in range(4) for e in step(1600 * i)] for step in (sglang_step, vllm_step)]
    return [
        json.dumps({"schemaVersion": 1, "traceEvents": events}, indent=i).encode()
        for events in steps
        for i in (None, 1)
    ]


def _trace(data: bytes, folder: Path) -> None:
    from labkit.engines.diagnose import diagnose_trace
    from labkit.engines.report import render
    from labkit.engines.trace import is_trace, read_steps

    (folder / "x").write_bytes(data)
    is_trace(folder / "x")
    steps = list(read_steps(folder / "x")[0])
    json.dumps(steps, allow_nan=False)
    render(diagnose_trace(steps))


_RUN = "20260131T120000Z-1a2b3c"


@cache
def _run_files() -> tuple[bytes, bytes, bytes]:
    """Parquet, sidecar and journal of a small run."""
    from labkit.sweep import grid, run_sweep
    from tests import sweep_points

    with tempfile.TemporaryDirectory() as name:
        options = {"experiment": "loop", "out_dir": name, "executor": "in-process", "progress": False}
        path = run_sweep(grid(context_len=[1, 2], batch_size=1), sweep_points.measure, **options).path
        return path.read_bytes(), path.with_suffix(".json").read_bytes(), path.with_suffix(".jsonl").read_bytes()


def _run(data: bytes, folder: Path) -> None:
    """The first byte says which of the three files is the mutated one."""
    from labkit.check import check_run
    from labkit.journal import open_journal
    from labkit.parquet import read_table
    from labkit.results import file_digest, load_runs

    place = folder / "loop" / "x"
    place.mkdir(parents=True, exist_ok=True)
    which, content = data[:1], data[1:]
    for suffix, own, whole in zip((".parquet", ".json", ".jsonl"), (b"P", b"S", b"J"), _run_files(), strict=True):
        (place / f"{_RUN}{suffix}").write_bytes(content if which == own else whole)
    path = place / f"{_RUN}.parquet"
    [str(finding) for finding in check_run(folder)]
    if which == b"P":
        sidecar = json.loads(_run_files()[1]) | {"run_id": _RUN, "sha256": file_digest(path)}
        path.with_suffix(".json").write_text(json.dumps(sidecar))
        [str(finding) for finding in check_run(folder)]
        read_table(path)
        load_runs("loop", path)
    elif which == b"J":
        with open_journal(path.with_suffix(".jsonl")) as journal:
            list(journal.records())
    else:
        load_runs("loop", path)


def _run_seeds() -> list[bytes]:
    return [mark + content for mark, content in zip((b"P", b"S", b"J"), _run_files(), strict=True)]


_GRIDS = (
    "context_len=512,4k",
    "k=0..7",
    "temperature=0,0.7",
    "backend=sdpa,per_token",
    "q_len=1,8",
    "X,1.5,2",
    "20m",
    "2.5",
)


def _grid(data: bytes, folder: Path) -> None:
    from labkit.axes import parse_axes, parse_size
    from labkit.decide.verdict import parse_length
    from labkit.experiments import acceptance, attention, loop
    from labkit.experiments.launch import parse_duration

    text = data[:4096].decode("utf-8", "surrogateescape")
    for parse in (parse_size, parse_duration, parse_length, attention.heads_of):
        _refused(parse, text)
    for module in (attention, loop, acceptance):
        _refused(lambda module=module: module.points("ci", **parse_axes(text.split(" "), module.PRESETS["ci"])))


def _refused(function: Callable, *arguments: object) -> None:
    try:
        function(*arguments)
    except InputError as error:
        str(error).encode("utf-8", "backslashreplace")


def _gguf_seeds() -> list[bytes]:
    import numpy as np
    from gguf import GGUFWriter

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "x.gguf"
        writer = GGUFWriter(path, "llama")
        for add, value in (
            (writer.add_block_count, 1), (writer.add_context_length, 64), (writer.add_embedding_length, 8),
            (writer.add_feed_forward_length, 8), (writer.add_head_count, 2), (writer.add_head_count_kv, 1),
            (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_rope_freq_base, 1e4), (writer.add_vocab_size, 3),
            (writer.add_bos_token_id, 0), (writer.add_eos_token_id, 1), (writer.add_tokenizer_model, "gpt2"),
            (writer.add_tokenizer_pre, "smollm"), (writer.add_token_list, ["a", "b", "ab"]),
            (writer.add_token_merges, ["a b"]), (writer.add_token_types, [1, 3, 1]),
            (writer.add_chat_template, "{{x}}"),
        ):  # fmt: skip
            add(value)
        for tensor in ("token_embd.weight", "blk.0.attn_q.weight", "output_norm.weight"):
            writer.add_tensor(tensor, np.ones((3, 8) if "embd" in tensor else (8, 8), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return [path.read_bytes()]


def _gguf(data: bytes, folder: Path) -> None:
    from labkit.models.gguf import _write_folder

    (folder / "x.gguf").write_bytes(data)
    _write_folder(folder / "x.gguf", folder)


TARGETS: dict[str, tuple[Callable[[], list[bytes]], Callable[[bytes, Path], None]]] = {
    "importer": (_importer_seeds, _import),
    "trace": (_trace_seeds, _trace),
    "run": (_run_seeds, _run),
    "grid": (lambda: [text.encode() for text in _GRIDS] + [" ".join(_GRIDS[:5]).encode()], _grid),
    "gguf": (_gguf_seeds, _gguf),
}


def _too_slow(signum: int, frame: object) -> None:
    raise TimeoutError(f"more than {LIMIT_S} s for one input")


def attempt(target: str, data: bytes, folder: Path) -> str | None:
    """None, or the traceback of what should not have happened."""
    signal.signal(signal.SIGALRM, _too_slow)
    signal.alarm(LIMIT_S)
    try:
        TARGETS[target][1](data, folder)
    except InputError:
        return None
    except Exception:
        return traceback.format_exc()
    finally:
        signal.alarm(0)
    return None


def _memory(field: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at its peak."""
    return 1024 * int(re.findall(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())[0])


def fuzz(target: str, count: int, seed: int = 0) -> list[str]:
    """Tracebacks of the failures among ``count`` mutated inputs, each kept as a case; at most one of a kind."""
    seeds, draw, failures = TARGETS[target][0](), random.Random(f"{target} {seed}"), dict[str, str]()
    inputs = (mutate(seeds, draw) for _ in range(count))
    if target == "run":  # the mark stays
        inputs = (draw.choice(seeds)[:1] + mutate([part[1:] for part in seeds], draw) for _ in range(count))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: other tests of this process have loaded much
    before = _memory("VmRSS")
    with tempfile.TemporaryDirectory(prefix="labkit-fuzz-") as name:
        for data in seeds:  # what is mutated is read as it is; imports and first calls are not timed
            with contextlib.suppress(InputError):
                TARGETS[target][1](data, Path(name))
        for data in inputs:
            if (problem := attempt(target, data, Path(name))) is None:
                continue
            kind = _PLACE.findall(problem)[-1] + problem.strip().splitlines()[-1][:12]
            if kind not in failures:
                failures[kind] = problem
                (CASES / f"{target}-{hashlib.sha256(data).hexdigest()[:8]}").write_bytes(data)
    used = _memory("VmHWM") - before
    return list(failures.values()) + ([f"{used >> 20} MiB were used"] if used > LIMIT_BYTES else [])


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    printed, sys.stdout = sys.stdout, io.StringIO()
    problems = fuzz(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    print(*problems, f"{sys.argv[1]}: {len(problems)} failures", sep="\n", file=printed)
    sys.exit(bool(problems))
