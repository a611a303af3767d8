"""Connection: which links are given out, how long it waits between attempts, and whose turn it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from doubles.scripted_server import ScriptedServer
from kvferry.client import connection as connection_module
from kvferry.client.connection import Connection, _Attempts
from kvferry.client.link import Link
from kvferry.client.url import UnixAddress
from kvferry.errors import DeadlineError, RequestError, ServerGoneError
from serving.process import eventually


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ScriptedServer]:
    made = ScriptedServer(tmp_path / "s", lambda request: [])
    yield made
    made.close()


@pytest.fixture
def connect(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Connection]]:
    """Makes connections to the server, with an `introduce` of the test's own."""
    monkeypatch.setattr(connection_module, "FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(connection_module, "LAST_PAUSE_S", 0.02)
    made: list[Connection] = []

    def connect(introduce: Callable[[Link], None] = lambda link: None, *, required: bool = True) -> Connection:
        address = UnixAddress(str(tmp_path / "s"))
        made.append(
            Connection(
                lambda timeout_s, on_end: Link(address, timeout_s, on_end=on_end),
                introduce,
                timeout_s=0.5,
                required=required,
            )
        )
        return made[-1]

    yield connect
    for connection in made:
        connection.close(5, lambda link: None)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvferry-")]


def link_of(connection: Connection) -> Link:
    link = connection.link()
    assert link is not None
    return link


def test_a_link_that_dies_while_it_is_introduced_is_never_given_out(connect: Callable[..., Connection]) -> None:
    dying: list[Link] = []

    def introduce(link: Link) -> None:
        if dying and len(dying) < 5:
            link._hang_up("dies")
            eventually(lambda: link.ended)
        dying.append(link)

    connection = connect(introduce)
    link_of(connection)._hang_up("lost")
    eventually(lambda: connection.connected)
    assert connection.link() is dying[-1]
    assert len(dying) == 6


def test_a_link_on_which_the_server_refuses_us_is_never_given_out(connect: Callable[..., Connection]) -> None:
    refused: list[Link] = []

    def introduce(link: Link) -> None:
        refused.append(link)
        if len(refused) < 4:
            raise RequestError("rank_taken", "somebody else is there")

    connection = connect(introduce, required=False)
    eventually(lambda: connection.connected)
    assert connection.link() is refused[3]
    assert all(link.ended for link in refused[:3])


def test_a_mistake_while_it_is_introduced_does_not_end_the_attempts(
    connect: Callable[..., Connection], caplog: pytest.LogCaptureFixture
) -> None:
    numbers = iter((1, 0, 0, 2))
    connection = connect(lambda link: print(1 // next(numbers)))
    link_of(connection)._hang_up("lost")
    eventually(lambda: connection.connected)
    told = [record for record in caplog.records if "ZeroDivisionError" in record.getMessage()]
    assert len(told) == 1


def test_nobody_changes_what_the_server_knows_while_another_does(connect: Callable[..., Connection]) -> None:
    introduced: list[Link] = []
    connection = connect(introduced.append)
    with connection.exclusive(interrupt=True) as link:
        assert link is introduced[0]
        link._hang_up("lost")
        eventually(lambda: connection._attempt is not None)
        assert len(introduced) == 1
        failures: list[DeadlineError] = []

        def wait_in_vain() -> None:
            try:
                with connection.exclusive(interrupt=False):
                    pass
            except DeadlineError as error:
                failures.append(error)

        thread = threading.Thread(target=wait_in_vain)
        thread.start()
        thread.join(10)
        assert "busy with the registration for 0.5 s" in str(failures[0])
        assert not connection.connected
    eventually(lambda: connection.connected)
    assert len(introduced) == 2


def test_what_raises_in_a_turn_ends_it(connect: Callable[..., Connection]) -> None:
    connection = connect()
    for _ in range(3):
        with pytest.raises(KeyError), connection.exclusive(interrupt=False):
            raise KeyError


def test_a_required_server_that_refuses_is_an_error_and_leaves_nothing(connect: Callable[..., Connection]) -> None:
    def introduce(link: Link) -> None:
        raise RequestError("uid", "not you")

    with pytest.raises(RequestError, match="not you"):
        connect(introduce)


def test_why_there_is_no_link(connect: Callable[..., Connection], server: ScriptedServer) -> None:
    connection = connect()
    server.close()
    eventually(lambda: "no server answers at" in str(connection.gone()))
    assert str(connection.gone()).endswith("; trying to connect again")
    assert connection.link() is None
    connection.close(5, lambda link: None)
    with pytest.raises(ServerGoneError, match="closed"):
        connection.link()


def test_pauses_grow_until_a_connection_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(connection_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    pauses = _Attempts()
    for longest in (0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert longest / 2 <= pauses.next_s() <= longest
    pauses.connected()
    now[0] += 0.9
    pauses.lost()
    assert 0.5 <= pauses.next_s() <= 1.0
    pauses.connected()
    now[0] += 1.1
    pauses.lost()
    assert pauses.next_s() <= 0.05
