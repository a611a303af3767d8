"""NCCL: the library, and communicators of two ranks that cannot hang the engine."""

from __future__ import annotations

from kvferry.p2p.nccl.communicator import Communicator, State
from kvferry.p2p.nccl.finding import find_nccl_library
from kvferry.p2p.nccl.launcher import NcclLauncher
from kvferry.p2p.nccl.library import NCCLLibrary
from kvferry.p2p.nccl.settings import NcclSettings

__all__ = ["Communicator", "NCCLLibrary", "NcclLauncher", "NcclSettings", "State", "find_nccl_library"]
