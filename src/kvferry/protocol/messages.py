"""All messages between engines and the cache server: what travels. A file for each thing that they are about."""

from __future__ import annotations

from kvferry.protocol.greeting import Challenge, Hello, Prove, Welcome
from kvferry.protocol.lookup import Attach, Attached, Clear, Cleared, Found, Lookup, Prefetch, Prefetched, Release
from kvferry.protocol.message import (
    BLOCK_ID_BYTES,
    KEY_BYTES,
    MAC_BYTES,
    MAX_FDS_A_BATCH,
    MAX_STAGES,
    MAX_WAIT_S,
    NO_SEQ,
    NONCE_BYTES,
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    TOKEN_NONCE_BYTES,
    Message,
)
from kvferry.protocol.registration import Confirm, FdAck, FdBatch, Proof, Register, Registered, Unregister, Unregistered
from kvferry.protocol.session import Closed, Error, Ping, Pong, Stats, StatsReply
from kvferry.protocol.transfer import Cancel, Progress, Retrieve, Retrieved, Store, Stored

Request = (
    Hello
    | Prove
    | Register
    | FdBatch
    | Confirm
    | Unregister
    | Attach
    | Lookup
    | Prefetch
    | Clear
    | Release
    | Store
    | Retrieve
    | Cancel
    | Stats
    | Ping
)
Reply = (
    Welcome
    | Challenge
    | FdAck
    | Proof
    | Registered
    | Unregistered
    | Attached
    | Found
    | Prefetched
    | Cleared
    | Stored
    | Progress
    | Retrieved
    | StatsReply
    | Pong
    | Error
    | Closed
)

__all__ = [
    "Message",
    "PROTOCOL_VERSION",
    "OLDEST_VERSION",
    "MAX_FDS_A_BATCH",
    "MAX_STAGES",
    "NONCE_BYTES",
    "TOKEN_NONCE_BYTES",
    "MAC_BYTES",
    "MAX_WAIT_S",
    "NO_SEQ",
    "KEY_BYTES",
    "BLOCK_ID_BYTES",
    "Hello",
    "Challenge",
    "Prove",
    "Welcome",
    "Register",
    "FdBatch",
    "FdAck",
    "Proof",
    "Confirm",
    "Registered",
    "Unregister",
    "Unregistered",
    "Attach",
    "Attached",
    "Lookup",
    "Found",
    "Prefetch",
    "Prefetched",
    "Clear",
    "Cleared",
    "Release",
    "Store",
    "Stored",
    "Retrieve",
    "Progress",
    "Retrieved",
    "Cancel",
    "Stats",
    "StatsReply",
    "Ping",
    "Pong",
    "Error",
    "Closed",
    "Reply",
    "Request",
]
