"""Inputs that show a mistake, and the check of a call against the oracle. No timing without it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.attention.api import DEFAULT_SPEC, AttentionSpec, PreparedAttention, max_error, prepare
from labkit.attention.reference import eager, oracle
from labkit.errors import WrongResult
from labkit.kv_cache import PagedKVCache
from labkit.shapes import AttentionShape

GARBAGE = 400.0  # in slots without a token: finite in every dtype, ruinous when attended to
FLOAT8_SCALES = {"k_scale": 0.5, "v_scale": 2.0}  # of a quantised cache: not 1, and not the same
MIN_TOKENS_PER_PLANT = 16
PLANTED_VALUE = 8.0
LSE_LIMIT = 1e-4
WITH_LSE = AttentionSpec(return_lse=True)


def make_inputs(
    shape: AttentionShape,
    *,
    generator: torch.Generator,
    device: str | torch.device = "cpu",
    page_order: str = "permuted",
    num_layers: int = 1,
) -> tuple[Tensor, PagedKVCache]:
    """Seeded `q` and a filled cache in which every page matters and every unused slot is ruinous.

    Each page (each 16 tokens for smaller pages) holds one key that dominates the softmax of one query row of its
    group, with a value in one dimension of its own, and so does each key at the causal edge: a page, split, head or
    mask mistake moves the output by far more than rounding. The `q_len` new tokens are in the cache, and its
    `context_lens` are those of `shape`.

    Returns q ``[batch_size, q_len, num_qo_heads, head_dim]`` in ``shape.q_dtype``; cache in ``shape.kv_dtype``; one
    spare page per request holds garbage.
    """
    q_dtype, kv_dtype = getattr(torch, shape.q_dtype), getattr(torch, str(shape.kv_dtype))
    size = (shape.batch_size, shape.q_len, shape.num_qo_heads, shape.head_dim)
    q = torch.randn(size, generator=generator, device=generator.device).to(device, q_dtype)
    cache = PagedKVCache(
        num_layers=num_layers,
        batch_size=shape.batch_size,
        max_context_len=max(shape.kv_lens) + shape.page_size,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        page_size=shape.page_size,
        dtype=kv_dtype,
        device=device,
        page_order=page_order,
        generator=generator,
        shared_prefix_len=shape.shared_prefix_len,
    )
    if shape.kv_dtype == "float8_e4m3fn":
        cache.k_scale, cache.v_scale = FLOAT8_SCALES["k_scale"], FLOAT8_SCALES["v_scale"]
    garbage = torch.full((shape.head_dim,), GARBAGE, device=device)
    garbage[::2] *= -1
    for storage in (cache.k, cache.v):
        storage.copy_(garbage.to(kv_dtype).expand(storage.shape))
    for layer in range(num_layers):
        for request, kv_len in enumerate(shape.kv_lens):
            k, v = _request_keys(q[request], kv_len, shape, generator)
            token = torch.arange(kv_len, device=device)
            page = cache.page_table[request].long()[token // shape.page_size]
            cache.k[layer][page, token % shape.page_size] = (k / cache.k_scale).to(kv_dtype)
            cache.v[layer][page, token % shape.page_size] = (v / cache.v_scale).to(kv_dtype)
    cache.advance(shape.context_lens)
    return q, cache


def _request_keys(q: Tensor, kv_len: int, shape: AttentionShape, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """K and V of one request, ``[kv_len, num_kv_heads, head_dim]``: normals with the planted tokens among them."""
    size = (kv_len, shape.num_kv_heads, shape.head_dim)
    k, v = (torch.randn(size, generator=generator, device=generator.device).to(q.device) for _ in range(2))
    tokens_per_plant = max(shape.page_size, MIN_TOKENS_PER_PLANT)
    start = torch.arange(0, kv_len, tokens_per_plant, device=q.device)
    room = (kv_len - start).clamp(max=tokens_per_plant)
    share = torch.rand(len(start), generator=generator, device=generator.device).to(q.device)
    position = start + (share * room).long().clamp(max=room - 1)
    plant = torch.arange(len(start), device=q.device)
    num_rows = shape.q_len * shape.group_size
    rows = q.float().view(shape.q_len, shape.num_kv_heads, shape.group_size, shape.head_dim)
    # Ten times the weight of all the normals together, shared by the plants of a row.
    logit = math.log(max(16.0 * kv_len * num_rows / len(start), 64.0))
    keys = rows * (logit * math.sqrt(shape.head_dim) / rows.square().sum(-1, keepdim=True))
    keys = keys.transpose(1, 2)
    k[position] = keys[plant % num_rows // shape.group_size, plant % shape.group_size]
    v[position] = 0.0
    sign = torch.randint(2, plant.shape, generator=generator, device=generator.device).to(q.device) * 2.0 - 1.0
    # Each KV head has its value in another dimension: the right keys with a neighbour's values must show.
    head = torch.arange(shape.num_kv_heads, device=q.device)
    dim = (plant[:, None] // num_rows + head) % shape.head_dim
    v[position[:, None], head, dim] = (PLANTED_VALUE * sign)[:, None]
    # Along the causal edge each new token dominates its own row, which sees it, and the row before, which does not.
    edge = torch.arange(shape.q_len, device=q.device)
    own = keys[edge, edge % shape.group_size]
    k[kv_len - shape.q_len :] = own
    k[kv_len - shape.q_len + 1 :] += own[:-1]
    v[kv_len - shape.q_len :] = 0.0
    v[kv_len - shape.q_len + edge[:, None], head, (edge[:, None] + head) % shape.head_dim] = PLANTED_VALUE
    return k, v


def random_tree(shape: AttentionShape, generator: torch.Generator) -> Tensor:
    """Ancestor masks of random draft trees, int64 ``[batch_size, q_len]``: each token hangs below an earlier one."""
    trees = []
    for _ in range(shape.batch_size):
        ancestors = [1]
        for token in range(1, shape.q_len):
            parent = int(torch.randint(token, (), generator=generator, device=generator.device))
            ancestors.append(ancestors[parent] | 1 << token)
        trees.append([mask - (1 << 64) if mask >> 63 else mask for mask in ancestors])  # bit 63 is the sign
    return torch.tensor(trees, dtype=torch.int64, device=generator.device)


def verify_backend(
    name: str,
    shape: AttentionShape,
    *,
    generator: torch.Generator,
    device: str | torch.device = "cpu",
    page_order: str = "permuted",
    spec: AttentionSpec = WITH_LSE,
) -> float:
    """Run a backend on `make_inputs` and return its error; see `check`."""
    q, cache = make_inputs(shape, generator=generator, device=device, page_order=page_order)
    return check(prepare(q, cache, backend=name, spec=spec), cache, spec)


@dataclass(frozen=True)
class Expected:
    """What a call over `q` and layer 0 of a cache should give, made once for all backends.

    out, lse : Of the oracle, float64.
    limits : Largest allowed error per request: twice that of eager attention in the same dtype, plus rounding: one
        rounding of the output and 128 of float32 (sums, fast exponentials).
    """

    out: Tensor
    lse: Tensor
    limits: list[float]


def expect(q: Tensor, cache: PagedKVCache, spec: AttentionSpec = DEFAULT_SPEC) -> Expected:
    """The oracle's result on these inputs, and how far from it a backend may be."""
    out, lse = oracle(q, cache, 0, spec)
    plain = eager(q, cache, 0, spec)
    rounding = torch.finfo(q.dtype).eps + 128 * torch.finfo(torch.float32).eps
    return Expected(out, lse, [2 * max_error(plain[r], out[r]) + rounding for r in range(len(out))])


def check(call: PreparedAttention, cache: PagedKVCache, spec: AttentionSpec, expected: Expected | None = None) -> float:
    """Run a prepared call on layer 0 and compare it with the oracle on the same inputs.

    The lse passes below 1e-4; in 16 bits a quarter of the dtype's rounding is added, since a kernel may sum the
    weights as it has rounded them for the product with V.

    expected : `expect` of the same inputs and spec; made when None.

    Returns the largest ``max|out - ref| / max|ref|`` of all requests.

    Raises WrongResult: names the request, query row and head that are furthest off.
    """
    call()
    expected = expect(call.q, cache, spec) if expected is None else expected
    errors = []
    for request, limit in enumerate(expected.limits):
        out, ref = call.out[request], expected.out[request]
        errors.append(max_error(out, ref))
        if errors[-1] > limit:
            _wrong(call.backend, "error", errors[-1], limit, request, (out - ref).abs().amax(-1))
        if call.lse is not None:
            lse, lse_ref = call.lse[request], expected.lse[request]
            lse_error = max_error(lse, lse_ref)
            top = lse_ref.nan_to_num(neginf=0.0).abs().max().clamp(min=1.0).item()
            lse_limit = LSE_LIMIT + torch.finfo(call.q.dtype).eps / 4 / top
            if lse_error > lse_limit:
                difference = torch.where(lse == lse_ref, 0.0, lse - lse_ref)
                _wrong(call.backend, "lse error", lse_error, lse_limit, request, difference)
    return max(errors)


def _wrong(backend: str, what: str, error: float, limit: float, request: int, difference: Tensor) -> None:
    """Raise with the worst entry of `difference` ``[q_len, num_qo_heads]``."""
    worst = int(difference.abs().nan_to_num(nan=math.inf).argmax())
    row, head = divmod(worst, difference.shape[1])
    where = f"request {request}, query row {row}, query head {head}"
    size = "is not finite (NaN, infinity or rows left unwritten)" if math.isinf(error) else f"{error:.2e}"
    above = "" if math.isinf(error) else f" is above {limit:.2e}"
    raise WrongResult(f"backend {backend!r}: {what} {size}{above}, worst at {where}")
