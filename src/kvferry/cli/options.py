"""Options that several commands have."""

from __future__ import annotations

import pathlib
from enum import Enum
from typing import Annotated

import typer

__all__ = ["Carrier", "ConfigOption", "Device", "DeviceOption", "JsonOption", "PrintOption", "StdinOption"]


class Device(str, Enum):
    """Where KV lives."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Carrier(str, Enum):
    """What moves KV from engine to engine."""

    auto = "auto"
    ipc = "ipc"
    nccl = "nccl"
    host = "host"


DeviceOption = Annotated[
    Device, typer.Option(help="Use the GPU (cuda), host memory (cpu), or the GPU if there is one.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
ConfigOption = Annotated[
    pathlib.Path | None, typer.Option(help="TOML file with settings; flags and variables go before it.")
]
PrintOption = Annotated[
    bool, typer.Option("--print-config", help="Show each setting and where it comes from, and end.")
]
StdinOption = Annotated[bool, typer.Option(hidden=True)]
