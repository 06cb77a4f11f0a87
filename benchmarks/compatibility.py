"""The test matrix: Python and torch versions, with and without optional packages, each cell in its own environment.

    python benchmarks/compatibility.py [CELL ...] [--work build/compatibility] [--table docs/compatibility.md]

Without cells, all are run: tens of minutes and several GB of downloads (torch brings its CUDA libraries). A cell whose
Python is missing is "not run", with the reason. Results are kept as JSON in the work folder; the table is made of them.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEWEST = "newest"
# Behaviour that depends on versions: data files, attention, the loop, sweeps, readers. Minutes, not the whole suite.
TESTS = (
    *(
        "acceptance",
        "accept_sampling",
        "attention",
        "attention_api",
        "attention_backends",
        "breakeven",
        "breakeven_join",
    ),
    *("check", "compare", "cost", "crossovers"),
    *("decoder", "engines_import", "engines_trace", "figures", "kv_cache", "properties", "results", "shapes"),
    *("speculation", "speculation_model", "sweep", "sweep_faults", "sweep_groups", "timing", "weights"),
)
WITH_TRITON, WITH_JUPYTER, WITH_DASK = ("attention_triton",), ("batch",), ("scale_out",)
COMMANDS = (
    ["--version"], ["check", "data/runs"], ["tour"], ["figures", "--stale"],
    ["breakeven", "--cost", "data/runs/loop", "--acceptance-length", "2.5", "--json"],
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One environment. ``torch``: a version, newest, or "" for none; ``without``: what is taken away."""

    python: str
    torch: str
    without: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        parts = [f"py{self.python}", f"torch-{self.torch or 'none'}", *(f"no-{name}" for name in self.without)]
        return "-".join(parts)


CELLS = (
    *(Cell(python, NEWEST) for python in ("3.11", "3.12", "3.13")),
    Cell("3.11", "2.11.0"),
    Cell("3.13", "2.11.0"),
    Cell("3.12", NEWEST, ("triton",)),
    Cell("3.12", NEWEST, ("jupyter",)),
    *(Cell(python, "", ("jupyter", "triton")) for python in ("3.11", "3.12", "3.13")),
)


def run(cell: Cell, work: Path) -> dict[str, object]:
    """Install and test one cell; what came of it."""
    found = shutil.which(f"python{cell.python}")
    usable = found and subprocess.run([found, "--version"], capture_output=True).returncode == 0
    if not usable:
        return {"result": "not run", "reason": f"no python{cell.python} on this machine"}
    folder = work / cell.name
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([str(found), "-m", "venv", str(folder)], check=True)
    begin = time.monotonic()
    try:
        _install(cell, folder / "bin", work / f"{cell.name}.log")
    except subprocess.CalledProcessError as error:
        words = " ".join(error.cmd[3:])
        return {"result": "not run", "reason": f"cannot be installed: pip {words}"}
    try:
        outcome = _test(cell, folder / "bin", work / f"{cell.name}.log")
    finally:
        versions = _versions(folder / "bin")
        shutil.rmtree(folder, ignore_errors=True)
    return outcome | {"versions": versions, "minutes": round((time.monotonic() - begin) / 60, 1)}


def _install(cell: Cell, binaries: Path, log: Path) -> None:
    def pip(*words: str) -> None:
        with log.open("a") as file:
            command = [str(binaries / "python"), "-m", "pip", *words]
            subprocess.run(command, check=True, stdout=file, stderr=file, cwd=ROOT)

    log.unlink(missing_ok=True)
    if cell.torch:
        pip("install", "torch" if cell.torch == NEWEST else f"torch=={cell.torch}")
    if "jupyter" in cell.without:
        # transformers: what the tests compare the decoder with. Nothing here is Jupyter's.
        tools = ["pytest", "hypothesis", "scipy", *(["transformers"] if cell.torch else [])]
        pip("install", ".[bench]" if cell.torch else ".", *tools)
    else:
        pip("install", "--require-hashes", "-r", "requirements.lock")
    pip("install", "--no-deps", "--editable", ".")
    if "triton" in cell.without and cell.torch:
        pip("uninstall", "--yes", "triton")


def _test(cell: Cell, binaries: Path, log: Path) -> dict[str, object]:
    variables = {**os.environ, "OMP_NUM_THREADS": "2", "LABKIT_CACHE": str(log.parent / "cache"), "PYTHONPATH": ""}
    with log.open("a") as file:
        for words in COMMANDS:
            command = [str(binaries / "labkit"), *words]
            if subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, env=variables).returncode not in (0, 1):
                return {"result": "failed", "reason": f"labkit {' '.join(words)}"}
    if not cell.torch:
        return {"result": "passed", "reason": "the reading and deciding commands"}
    names = [*TESTS, *(() if "triton" in cell.without else WITH_TRITON)]
    names += [] if "jupyter" in cell.without else [*WITH_JUPYTER, *WITH_DASK]
    files = [f"tests/test_{name}.py" for name in names]
    command = [
        str(binaries / "python"),
        "-m",
        "pytest",
        "-m",
        "not soak and not gpu and not model",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, env=variables)
    with log.open("a") as file:
        file.write(done.stdout + done.stderr)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return {"result": "passed" if done.returncode == 0 else "failed", "reason": last, "tests": failed}


def _versions(binaries: Path) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json, platform\n"
        "found = {d.metadata['Name']: d.version for d in m.distributions()}\n"
        "names = ('torch', 'triton', 'flashinfer-python', 'jupyterlab', 'numpy', 'pandas', 'pyarrow')\n"
        "print(json.dumps({'python': platform.python_version()} | {n: found[n] for n in names if n in found}))"
    )
    done = subprocess.run([str(binaries / "python"), "-c", code], capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else {}


HEAD = """# Compatibility

Made by `benchmarks/compatibility.py` (`make compat`), each cell in its own environment: the commands that read and
decide, then the tests of data files, attention, the loop, sweeps and readers. Cells without torch run the commands
only: analysis needs no torch. A machine without a GPU runs neither FlashInfer nor CUDA kernels; these are tested with
`pytest -m gpu` on a GPU host (README, "What was measured where").
Triton 3.6's interpreter cannot run with NumPy 2.4 or newer: there the kernels are compiled on a GPU host only (they
passed on an H200 with Triton 3.6 and NumPy 2.5), and their interpreter tests are skipped with that reason.

| Python | torch | triton | jupyterlab | numpy, pandas, pyarrow | result | |
|---|---|---|---|---|---|---|
"""


def table(work: Path) -> str:
    """The results in the work folder as Markdown."""
    lines = []
    for cell in CELLS:
        file = work / f"{cell.name}.json"
        found = json.loads(file.read_text()) if file.exists() else {"result": "not run", "reason": ""}
        seen = found.get("versions", {})
        data = ", ".join(seen.get(name, "") for name in ("numpy", "pandas", "pyarrow")) if seen else ""
        torch = seen.get("torch") or cell.torch or "none"
        absent = {name: "none" if name in cell.without else "" for name in ("triton", "jupyter")}
        reason = re.sub(r" in [\d.]+s( \(.*\))?$", "", found["reason"])  # the time is the machine's
        fields = [seen.get("python", cell.python), torch, seen.get("triton", absent["triton"]),
                  seen.get("jupyterlab", absent["jupyter"]), data, found["result"], reason]  # fmt: skip
        lines.append("| " + " | ".join(fields) + " |")
    return (
        HEAD
        + "\n".join(lines)
        + f"\n\nRun on {datetime.now(UTC):%Y-%m-%d}, {os.uname().sysname} {os.uname().machine}.\n"
    )


def main() -> int:
    """Run the cells that were asked for; 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", metavar="CELL", help=", ".join(cell.name for cell in CELLS))
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "compatibility")
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    wanted = [cell for cell in CELLS if not arguments.cells or cell.name in arguments.cells]
    failed = False
    for cell in wanted:
        outcome = run(cell, arguments.work.resolve())
        (arguments.work / f"{cell.name}.json").write_text(json.dumps(outcome, indent=1) + "\n")
        print(f"{cell.name}: {outcome['result']}, {outcome['reason']}", flush=True)
        failed |= outcome["result"] == "failed"
    if arguments.table:
        arguments.table.write_text(table(arguments.work))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
