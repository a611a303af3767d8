"""An engine whose server dies while it retrieves, as commands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from kvferry.errors import KVFerryError
from serving.engine_side import EngineSide


class DoomedSide(EngineSide):
    """Its cache holds one number everywhere at any time, but for what a retrieve writes."""

    def retrieve_and_overwrite(self, lease: int, blocks: Sequence[int], value: float, watch_s: float) -> dict[str, Any]:
        """Retrieve; as soon as that has failed make everything `value`, and look `watch_s` later who else has written.

        `landed` is how many blocks had got something else than they held by the time of the failure, all of which may
        be partly written; only where these are some and not all was the server in the middle, and is there anything to
        watch.
        """
        before = self.layers[0][0, 0, 0, 0, 0].item()
        started = time.monotonic()
        job = self.client.retrieve(lease, blocks)
        try:
            job.wait(50)
            return {"error": None, "took_s": time.monotonic() - started}
        except KVFerryError as error:
            took_s = time.monotonic() - started
            samples = [layer[:, :, 0, 0, 0].clone() for layer in self.layers]
            self.wipe(value)
            text = f"{type(error).__name__}: {error}"
        landed = int(torch.stack([sample != before for sample in samples]).any(0).any(0).sum())
        if 0 < landed < len(blocks):
            time.sleep(watch_s)
        changed = [int(block) for layer in self.layers for block in (layer != value).flatten(2).any(2).any(0).nonzero()]
        return {
            "error": text,
            "took_s": took_s,
            "landed": landed,
            "failed": len(job.failed_block_ids),
            "changed": sorted(set(changed)),
        }
