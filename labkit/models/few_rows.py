"""Matrix products of a captured forward: our kernel for up to 32 rows, the library's above.

Its tile and splits come from a small rule, chosen from measurements on an H200 over the matrices of three models.
"""

from typing import Any

import torch
from torch import Tensor

from labkit.attention.triton_launch import PRECISION, power_of_two
from labkit.errors import Unsupported
from labkit.models.linear import PlainLinear

MAX_ROWS = 32
BLOCK_N, BLOCK_BYTES = 64, 256  # of each weight row in a tile: rows for a warp group's instruction, 16 KB in flight
MIN_PROGRAMS = 160  # fewer leave SMs of a Hopper without work: then K is split


def num_splits_of(weight: Tensor, num_rows: int) -> int:
    """Parts of the sum over K: the fewest that give enough programs, if they divide it. 1 above `MAX_ROWS` rows."""
    if num_rows > MAX_ROWS:
        return 1
    programs, blocks = -(-weight.shape[0] // BLOCK_N), weight.shape[1] // _block_k(weight)
    num_splits = 1
    while programs * num_splits < MIN_PROGRAMS and num_splits < 8 and blocks % (2 * num_splits) == 0:
        num_splits *= 2
    return num_splits


def _block_k(weight: Tensor) -> int:
    return BLOCK_BYTES // weight.element_size()


class FewRows:
    """``x`` ``[rows, K]`` times ``weight`` ``[N, K]`` transposed, into float32 parts ``[num_splits, rows, N]``.

    Raises Unsupported: float8 weights with more than `MAX_ROWS` rows.
    """

    def __init__(self, linear: PlainLinear, num_rows: int, partial: Tensor, pdl: bool):
        weight = linear.weight
        if num_rows > MAX_ROWS and linear.scale is not None:
            raise Unsupported(f"float8 weights: wanted at most {MAX_ROWS} rows (batch_size x q_len), got {num_rows}")
        self.weight, self.num_rows, self.pdl = weight, num_rows, pdl
        self.num_splits = num_splits_of(weight, num_rows)
        n_size, k_size = weight.shape
        self.partial = partial[: self.num_splits * num_rows * n_size].view(self.num_splits, num_rows, n_size)
        self._scale = self.partial if linear.scale is None else linear.scale
        block_k = _block_k(weight)
        self._k_per_split = -(-k_size // (self.num_splits * block_k)) * block_k
        even = n_size % BLOCK_N == 0 and k_size == self._k_per_split * self.num_splits
        self._constants: dict[str, Any] = {
            "ROWS": max(8, power_of_two(num_rows)),
            "BLOCK_N": BLOCK_N,
            "BLOCK_K": block_k,
            "HAS_SCALE": linear.scale is not None,
            "EVEN": even,
            "EARLY": pdl and even and num_rows <= 16,  # beyond, it would cost the second program per SM
            "PDL": pdl,
            "PRECISION": PRECISION.get(str(weight.dtype).removeprefix("torch."), "tf32"),
            "num_warps": 4,
            "num_stages": 4 if weight.element_size() < 4 else 1,
        } | ({"launch_pdl": True} if pdl else {})

    def __call__(self, x: Tensor) -> Tensor:
        """Run on `x`; returns the parts."""
        if self.num_rows > MAX_ROWS:
            self.partial[0].copy_(torch.mm(x, self.weight.T))
            return self.partial
        from labkit.models.triton_ops import few_rows_kernel

        n_size, k_size = self.weight.shape
        few_rows_kernel[(-(-n_size // BLOCK_N), self.num_splits)](
            x, self.weight, self._scale, self.partial, self.num_rows, n_size, k_size, self._k_per_split,
            **self._constants,
        )  # fmt: skip
        return self.partial
