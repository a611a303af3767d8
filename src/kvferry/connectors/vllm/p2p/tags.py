"""What the KV of a request is of, so that two engines never take two prompts for one."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kvferry.layout import encode_tokens


def tag_of(request: Any) -> bytes:
    """32 bytes over all that makes KV differ in two engines of one model: tokens, adapter, salt, multimodal inputs.

    The two engines render a request each by itself, so the same text may become other tokens, such as a date in a
    chat template at midnight.
    """
    lora = getattr(request, "lora_request", None)
    features = getattr(request, "mm_features", None) or ()
    places = [[str(one.identifier), one.mm_position.offset, one.mm_position.length] for one in features]
    beside = ["" if lora is None else lora.lora_name, getattr(request, "cache_salt", None) or "", places]
    return hashlib.sha256(json.dumps(beside).encode() + b"\0" + encode_tokens(request.prompt_token_ids)).digest()
