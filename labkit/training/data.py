"""Answers of a target to train heads on: generated in large batches, kept in a file, cut where they repeat."""

import io
import os
import random
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from labkit.accept import sampling_probs
from labkit.acceptance import MAX_REPEATED
from labkit.errors import InputError
from labkit.kv_cache import PagedKVCache
from labkit.models.decoder import Decoder
from labkit.paths import write_whole

_CACHE_SHARE, _MAX_ROWS = 0.5, 4096  # of the free memory and of the rows of a batch's cache, at most
_PREFILL_TOKENS = 32_768  # of a pass
_MIN_TOKENS = 16  # of an answer that is learnt from


@dataclass(frozen=True)
class Answer:
    """A prompt and what the target made of it, in token ids."""

    prompt_ids: list[int]
    output_ids: list[int]


def generate(
    decoder: Decoder,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    backend: str,
    seed: int,
    sampled_share: float = 0.0,
    temperature: float = 1.0,
    deadline: float = float("inf"),
) -> list[Answer]:
    """Answers of the target in large batches, greedy but for a share of sampled ones. Prompts of like length share one.

    deadline : `time.monotonic` at which no further batch is begun; the rest is left out.
    """
    order = sorted((ids for ids in prompts if ids), key=len)
    cache_tokens = _CACHE_SHARE * free_memory(decoder.device) / decoder.shape.kv_bytes_per_token(decoder.dtype)
    random.Random(seed).shuffle(blocks := list(_blocks(order, max_new_tokens, cache_tokens)))
    generator = torch.Generator(decoder.device).manual_seed(seed)
    answers: list[Answer] = []
    for block in blocks:
        if time.monotonic() > deadline:
            break
        options = (max_new_tokens, stop_token_ids, backend, sampled_share, temperature, generator)
        answers += _generate_batch(decoder, block, *options)
        print(f"  {len(answers)} answers", file=sys.stderr)
    return answers


def free_memory(device: torch.device) -> float:
    """Bytes that are free on a GPU; on the host half of all it has."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps for later counts as free
        return torch.cuda.mem_get_info(device)[0]
    return 0.5 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _blocks(order: list[list[int]], max_new_tokens: int, cache_tokens: float) -> Iterator[list[list[int]]]:
    """Prompts that the cache holds together."""
    block: list[list[int]] = []
    for ids in order:
        if block and (len(block) == _MAX_ROWS or (len(block) + 1) * (len(ids) + max_new_tokens) > cache_tokens):
            yield block
            block = []
        block.append(ids)
    if block:
        yield block


def _generate_batch(
    decoder: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    backend: str,
    sampled_share: float,
    temperature: float,
    generator: torch.Generator,
) -> list[Answer]:
    device, count = decoder.device, len(prompts)
    room = min(max(map(len, prompts)) + max_new_tokens, decoder.shape.max_context_len)
    cache = decoder.new_cache(count, room)
    last = _prefill(decoder, cache, prompts)
    output = torch.zeros(count, max_new_tokens, dtype=torch.int64, device=device)
    stops = torch.tensor(stop_token_ids, device=device)
    sampled = torch.rand(count, generator=generator, device=device) < sampled_share
    drawing = sampled.nonzero()[:, 0]
    done = torch.zeros(count, dtype=torch.bool, device=device)
    rows, view = torch.arange(count, device=device), cache
    num_steps = min(max_new_tokens, room - max(map(len, prompts)))
    for step in range(num_steps):
        logits = decoder.forward(last, view, backend=backend, logits="last")[:, 0]
        token = logits.argmax(dim=-1)
        if len(drawing):
            probs = sampling_probs(logits[drawing], temperature=temperature, top_p=1.0)
            token[drawing] = torch.multinomial(probs, 1, generator=generator)[:, 0]
        output[rows, step] = token
        done[rows] |= torch.isin(token, stops)
        last = token[:, None]
        if step % 32 == 31:  # finished rows leave now and then: each look waits for the device
            kept = ~done[rows]
            if not bool(kept.any()):
                break
            rows, last = rows[kept], last[kept]
            view, drawing = cache.rows(rows.tolist()), sampled[rows].nonzero()[:, 0]
    rows_out = output[:, :num_steps].tolist()
    return [Answer(ids, _cut(row, stop_token_ids)) for ids, row in zip(prompts, rows_out, strict=True)]


def _prefill(decoder: Decoder, cache: PagedKVCache, prompts: list[list[int]]) -> Tensor:
    """All but the last token of every prompt into the cache, padded in parts; the last tokens ``[batch_size, 1]``."""
    longest = max(map(len, prompts)) - 1
    part = max(1, _PREFILL_TOKENS // max(longest, 1))
    for start in range(0, len(prompts) if longest else 0, part):
        some = prompts[start : start + part]
        width = max(max(map(len, some)) - 1, 1)
        padded = [ids[:-1] + [0] * (width - len(ids) + 1) for ids in some]
        view = cache.rows(range(start, start + len(some)))
        decoder.forward(torch.tensor(padded, device=decoder.device), view, backend="sdpa", logits="last")
        view.truncate([len(ids) - 1 for ids in some])
    return torch.tensor([[ids[-1]] for ids in prompts], device=decoder.device)


def _cut(row: list[int], stop_token_ids: Sequence[int]) -> list[int]:
    """Up to the first stop token, which stays. Zeros behind a row that left early come after its stop token."""
    end = next((place for place, token in enumerate(row) if token in stop_token_ids), len(row) - 1)
    return row[: end + 1]


def write_answers(path: Path, answers: Sequence[Answer]) -> None:
    """Answers in one compressed file of token ids and lengths, whole or not at all."""
    rows = [ids for answer in answers for ids in (answer.prompt_ids, answer.output_ids)]
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    tokens = np.fromiter((token for ids in rows for token in ids), dtype=np.int32)
    np.savez_compressed(buffer, tokens=tokens, lens=np.array([len(ids) for ids in rows]))
    write_whole(path, buffer.getvalue())


def read_answers(path: Path) -> list[Answer]:
    """What `write_answers` wrote. Raises InputError: the file is no such file."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            rows = np.split(stored["tokens"], stored["lens"].cumsum()[:-1])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: wanted answers as `labkit.training` writes them, got {error}") from error
    lists = [ids.tolist() for ids in rows]
    return [Answer(*pair) for pair in zip(lists[::2], lists[1::2], strict=True)]


def usable(answers: Sequence[Answer]) -> list[Answer]:
    """Answers cut before over 20% of their 4-grams occurred in them before, those that still have 16 tokens."""
    kept = []
    for answer in answers:
        seen: set[tuple[int, ...]] = set()
        end = repeated = 0
        for last in range(4, len(answer.output_ids) + 1):
            gram = tuple(answer.output_ids[last - 4 : last])
            repeated += gram in seen
            seen.add(gram)
            if repeated <= MAX_REPEATED * (last - 3):
                end = last
        if end >= _MIN_TOKENS:
            kept.append(Answer(answer.prompt_ids, answer.output_ids[:end]))
    return kept
