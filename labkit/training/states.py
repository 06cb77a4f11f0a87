"""What the target makes of its text, computed once and kept on the device: a step of training then runs no target."""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.models.decoder import Decoder
from labkit.models.layers import Taps
from labkit.training import heads
from labkit.training.data import Answer

_PASS_TOKENS = 32_768  # of a pass of the target, padding included
_SCALE_ANSWERS = 64  # that the usual size of a state's dimensions is taken from
_WINDOW_STEP, _WIDTH_STEP, _LONG_STEP = 64, 128, 1024  # to which batches are padded; long ones begin at `_LONG_STEP`


class BatchSize(NamedTuple):
    """Sequences of a batch, their padded tokens, and padded entries of the answers that are learnt from."""

    num_rows: int
    width: int
    window: int


def state_bytes(answer: Answer, decoder: Decoder, num_taps: int) -> int:
    """Bytes that one answer and its prompt take in a `StateStore`."""
    num_tokens = len(answer.prompt_ids) + len(answer.output_ids)
    states = num_taps * num_tokens + len(answer.output_ids) - 1
    return 8 * num_tokens + states * decoder.shape.hidden_size * decoder.activation_dtype.itemsize


def parts_within(limit: float, answers: Sequence[Answer], decoder: Decoder, num_taps: int) -> list[list[Answer]]:
    """The answers in parts, each in a `StateStore` of at most `limit` bytes (or a single answer)."""
    found: list[list[Answer]] = [[]]
    held = 0
    for answer in answers:
        size = state_bytes(answer, decoder, num_taps)
        if found[-1] and held + size > limit:
            found.append([])
            held = 0
        found[-1].append(answer)
        held += size
    return found


def state_sizes(decoder: Decoder, taps: Sequence[int], answers: Sequence[Answer]) -> Tensor:
    """Root mean square of each dimension of the tapped states ``[taps * hidden_size]``.

    A few dimensions of the residual stream are a thousand times the others; heads learn from states divided by these.
    """
    states = [rows.float() for _, rows, _ in _passes(decoder, taps, answers[:_SCALE_ANSWERS])]
    return torch.cat(states).square().mean(dim=0).sqrt().clamp(min=1e-4)


class StateStore:
    """Tokens and states of some answers in flat tensors, one sequence behind another.

    sizes : what states are divided by, as `state_sizes` returns it.
    head_rows : ``[draft vocabulary, hidden_size]``, the rows of the target's output head.
    """

    def __init__(
        self, decoder: Decoder, taps: Sequence[int], answers: Sequence[Answer], sizes: Tensor, head_rows: Tensor
    ):
        self.answers, self.head_rows, self._embed = answers, head_rows, decoder.embed
        device, dtype, hidden = decoder.device, decoder.activation_dtype, decoder.shape.hidden_size
        texts = [[*answer.prompt_ids, *answer.output_ids] for answer in answers]
        # The last row is no sequence: batches that are not full are filled with it.
        lens = torch.tensor([*map(len, texts), 0])
        firsts = torch.tensor([*(len(answer.prompt_ids) - 1 for answer in answers), 0])
        self._starts, self._final_starts = lens.cumsum(0) - lens, torch.zeros_like(lens)
        self._final_starts[1:] = (lens - firsts - 2)[:-1].cumsum(0)
        self._tokens = torch.tensor([token for text in texts for token in text], device=device)
        self._states = torch.empty(len(self._tokens), len(taps) * hidden, dtype=dtype, device=device)
        self._final = torch.empty(int(self._final_starts[-1]), hidden, dtype=dtype, device=device)
        for index, states, final in _passes(decoder, taps, answers):
            start, first = int(self._starts[index]), int(self._final_starts[index])
            self._states[start : start + len(states)] = states / sizes.to(states.dtype)
            kept = final[int(firsts[index]) + 1 : -1]
            self._final[first : first + len(kept)] = kept
        self._lens, self._firsts = lens.to(device), firsts.to(device)
        self._starts, self._final_starts = self._starts.to(device), self._final_starts.to(device)

    def batch(self, rows: Tensor, size: BatchSize) -> heads.Batch:
        """The batch of the answers `rows` int64 ``[num_rows]``, padded; what lies behind a sequence is arbitrary.

        Nothing here waits for the device, so that a graph can be captured.
        """
        device = rows.device
        at = self._starts[rows][:, None] + torch.arange(size.width, device=device)
        at = at.clamp(max=len(self._tokens) - 1)
        token_ids = self._tokens[at]
        places = self._final_starts[rows][:, None] + torch.arange(size.window, device=device)
        final = self._final[places.clamp(max=len(self._final) - 1)]
        probs = F.linear(final, self.head_rows).softmax(dim=-1)  # summed in float32 within
        embedded = self._embed(token_ids).clone()
        taught = probs @ self.head_rows, probs.argmax(dim=-1)
        return heads.Batch(token_ids, self._firsts[rows], self._lens[rows], embedded, self._states[at], *taught)

    def plan(self, tokens_per_batch: int, rng: random.Random) -> Iterator[tuple[list[int], BatchSize]]:
        """One epoch: batches of answers of like length, padded to few sizes, in seeded order."""
        order = list(range(len(self.answers)))
        rng.shuffle(order)  # which of equal ones share a batch
        groups: dict[tuple[int, int], list[int]] = {}
        for index in order:
            answer = self.answers[index]
            length, window = len(answer.prompt_ids) + len(answer.output_ids), len(answer.output_ids) - 1
            step = _WIDTH_STEP if length <= _LONG_STEP else _LONG_STEP
            groups.setdefault((_up(length, step), _up(window, _WINDOW_STEP)), []).append(index)
        batches = []
        for (width, window), members in groups.items():
            size = BatchSize(max(1, tokens_per_batch // width), width, window)
            for start in range(0, len(members), size.num_rows):
                rows = members[start : start + size.num_rows]
                batches.append((rows + [len(self.answers)] * (size.num_rows - len(rows)), size))
        rng.shuffle(batches)
        yield from batches


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


@torch.no_grad()
def _passes(decoder: Decoder, taps: Sequence[int], answers: Sequence[Answer]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each answer's index, its tapped states ``[len, taps * hidden]`` and its normed states ``[len, hidden]``."""
    hidden, layers = decoder.shape.hidden_size, (*taps, decoder.shape.num_layers)
    lens = [len(answer.prompt_ids) + len(answer.output_ids) for answer in answers]
    order = sorted(range(len(answers)), key=lens.__getitem__)
    while order:
        width = _up(lens[order[-1]], 16)
        some = [order.pop() for _ in range(min(len(order), max(1, _PASS_TOKENS // width)))]
        texts = [[*answers[index].prompt_ids, *answers[index].output_ids] for index in some]
        token_ids = torch.tensor([text + [0] * (width - len(text)) for text in texts], device=decoder.device)
        size = (len(texts), width, len(layers) * hidden)
        out = torch.empty(size, dtype=decoder.activation_dtype, device=decoder.device)
        cache = decoder.new_cache(len(texts), width)
        decoder.forward(token_ids, cache, backend="sdpa", logits="last", taps=Taps(layers, out))
        for index, row in zip(some, out, strict=True):
            yield index, row[: lens[index], :-hidden], row[: lens[index], -hidden:]
