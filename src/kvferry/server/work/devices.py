"""Which devices this server works for: a choice made once, before any thread starts."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.cuda.device import visible_uuids
from kvferry.cuda.driver import driver, load_driver
from kvferry.server.work.device import HostDevice
from kvferry.server.work.device_cuda import CudaDevice
from kvferry.server.work.workers import HOST, MakeDevice


@dataclass(frozen=True, slots=True)
class Devices:
    """How to make devices, and which GPUs there are; `primary` is the one that prepares the server's memory."""

    make_host: MakeDevice
    make_gpu: MakeDevice
    gpus: tuple[str, ...]
    primary: str


def choose_devices(device: str) -> Devices:
    """The devices for a `ServerConfig.device`. Raises CudaUnavailableError where "cuda" is asked for and not there."""
    if device == "cuda":
        driver()
    if device == "cpu" or load_driver() is None:
        return Devices(lambda _: HostDevice(), CudaDevice, (), HOST)
    gpus = tuple(visible_uuids())
    return Devices(lambda _: HostDevice(), CudaDevice, gpus, gpus[0])
