"""One truth for dependencies: pyproject.toml names, requirements.lock resolves, environment.yml repeats them."""

import re
import subprocess
import tomllib

import pytest
import yaml

from labkit.paths import ROOT

# Chosen per machine, so not in the lock; the Makefile and environment.yml must still agree.
MACHINE_CHOICE = {"torch", "triton"}


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def lock() -> dict[str, set[str]]:
    """Versions in the lock by package; more than one where Python versions differ."""
    versions: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([^\s;\\]+)", (ROOT / "requirements.lock").read_text(), re.M):
        versions.setdefault(name.lower(), set()).add(version)
    return versions


def conda_pins() -> dict[str, str]:
    parsed = yaml.safe_load((ROOT / "environment.yml").read_text())
    (pip,) = [item["pip"] for item in parsed["dependencies"] if isinstance(item, dict)]
    assert pip[-1] == "-e ."
    return dict(line.split(";")[0].split("==") for line in pip[:-1])


def direct_requirements() -> set[str]:
    project = pyproject()["project"]
    extras = project["optional-dependencies"]
    locked = [line for name in ("bench", "dask", "replay", "notebooks", "dev") for line in extras[name]]
    lines = project["dependencies"] + locked
    return {re.match(r"[\w.-]+", line)[0].lower() for line in lines}


def test_every_direct_requirement_is_locked_and_in_the_conda_front():
    assert direct_requirements() <= lock().keys()
    assert direct_requirements() <= conda_pins().keys()


def test_conda_front_pins_what_the_lock_pins():
    for name, version in conda_pins().items():
        if name in lock():
            assert version in lock()[name], name
    unlocked = conda_pins().keys() - lock().keys()
    gpu = {re.match(r"[\w-]+", line)[0] for line in pyproject()["project"]["optional-dependencies"]["gpu"]}
    assert unlocked == gpu


def test_makefile_and_conda_front_agree_on_torch_and_triton():
    makefile = (ROOT / "Makefile").read_text()
    for name in MACHINE_CHOICE:
        assert f"{name}=={conda_pins()[name]}" in makefile


def test_lock_holds_no_torch_and_no_index_address():
    text = (ROOT / "requirements.lock").read_text() + (ROOT / "requirements-model.lock").read_text()
    assert not re.search(r"^(torch|triton|nvidia)", text, re.M)
    assert "://" not in text
    assert all("--hash=sha256:" in block for block in re.split(r"\n(?=[\w-]+==)", text)[1:])


def test_the_tracked_tree_stays_below_35_mb():
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git checkout")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert 0 < sum(file.stat().st_size for file in files if file.is_file()) < 35e6


def test_no_method_is_a_stub():
    files = (ROOT / "labkit").rglob("*.py")
    assert [file.name for file in files if "raise NotImplementedError" in file.read_text()] == []
