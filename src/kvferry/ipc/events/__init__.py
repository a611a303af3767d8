"""Events that order work across processes: recorded in one, asked for and waited for in another.

A ring is exported once; each `Ticket` names one event in it. The recorder keeps an event until the peer is done with it
(`release`) or dead (`close`). Nothing ever waits for a peer without a bound: the peer's end polls on the host with a
deadline, and holds a stream only where it can let go by itself (`abandon`).

make_event_ring, encode_events    the process that records
open_events                       the process that waits
make_peer_events, open_event_ring the same the other way round: the process that waits owns the memory
"""

from __future__ import annotations

from kvferry.ipc.events.base import EventRing, PeerEvents
from kvferry.ipc.events.descriptor import EventsDescriptor
from kvferry.ipc.events.opening import (
    encode_events,
    make_event_ring,
    make_peer_events,
    open_event_ring,
    open_events,
)
from kvferry.ipc.events.tickets import MAX_SLOTS, Ticket

__all__ = [
    "MAX_SLOTS",
    "EventRing",
    "EventsDescriptor",
    "PeerEvents",
    "Ticket",
    "encode_events",
    "make_event_ring",
    "make_peer_events",
    "open_event_ring",
    "open_events",
]
