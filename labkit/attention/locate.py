"""Where a wrong backend goes wrong: the request, query row, head and first key tile that get the wrong weight."""

from typing import NamedTuple

import torch
from torch import Tensor

from labkit.attention.api import AttentionSpec, prepare
from labkit.attention.reference import oracle
from labkit.kv_cache import PagedKVCache

TILE = 64


class Fault(NamedTuple):
    """The query row that is furthest off. `key_tile` None: every tile has its weight, the values are wrong."""

    request: int
    query_row: int
    head: int
    key_tile: int | None

    def __str__(self) -> str:
        where = f"request {self.request}, query head {self.head}, query row {self.query_row}"
        if self.key_tile is None:
            return f"{where}: the {TILE}-key tiles share the weight rightly; look at values, scales, the sum of weights"
        first = self.key_tile * TILE
        return f"{where}: first wrong key tile {self.key_tile} (keys {first} to {first + TILE - 1})"


def locate(backend: str, q: Tensor, cache: PagedKVCache, spec: AttentionSpec) -> Fault:
    """Find the fault of a backend that `labkit.attention.inputs.check` calls wrong on these inputs.

    V is replaced by indicators of the 64-key tiles, so that the output is the weight that reaches each tile; it is
    compared with the oracle's. A wrong tile changes the sum that all weights are divided by, so a row is compared up
    to the factor that most of its tiles agree on. Arguments and errors as `prepare`; nothing is changed.
    """
    got, wanted = _tile_weights(backend, q, cache, spec)
    tolerance = max(8 * torch.finfo(q.dtype).eps, 2 * torch.finfo(cache.dtype).eps, 1e-3)
    smallest = 0.02 / wanted.shape[-1]  # a fiftieth of a tile's share when all weigh the same
    wrong = _is_wrong(got, wanted, tolerance, smallest)
    if not wrong.any():
        # The weights are right: the row is the one whose output differs most.
        call = prepare(q, cache, backend=backend, spec=spec)
        call()
        difference = (call.out - oracle(q, cache, 0, spec)[0]).abs().amax(-1)
        return Fault(*_position(difference), key_tile=None)
    excess = torch.where(wrong, (got - wanted).abs().nan_to_num(nan=torch.inf), 0.0)
    request, row, head = _position(excess.sum(-1))
    return Fault(request, row, head, int(wrong[request, row, head].int().argmax()))


def _position(score: Tensor) -> tuple[int, int, int]:
    """Indices of the largest entry of ``[batch_size, q_len, num_qo_heads]``; NaN counts as largest."""
    best = int(score.nan_to_num(nan=torch.inf).argmax())
    request, rest = divmod(best, score[0].numel())
    return (request, *divmod(rest, score.shape[2]))


def _is_wrong(got: Tensor, wanted: Tensor, tolerance: float, smallest: float) -> Tensor:
    """Tiles whose weight is not that of the oracle up to a factor per row; all ``[..., num_tiles]``."""
    counts = wanted > smallest
    factors = torch.where(counts, got / wanted.clamp(min=smallest), torch.nan)
    wrong = torch.ones_like(counts)
    fewest = torch.full(got.shape[:-1], torch.inf, dtype=torch.float64, device=got.device)
    # Every tile's own factor is a candidate; 1 goes first and wins ties.
    for index in range(-1, got.shape[-1]):
        factor = torch.ones_like(fewest) if index < 0 else factors[..., index]
        expected = factor[..., None] * wanted
        off = ~((got - expected).abs() <= tolerance * expected + smallest)  # NaN is off
        # Where one factor hides a wrong tile another shows it: what counts is how many tiles disagree.
        # Weight that reaches no tile at all cannot be put down to the sum.
        better = (off.sum(-1) < fewest) & factor.isfinite() & ((got.sum(-1) > 0.5) | (factor == 1))
        fewest = torch.where(better, off.sum(-1).double(), fewest)
        wrong = torch.where(better[..., None], off, wrong)
    return wrong


def _tile_weights(backend: str, q: Tensor, cache: PagedKVCache, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Weight per key tile, of the backend and of the oracle, float64 ``[batch_size, q_len, num_qo_heads, num_tiles]``.

    An output has head_dim elements, so as many tiles are looked at in one pass. Each KV head counts its tiles from
    another element, so that V of a wrong head cannot pass for the right one.
    """
    twin, head_dim = cache.clone(), q.shape[-1]
    twin.v_scale = 1.0
    num_tiles = -(-(max(cache.context_lens) + q.shape[1]) // TILE)
    position = torch.arange(twin.max_context_len, device=q.device)
    heads = torch.arange(twin.num_kv_heads, device=q.device)
    slot = twin.page_table.long()[:, position // twin.page_size], position % twin.page_size
    of_head = torch.arange(q.shape[2], device=q.device) // (q.shape[2] // twin.num_kv_heads)
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for first in range(0, num_tiles, head_dim):
        inside = (position // TILE >= first) & (position // TILE < first + head_dim)
        element = (position[:, None] // TILE - first + heads * (head_dim // len(heads))) % head_dim
        indicator = torch.nn.functional.one_hot(element, head_dim) * inside[:, None, None]
        for page in slot[0]:
            twin.v[0, page, slot[1]] = indicator.to(twin.dtype)
        call = prepare(q, twin, backend=backend, spec=spec)
        call()
        wanted = oracle(q, twin, 0, spec)[0]
        tiles = torch.arange(min(head_dim, num_tiles - first), device=q.device)
        back = (tiles + of_head[:, None] * (head_dim // len(heads))) % head_dim
        for part, out in zip(parts, (call.out.double(), wanted), strict=True):
            part.append(out.gather(-1, back.expand(*out.shape[:3], len(tiles))))
    return torch.cat(parts[0], -1), torch.cat(parts[1], -1)
