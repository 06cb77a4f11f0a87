"""Points of the tests of sweeps, and what came of them."""

from labkit.sweep import grid


def contexts(*lens: int, **more) -> list[dict]:
    return grid(context_len=list(lens), batch_size=1, **more)
