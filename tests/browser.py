"""A real JupyterLab and a real Chromium for the browser tests: start, open, run, read."""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from labkit import paths

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SHOTS = paths.BUILD / "browser"
_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")


def chromium(playwright: Any, folder: Path) -> Any:
    """A browser context of its own, in an empty profile."""
    context = playwright.chromium.launch_persistent_context(
        folder / "chromium",
        executable_path=CHROMIUM,
        headless=True,
        args=[*_FLAGS],
        viewport={"width": 1200, "height": 1000},
    )
    context.set_default_timeout(60_000)
    return context


_WIDGET = "[...(window.jupyterapp?.shell.widgets('main') ?? [])].find((widget) => widget.context?.path === name)"
_READY = f"""(name) => {{
  const widget = {_WIDGET};
  return !document.querySelector('#jupyterlab-splash') && widget?.context.isReady && widget.sessionContext.isReady &&
    widget.sessionContext.session?.kernel?.status === 'idle';
}}"""
RAN = f"""(name) => {{
  const widget = {_WIDGET};
  const cells = widget.content.model.toJSON().cells.filter((cell) => cell.cell_type === 'code');
  const failed = cells.some((cell) => cell.outputs.some((output) => output.output_type === 'error'));
  const idle = widget.sessionContext.session?.kernel?.status === 'idle';
  return idle && (failed || cells.every((cell) => cell.execution_count));
}}"""
# What is drawn on the explorer's canvas: a sum of its pixels after every drawing, the key press and the first drawing
# after it that differs. The page times both, so neither the test's polling nor its pipe to the browser counts.
_WATCH = """() => {
  const watch = window.labkitWatch = {ms: null, sum: 0, since: performance.now(), armed: false, pressed: null};
  const canvas = document.querySelector('.jupyter-matplotlib-canvas-container canvas');
  const context = canvas.getContext('2d'), draw = CanvasRenderingContext2D.prototype.drawImage;
  const look = () => {
    const pixels = new Uint32Array(context.getImageData(0, 0, canvas.width, canvas.height).data.buffer);
    let sum = canvas.width;
    for (let i = 0; i < pixels.length; i += 3) sum = (sum * 31 + pixels[i]) | 0;
    if (sum === watch.sum) return;
    watch.sum = sum;
    watch.since = performance.now();
    if (watch.pressed !== null) {
      watch.ms = watch.since - watch.pressed;
      watch.pressed = null;
      watch.armed = false;
    }
  };
  watch.arm = () => { watch.ms = null; watch.armed = true; watch.pressed = null; };
  document.addEventListener('keydown', () => { if (watch.armed) watch.pressed ??= performance.now(); }, true);
  context.drawImage = (...what) => { draw.apply(context, what); look(); };
  look();
}"""
_SETTLED = """() => {
  const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel;
  return kernel?.status === 'idle' && performance.now() - window.labkitWatch.since > 250;
}"""


class Lab:
    """JupyterLab on a free port of 127.0.0.1, with its own empty configuration and the workbench's settings."""

    def __init__(self, folder: Path, notebooks: Path):
        self.token, self.folder = secrets.token_hex(16), folder
        names = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
        own = {f"JUPYTER_{name}": str(folder / name.lower()) for name in names}
        own |= {"IPYTHONDIR": str(folder / "ipython"), "MPLCONFIGDIR": str(folder / "mpl"), "JUPYTER_TOKEN": self.token}
        own |= {"JUPYTER_CONFIG_PATH": str(paths.ROOT / "jupyter"), "PYTHONPATH": str(paths.ROOT)}
        environment = {name: value for name, value in os.environ.items() if name != "LABKIT_BATCH"} | own
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--port=0"]
        command += [f"--ServerApp.root_dir={notebooks}", "--LabApp.expose_app_in_browser=True"]
        self.log = (folder / "lab.log").open("w")
        self.process = subprocess.Popen(command, env=environment, stdout=self.log, stderr=self.log, cwd=folder)
        self.url = self._wait(folder / "runtime_dir" / f"jpserver-{self.process.pid}.json")

    def _wait(self, record: Path, limit_s: float = 90.0) -> str:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and self.process.poll() is None:
            if record.exists() and record.read_text().strip():
                url = json.loads(record.read_text())["url"]
                request = urllib.request.Request(f"{url}api/status", headers={"Authorization": f"token {self.token}"})
                # The record is there before the socket listens.
                with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=10):
                    return url
            time.sleep(0.2)
        raise RuntimeError(f"JupyterLab did not start:\n{(self.folder / 'lab.log').read_text()[-2000:]}")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)  # ten kernels end before it does
        self.log.close()


class Notebook:
    """One notebook in a browser tab of its own, or beside others in the JupyterLab of ``page``."""

    def __init__(self, context: Any, lab: Lab, name: str, page: Any = None):
        self.page, self.name, self.problems = page or context.new_page(), name, []
        self.page.on("pageerror", lambda error: self.problems.append(f"page error: {error}"))
        self.page.on("request", self._look)
        if page is None:
            self.page.goto(f"{lab.url}lab/workspaces/{Path(name).stem}/tree/{name}?reset&token={lab.token}")
        else:
            self.command("docmanager:open", path=name, factory="Notebook")
        self.page.wait_for_function(_READY, arg=name, timeout=90_000)

    def _look(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:")):
            self.problems.append(f"request to {request.url}")

    def command(self, name: str, **arguments: str) -> None:
        # Braces: the command's promise may never settle, and returning it would hang the call.
        call = "([name, arguments]) => { window.jupyterapp.commands.execute(name, arguments) }"
        self.page.evaluate(call, [name, arguments])

    def run_all(self) -> None:
        self.command("notebook:run-all-cells")

    def finished(self, limit_s: float = 240.0) -> list[dict[str, Any]]:
        """The code cells with their outputs, once all have run or one has failed."""
        self.page.wait_for_function(RAN, arg=self.name, timeout=1000 * limit_s)
        return self.cells()

    def cells(self) -> list[dict[str, Any]]:
        found = self.page.evaluate(f"(name) => {_WIDGET}.content.model.toJSON().cells", self.name)
        return [cell for cell in found if cell["cell_type"] == "code"]

    def close(self) -> None:
        """Give the kernel back and leave the page to the next notebook."""
        leave = f"async (name) => {{ const w = {_WIDGET}; await w.sessionContext.shutdown(); w.dispose(); }}"
        self.page.evaluate(leave, self.name)

    def shot(self, name: str) -> None:
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SHOTS / f"{name}.png")


class Explorer:
    """The explorer of a running notebook: its picture, read-outs and controls."""

    def __init__(self, tab: Notebook):
        self.tab, self.page = tab, tab.page
        self.canvas = self.page.locator(".jupyter-matplotlib-canvas-container canvas").first
        self.page.wait_for_selector(".labkit-export", timeout=60_000)
        self.page.evaluate(_WATCH)
        self.settled()

    def settled(self) -> int:
        """Wait until the kernel is idle and the picture has been the same for a quarter of a second; its sum."""
        self.page.wait_for_function(_SETTLED, polling=60, timeout=30_000)
        return int(self.page.evaluate("() => window.labkitWatch.sum"))

    def handle(self, name: str) -> Any:
        return self.page.locator(f".labkit-{name}").locator("select, .noUi-handle, input[type=checkbox]").first

    def change(self, name: str, key: str) -> float:
        """Press a key on a control; ms until the picture is another one, told by the page's own clock."""
        self.settled()
        self.handle(name).focus()
        self.page.evaluate("() => window.labkitWatch.arm()")
        self.page.keyboard.press(key)
        try:
            self.page.wait_for_function("() => window.labkitWatch.ms !== null", polling=20, timeout=5_000)
        except Exception as error:
            raise AssertionError(f"{name}: {key} changes nothing in the picture") from error
        return float(self.page.evaluate("() => window.labkitWatch.ms"))

    def readout(self) -> list[dict[str, str]]:
        names, *rows = self.page.locator(".labkit-readout tr").evaluate_all(
            "rows => rows.map(row => [...row.cells].map(cell => cell.innerText.trim()))"
        )
        return [dict(zip(names, row, strict=True)) for row in rows]

    def text(self, name: str) -> str:
        return self.page.locator(f".labkit-{name}").inner_text()


def errors(cells: list[dict[str, Any]]) -> list[str]:
    """Errors among the outputs of cells."""
    outputs = [output for cell in cells for output in cell["outputs"]]
    return [f"{o['ename']}: {o['evalue']}" for o in outputs if o["output_type"] == "error"]


def printed(cells: list[dict[str, Any]]) -> str:
    """Everything that cells wrote to their streams."""
    texts = [o["text"] for cell in cells for o in cell["outputs"] if o["output_type"] == "stream"]
    return "".join(text if isinstance(text, str) else "".join(text) for text in texts)
