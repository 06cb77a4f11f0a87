"""`labkit doctor`: what this machine is, what runs on it, and how fast it reads."""

import argparse
import time
from importlib.util import find_spec
from typing import Any

from labkit import provenance
from labkit.device_state import monitor

_WATCH_S = 1.0  # NVML's samples of processes are up to a second apart


def report(*, calibrate: bool = False) -> dict[str, Any]:
    """Device, versions and backends; with ``calibrate`` the measured read bandwidth, matrix rates and noise too.

    ``backends`` maps a name to "" or why it cannot run; ``other_users`` tells whether a shared device would be noticed.
    """
    if find_spec("torch") is None:
        backends = {"all": "torch is not installed: nothing can be measured, committed data can be analysed"}
        return {**_facts("cpu"), "backends": backends}
    from labkit.attention.api import available_backends
    from labkit.experiments.common import device

    found = {**_facts(device()), "other_users": _other_users(device()), "backends": available_backends()}
    if calibrate:
        from labkit.calibrate import calibrate as measure

        found["calibration"] = measure(device())
    return found


def _other_users(device: str) -> str:
    """Who else uses the device, while this process does: of an idle GPU there is no sample to tell by."""
    import torch

    read, end = monitor(device), time.monotonic() + _WATCH_S
    x = torch.ones(1024, 1024, device=device)
    while time.monotonic() < end:
        (x @ x).sum().item()
    share = read().others_share
    if share is None:
        return "cannot be seen here: samples are not marked where the device is shared"
    return f"had {share:.0%} of the device just now"


def _facts(device: str) -> dict[str, Any]:
    collected = provenance.collect(device)
    return {name: collected[name] for name in ("device", "versions", "python", "platform") if name in collected}


def render(found: dict[str, Any]) -> str:
    """The report as text for a terminal."""
    lines = []
    for title, content in found.items():
        if not isinstance(content, dict):
            lines.append(f"{title}: {content}")
            continue
        lines.append(f"{title}:")
        width = max((len(str(name)) for name in content), default=0)
        for name, value in content.items():
            shown = ("usable" if not value else f"unavailable: {value}") if title == "backends" else _plain(value)
            lines.append(f"  {name:<{width}}  {shown}")
    return "\n".join(lines)


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items())
    return "absent" if value is None else str(value)


def run_from_arguments(arguments: argparse.Namespace) -> tuple[dict[str, Any], str, int]:
    """`labkit doctor`."""
    found = report(calibrate=arguments.calibrate)
    return found, render(found), 0
