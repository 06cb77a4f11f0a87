"""The correctness matrix of an attention backend: odd sizes, ragged batches, permuted pages, poisoned outputs."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from labkit.attention.api import DEFAULT_SPEC, AttentionSpec, PreparedAttention, prepare
from labkit.attention.inputs import WITH_LSE, check, make_inputs
from labkit.attention.locate import locate
from labkit.errors import Unsupported, WrongResult
from labkit.kv_cache import PagedKVCache
from labkit.progress import progress
from labkit.shapes import AttentionShape

Q_LENS, KV_LENS, PAGE_SIZES = (1, 2, 5, 17, 64), (1, 127, 128, 4097), (1, 16, 64)
GROUP_SIZES, HEAD_DIMS, NUM_KV_HEADS = (1, 4, 6, 8), (64, 128, 256), 2
DTYPES = (("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32"), ("bfloat16", "float8_e4m3fn"))
MAX_FAULTS = 3


@dataclass
class Checked:
    """What a backend did on a set of shapes: right, wrong (where) or not supported (why, how often)."""

    num_right: int = 0
    faults: list[dict[str, Any]] = field(default_factory=list)
    unsupported: Counter[str] = field(default_factory=Counter)
    worst_error: float = 0.0

    def to_text(self) -> str:
        """One line for the counts, one per reason and per fault."""
        total = self.num_right + len(self.faults)
        right = f"correct on {self.num_right} of {total} shapes, largest error {self.worst_error:.1e}"
        lines = [right if total else "NOT CHECKED: no shape is supported"]
        lines += [f"  not supported, {count} shapes: {reason}" for reason, count in self.unsupported.most_common()]
        lines += [f"  WRONG {fault['shape']}: {fault['where']}; {fault['problem']}" for fault in self.faults]
        return "\n".join(lines)


def full_matrix() -> Iterator[AttentionShape]:
    """Every combination of the sizes above for a ragged batch of three; with pages of 16 also for one request alone.

    The longest request has the named number of keys (its new tokens included, so never fewer than q_len); the others
    have about a third of them and the new tokens alone.
    """
    for (q_dtype, kv_dtype), head_dim, group_size, page_size, q_len, kv_len in product(
        DTYPES, HEAD_DIMS, GROUP_SIZES, PAGE_SIZES, Q_LENS, KV_LENS
    ):
        longest = kv_len - q_len
        for contexts in ((longest, longest // 3, 0), (longest,))[: 2 if page_size == 16 else 1] if longest >= 0 else ():
            yield AttentionShape(
                batch_size=len(contexts), q_len=q_len, context_len=contexts, num_qo_heads=group_size * NUM_KV_HEADS,
                num_kv_heads=NUM_KV_HEADS, head_dim=head_dim, page_size=page_size, q_dtype=q_dtype, kv_dtype=kv_dtype,
            )  # fmt: skip


def check_shapes(backend: str, shapes: Sequence[AttentionShape], *, device: str, page_order: str) -> Checked:
    """Compare a backend with the oracle on each shape: output, and lse where it has one.

    Stops after `MAX_FAULTS` wrong shapes. Progress goes to standard error.

    Raises BackendUnavailable when it cannot run on this machine at all, InputError when there is no such backend.
    """
    found, bar = Checked(), progress(len(shapes), f"check {backend}")
    for seed, shape in enumerate(shapes):
        bar.update()
        generator = torch.Generator().manual_seed(seed)
        q, cache = make_inputs(shape, generator=generator, device=device, page_order=page_order)
        try:
            call, spec = _prepared(backend, q, cache)
            found.worst_error = max(found.worst_error, check(call, cache, spec))
            found.num_right += 1
        except Unsupported as error:
            found.unsupported[str(error).removesuffix(f" (asked: {shape})").rpartition("cannot do this: ")[2]] += 1
        except WrongResult as error:
            where: dict[str, Any] = {"where": "the output is right, the lse (natural logarithm) is not"}
            if ": lse error" not in str(error):
                fault = locate(backend, q, cache, spec)
                where = {"where": str(fault)} | fault._asdict()
            found.faults.append({"shape": str(shape), "problem": str(error)} | where)
            if len(found.faults) >= MAX_FAULTS:
                break
    bar.close()
    return found


def _prepared(backend: str, q: torch.Tensor, cache: PagedKVCache) -> tuple[PreparedAttention, AttentionSpec]:
    """With lse; without where that is what it does not support."""
    try:
        return prepare(q, cache, backend=backend, spec=WITH_LSE), WITH_LSE
    except Unsupported:
        return prepare(q, cache, backend=backend), DEFAULT_SPEC
