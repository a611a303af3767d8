"""The reader's thread of a link and callers who read by themselves do not wake each other."""

from __future__ import annotations

import threading
from pathlib import Path

from kvferry.client.link import Link
from kvferry.protocol.address import UnixAddress
from kvferry.protocol.messages import Ping, Pong
from serving.process import Stage, eventually

CALLS = 500


def wakes_of_reader() -> int:
    """How often the one reader's thread of this process has gone to sleep."""
    (reader,) = (thread for thread in threading.enumerate() if thread.name == "kvferry-client")
    status = Path(f"/proc/self/task/{reader.native_id}/status").read_text()
    return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])


def test_the_reader_sleeps_while_a_caller_reads(stage: Stage) -> None:
    """Else both wake for every answer, and hand the interpreter's lock to and fro: a third of the calls a second."""
    link = Link(UnixAddress(stage.path), 5)
    try:
        link.call(Ping, Pong, 5)
        before = wakes_of_reader()
        for _ in range(CALLS):
            link.call(Ping, Pong, 5)
        assert wakes_of_reader() - before < CALLS / 5
    finally:
        link.close()


def test_the_reader_is_there_again_when_the_caller_has_its_answer(stage: Stage) -> None:
    """What comes for others, and the end of the server, is seen though nobody calls."""
    link = Link(UnixAddress(stage.path), 5)
    try:
        for _ in range(5):
            link.call(Ping, Pong, 5)
            answers: list[object] = []
            seq = link.expect(answers.append)
            link.send(Ping(seq), 5)
            eventually(lambda answers=answers, seq=seq: answers == [Pong(seq)])  # type: ignore[misc]
        stage.server.kill()
        eventually(lambda: not link.usable, 5)
    finally:
        link.close()
