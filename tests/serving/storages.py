"""Storages as a client makes them of an engine's tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvferry.client.storages import Storages, describe_storages, wrap_storages
from kvferry.ipc.policy import IPCPolicy
from serving.engine_side import FORMAT


def storages_of(kv_caches: Mapping[str, torch.Tensor]) -> Storages:
    """Described and wrapped; whoever asks closes them."""
    policy = IPCPolicy()
    layout, flats = describe_storages(kv_caches, format=FORMAT, hints=None, policy=policy)
    return wrap_storages(layout, flats, policy)
