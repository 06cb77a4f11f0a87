"""Shared fixtures: GPU tests skip without a device, and randomness is always seeded."""

import pytest
import torch
from matplotlib.axes import Axes

from labkit import calibrate, sweep, timing
from labkit.provenance import collect
from labkit.sweep import RunResult, run_sweep
from tests import sweep_points


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "browser: JupyterLab in a real Chromium, where one is installed")
    config.addinivalue_line("markers", "own_speed: calibrates this machine itself, and displaces the cache it has")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _planted_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with a small cache, and runs that store a planted calibration.

    Displacing the cache of a large server takes seconds per measured cell, calibrating one much longer: the tests of
    just that (`own_speed`), of a GPU and of `make soak` do it.
    """
    if any(map(request.node.get_closest_marker, ("own_speed", "gpu", "soak"))):
        return
    for module in (timing, calibrate):
        monkeypatch.setattr(module, "cache_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(sweep, "CALIBRATE", "tests.sweep_points:fake_calibration")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def ax() -> Axes:
    """Empty axes in the style of the figures."""
    from labkit.plots import canvas, style

    with style.context():
        return canvas.new_figure(3.4, 2.6).add_subplot()


@pytest.fixture(scope="module")
def provenance() -> dict:
    """This machine's, collected once."""
    return collect("cpu")


@pytest.fixture
def go(tmp_path, provenance):
    """A sweep in this process, into the folder of the test."""

    def run(points, measure=sweep_points.measure, **options) -> RunResult:
        chosen = {"executor": "in-process", "progress": False, "provenance": provenance, **options}
        return run_sweep(points, measure, experiment="loop", out_dir=tmp_path, **chosen)

    return run
