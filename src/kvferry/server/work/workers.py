"""The workers, one a device, made when the first engine comes that needs one."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvferry.errors import DeadlineError, RequestError
from kvferry.server.watch.pulse import Pulse
from kvferry.server.work.device import Device
from kvferry.server.work.tasks import Completion
from kvferry.server.work.worker import DeviceWorker

HOST = ""  # the host's "UUID"

MakeDevice = Callable[[str], Device]


class Workers:
    """Makes, finds and stops workers. Belongs to the loop thread, after `stop` to whoever stops it.

    Parameters
    ----------
    make_host, make_gpu
        Make the device for a UUID, in the worker's thread.
    gpus
        The UUIDs of the GPUs that are served.
    memory_address
        Where the server's memory for chunks begins.
    post
        Takes the workers' completions.
    """

    def __init__(
        self,
        make_host: MakeDevice,
        make_gpu: MakeDevice,
        gpus: Collection[str],
        *,
        memory_address: int,
        post: Callable[[Completion], None],
    ) -> None:
        self._make_host = make_host
        self._make_gpu = make_gpu
        self._gpus = gpus
        self._memory_address = memory_address
        self._post = post
        self._workers: dict[str, DeviceWorker] = {}

    def get(self, device_uuid: str) -> DeviceWorker:
        """The device's worker, started now where there is none. Raises RequestError where the device is not served."""
        worker = self._workers.get(device_uuid)
        if worker is None:
            worker = self._start(device_uuid)
        return worker

    def pulses(self) -> list[Pulse]:
        """Those of all that run."""
        return [worker.pulse for worker in self._workers.values()]

    def stop(self, timeout_s: float) -> list[DeadlineError]:
        """End all; what did not end in time, which is kept, so that the next call waits for it again."""
        late: list[DeadlineError] = []
        for device_uuid, worker in list(self._workers.items()):
            try:
                worker.stop(timeout_s)
            except DeadlineError as error:
                late.append(error)
            else:
                del self._workers[device_uuid]
        return late

    def _start(self, device_uuid: str) -> DeviceWorker:
        make = self._make_host if device_uuid == HOST else self._make_gpu
        if device_uuid != HOST and device_uuid not in self._gpus:
            served = f"the GPUs {', '.join(self._gpus)}" if self._gpus else "host memory only"
            raise RequestError("device", f"this server serves {served}, not {device_uuid}; start it where that is seen")
        worker = DeviceWorker(
            device_uuid or "cpu", lambda: make(device_uuid), memory_address=self._memory_address, post=self._post
        )
        self._workers[device_uuid] = worker
        worker.start()
        return worker
