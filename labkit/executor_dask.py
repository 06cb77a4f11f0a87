"""Measure on many devices with Dask: one worker per device, each with its own measuring process (docs/scale-out.md).

Dask moves points and outcomes and replaces lost workers. What it may not do is share a device between timed points:
every worker has one thread, declares the resource ``device=1``, and every batch takes all of it. Results come back to
the process that started the sweep, the only one that writes.
"""

import functools
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import dask
from distributed import Client, Future, Nanny, Scheduler, SpecCluster, as_completed, get_worker

from labkit.errors import InputError
from labkit.executor import Batch, Outcome, WorkerProcess, measure_batch
from labkit.provenance import code_digest, collect, environment, utc_now
from labkit.worker import one_line

RESOURCE = "device"
_KEPT = "labkit_processes"  # attribute of a Dask worker
START_TIMEOUT_S = 600.0  # a queue of a batch system is the user's to wait for, with a client of his own
_BATCHES_AHEAD = 2  # per worker: one running, one on its way; the budget looks at a batch before it is handed out


def visible_devices(device: str) -> list[str]:
    """What CUDA_VISIBLE_DEVICES may be set to, one for each worker; one "" on a CPU.

    Raises InputError: one GPU was named, which is no job for many workers, or there is none.
    """
    if device == "cpu":
        return [""]
    if ":" in device:
        raise InputError(f"device: executor dask measures on every visible GPU, wanted cuda, got {device}")
    named = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    if named:
        return named
    import torch

    if not torch.cuda.device_count():
        raise InputError("executor dask: wanted at least one visible GPU, got none")
    return [str(index) for index in range(torch.cuda.device_count())]


def local_cluster(variables: Sequence[Mapping[str, str]]) -> SpecCluster:
    """A cluster of this host, on the loopback interface only; one worker for each set of environment variables.

    Dask's own settings of thread counts are left out: they would change what is measured.
    """
    with dask.config.set({"distributed.nanny.pre-spawn-environ": {}, "distributed.admin.log-format": "%(message)s"}):
        common = {"nthreads": 1, "resources": {RESOURCE: 1}, "memory_limit": 0, "host": "127.0.0.1"}
        common |= {"dashboard_address": "127.0.0.1:0", "silence_logs": 50, "death_timeout": 60}
        workers = {
            index: {"cls": Nanny, "options": {**common, "name": f"device-{index}", "env": dict(own)}}
            for index, own in enumerate(variables)
        }
        scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "port": 0}}
        return SpecCluster(workers=workers, scheduler=scheduler, silence_logs=50)


class DaskExecutor:
    """Over the workers of a cluster.

    measure : ``package.module:function``, importable on the workers.
    client : A connected client; None starts one worker for each visible device of this host and ends them at last.
    wanted : `labkit.provenance.environment` of the run: a worker in another one measures nothing.
    device : ``cpu`` or ``cuda``.

    Raises InputError: no worker within ten minutes, or one that could share its device between points.
    """

    def __init__(self, measure: str, client: Client | None, wanted: dict[str, Any], device: str):
        self._measure, self._device = measure, device
        self._wanted = wanted | {"labkit": code_digest([""])}
        self._cluster: SpecCluster | None = None
        if client is None:
            own = [{"CUDA_VISIBLE_DEVICES": name} if name else {} for name in visible_devices(device)]
            self._cluster = local_cluster(own)
            client = Client(self._cluster)
        self._client = client
        try:
            self._check_workers()
        except BaseException:
            self.close()
            raise

    def _check_workers(self) -> None:
        try:
            self._client.wait_for_workers(1, timeout=START_TIMEOUT_S)
        except TimeoutError:
            raise InputError(f"executor dask: no worker came within {START_TIMEOUT_S:g} s") from None
        for worker in self._client.scheduler_info(n_workers=-1)["workers"].values():
            if worker["nthreads"] != 1 or worker["resources"].get(RESOURCE) != 1:
                got = f"{worker['nthreads']} threads and resources {worker['resources']}"
                raise InputError(
                    f"Dask worker {worker['name']}: wanted --nthreads 1 --resources {RESOURCE}=1, so that timed points"
                    f" never share a device; got {got}"
                )

    def _submit(self, function: Any, *arguments: Any) -> Future:
        key = f"labkit-{uuid.uuid4().hex}"  # Dask must neither join equal batches nor remember old ones
        options = {"pure": False, "key": key, "retries": 0, "resources": {RESOURCE: 1}}
        return self._client.submit(function, self._measure, *arguments, **options)

    def call(self, function: str, argument: Any, timeout_s: float) -> Outcome:
        """``function(argument)`` on one of the workers, as an outcome."""
        try:
            return self._submit(_call, function, argument, timeout_s).result()
        except Exception as error:  # whatever the cluster raises is the reason
            return {"status": "crashed", "reason": one_line(error)}

    def outcomes(
        self, batches: Iterable[Batch], timeout_s: float, local: Mapping[str, Any]
    ) -> Iterator[tuple[str, Outcome]]:
        """As of `Executor`, in the order in which the workers end them."""
        waiting, running = iter(batches), dict[Any, Batch]()
        done = as_completed()

        def hand_out() -> None:
            most = _BATCHES_AHEAD * max(len(self._client.nthreads()), 1)
            while len(running) < most and (batch := next(waiting, None)) is not None:
                future = self._submit(_measure, batch, timeout_s, dict(local), self._wanted, self._device)
                running[future.key] = batch
                done.add(future)

        hand_out()
        for future in done:
            yield from _outcomes_of(future, running.pop(future.key))
            hand_out()

    def close(self) -> None:
        """End the measuring processes, and the cluster where it was started here."""
        if self._cluster is None:
            self._client.run(_end)
            return
        self._client.close()
        self._cluster.close()


def _outcomes_of(future: Future, batch: Batch) -> list[tuple[str, Outcome]]:
    try:
        return future.result()
    except Exception as error:  # the batch took several workers down, or its answer could not be sent
        lost = {
            "status": "crashed",
            "reason": f"Dask worker lost: {one_line(error)}",
            "started": utc_now(),
            "seconds": 0.0,
        }
        return [(key, lost) for key, _ in batch]


# ---- in the workers


def _process(measure: str) -> WorkerProcess:
    """The measuring process of this worker; it holds the models from point to point."""
    kept: dict[str, WorkerProcess] = vars(get_worker()).setdefault(_KEPT, {})
    return kept.setdefault(measure, WorkerProcess(measure))


@functools.cache
def _environment(device: str) -> dict[str, Any]:
    return environment(collect(device)) | {"labkit": code_digest([""])}


def _differences(wanted: Mapping[str, Any], got: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name in sorted({*wanted, *got}):
        a, b = wanted.get(name), got.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _differences(a, b, f"{prefix}{name}.")
        elif a != b:
            yield f"{prefix}{name} is {b}, the sweep's is {a}"


def _call(measure: str, function: str, argument: Any, timeout_s: float) -> Outcome:
    return _process(measure).call(function, argument, timeout_s)


def _measure(
    measure: str, batch: Batch, timeout_s: float, local: dict[str, Any], wanted: dict[str, Any], device: str
) -> list[tuple[str, Outcome]]:
    name = str(get_worker().name)
    if other := list(_differences(wanted, _environment(device))):
        outcome = {"status": "error", "reason": f"worker {name}: another environment: {'; '.join(other)}"}
        return [(key, {**outcome, "started": utc_now(), "seconds": 0.0, "worker": name}) for key, _ in batch]
    found = measure_batch(_process(measure), batch, timeout_s, local)
    return [(key, {**outcome, "worker": name}) for key, outcome in found]


def _end(dask_worker: Any) -> None:
    """End the measuring processes of a worker that lives on: their memory is the device's."""
    for process in vars(dask_worker).pop(_KEPT, {}).values():
        process.close()
