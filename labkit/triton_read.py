"""A kernel that does nothing but read: the yardstick for kernels that must read as much."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

BLOCK = 8192  # 32-bit words a program reads; small enough for many programs, large enough to hide their start


@triton.jit
def read_kernel(words, sums, BLOCK: tl.constexpr):
    """Grid (num_words / BLOCK,): each program sums its words, so that no load can be left out."""
    program = tl.program_id(0).to(tl.int64)
    tl.store(sums + program, tl.sum(tl.load(words + program * BLOCK + tl.arange(0, BLOCK)), 0))
