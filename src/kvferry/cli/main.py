"""The commands. Their work, and torch with it, is imported inside them: `kvferry --help` must not take seconds.

That is the one place in the project where imports are not at the top of a module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console

from kvferry import __version__
from kvferry.cli.config_flags import with_settings
from kvferry.cli.config_sources import load_config
from kvferry.cli.config_view import describe, view_config
from kvferry.cli.logs import set_up_logs
from kvferry.cli.options import Carrier, ConfigOption, Device, DeviceOption, JsonOption, PrintOption, StdinOption
from kvferry.cli.sizes import parse_bytes
from kvferry.config import ServerConfig
from kvferry.errors import KVFerryError
from kvferry.router.config import RouterConfig

if TYPE_CHECKING:
    from pathlib import Path

    from kvferry.cli.bench_report import Result
    from kvferry.cli.demo import DemoResult, Say
    from kvferry.cli.demo_p2p import P2pDemoResult

    AnyResult = TypeVar("AnyResult", DemoResult, P2pDemoResult)

AnyConfig = TypeVar("AnyConfig", ServerConfig, RouterConfig)

__all__ = ["app", "main"]

_LOG = logging.getLogger(__name__)
_MAY_BE_SEVERAL = "may be given again; by default as suits the device."

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)  # pretty ones show variables: secrets, too
bench = typer.Typer(help="Measure this machine; ratios are to a limit measured in the same run.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvferry {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version, and end.")
    ] = False,
) -> None:
    """Share, keep and move the paged KV caches of LLM engines."""


@app.command()
@with_settings(ServerConfig)
def serve(
    flags: Mapping[str, Any],
    *,
    config: ConfigOption = None,
    print_config: PrintOption = False,
    until_stdin_closes: StdinOption = False,
) -> None:
    """Run the cache server until SIGTERM or SIGINT.

    Each setting is a flag, a variable (--disk-size is KVFERRY_DISK_SIZE) and a key of the file (disk_size).
    """
    settings = _settings(ServerConfig, flags, config, print_config=print_config)
    _LOG.info("starting: %s", describe(settings))
    from kvferry.cli.serve import run_server

    with _ended_by_errors():
        run_server(settings, until_stdin_closes=until_stdin_closes)


@app.command()
@with_settings(RouterConfig)
def route(
    flags: Mapping[str, Any],
    *,
    config: ConfigOption = None,
    print_config: PrintOption = False,
    until_stdin_closes: StdinOption = False,
) -> None:
    """Run the front door of prefill and decode engines until SIGTERM or SIGINT.

    Each setting is a flag, a variable (--max-body is KVFERRY_ROUTE_MAX_BODY) and a key of the file (max_body).
    """
    settings = _settings(RouterConfig, flags, config, print_config=print_config)
    try:
        from kvferry.cli.route import run_router
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise ValueError(f"the router needs the package {package}: pip install 'kvferry[route]'") from None
    with _ended_by_errors():
        run_router(settings, until_stdin_closes=until_stdin_closes)


@app.command()
def demo(
    device: DeviceOption = Device.auto,
    prompt_tokens: Annotated[int, typer.Option(min=0, help="Length of the prompt; 0: as suits the device.")] = 0,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 24,
    p2p: Annotated[
        bool, typer.Option("--p2p", help="Instead: KV from a prefill engine straight into a decode engine.")
    ] = False,
    carrier: Annotated[
        Carrier, typer.Option(help="With --p2p, what moves the KV; auto: the best that there is.")
    ] = Carrier.auto,
    as_json: JsonOption = False,
) -> None:
    """Show the main job: a killed engine's KV, reused by another engine, gives the same tokens sooner."""
    from kvferry.cli.demo import DemoConfig, run_demo
    from kvferry.cli.demo_view import show_result

    if carrier is not Carrier.auto and not p2p:
        raise typer.BadParameter("it goes with --p2p", param_hint="--carrier")
    config = DemoConfig(device=device.value, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    if p2p:
        from kvferry.cli.demo_p2p import run_demo_p2p
        from kvferry.cli.demo_p2p_view import show_p2p_result

        _show(lambda say: run_demo_p2p(config, carrier.value, say), show_p2p_result, as_json=as_json)
    else:
        _show(lambda say: run_demo(config, say), show_result, as_json=as_json)


def _show(run: Callable[[Say], AnyResult], show: Callable[[Console, AnyResult], None], *, as_json: bool) -> NoReturn:
    """Run a demo, show what came of it, and end with 1 where a promise did not hold."""
    from kvferry.cli.demo_view import show_steps

    with _ended_by_sigterm():
        if as_json:
            result = run(lambda _: None)
            typer.echo(json.dumps(dataclasses.asdict(result)))
        else:
            console = Console()
            with show_steps(console) as say:
                result = run(say)
            show(console, result)
    raise typer.Exit(1 if result.broken_promises() else 0)


@bench.command("ipc")
def bench_ipc(
    device: DeviceOption = Device.auto,
    size: Annotated[
        str, typer.Option(help="The allocation that is shared, e.g. 4GiB; by default as suits the device.")
    ] = "",
    held: Annotated[str, typer.Option(help="What each engine that is killed holds, e.g. 4GiB.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Times that each figure is measured.")] = 9,
    kills: Annotated[int, typer.Option(min=1, help="Engines to kill.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Sharing a KV cache with another process, and its memory back after a kill."""
    from kvferry.cli.bench_ipc import IpcBenchConfig, run_bench_ipc
    from kvferry.cli.machine import resolve_device

    config = IpcBenchConfig.for_device(resolve_device(device.value))
    config = dataclasses.replace(
        config,
        size_bytes=parse_bytes(size) if size else config.size_bytes,
        held_bytes=parse_bytes(held) if held else config.held_bytes,
        repeats=repeats,
        kills=kills,
    )
    with _ended_by_sigterm():
        _report("ipc", config.device, run_bench_ipc(config), as_json=as_json)


@bench.command("store")
def bench_store(
    device: DeviceOption = Device.auto,
    size: Annotated[list[str], typer.Option(help=f"KV to store and retrieve, e.g. 512MiB; {_MAY_BE_SEVERAL}")] = [],  # noqa: B006  typer copies it
    repeats: Annotated[int, typer.Option(min=1, help="Times that each figure is measured.")] = 7,
    lookups: Annotated[int, typer.Option(min=2, help="Lookups to time.")] = 200,
    as_json: JsonOption = False,
) -> None:
    """Store and retrieve until the data is there, beside a plain copy; lookups."""
    from kvferry.cli.bench_store import StoreBenchConfig, run_bench_store
    from kvferry.cli.machine import resolve_device

    config = StoreBenchConfig.for_device(resolve_device(device.value))
    sizes = tuple(sorted(parse_bytes(text) for text in size)) or config.sizes_bytes
    config = dataclasses.replace(config, sizes_bytes=sizes, repeats=repeats, lookups=lookups)
    with _ended_by_sigterm():
        _report("store", config.device, run_bench_store(config), as_json=as_json)


@bench.command("p2p")
def bench_p2p(
    carrier: Annotated[str, typer.Option(help="What moves the bytes: ipc, nccl (two GPUs) or host (sockets).")] = "ipc",
    device: DeviceOption = Device.auto,
    size: Annotated[list[str], typer.Option(help=f"KV to send, e.g. 512MiB; {_MAY_BE_SEVERAL}")] = [],  # noqa: B006  typer copies it
    block: Annotated[
        list[str], typer.Option(help=f"Bytes of a block side by side, e.g. 64KiB; {_MAY_BE_SEVERAL}")
    ] = [],  # noqa: B006
    repeats: Annotated[int, typer.Option(min=1, help="Times that each figure is measured.")] = 9,
    as_json: JsonOption = False,
) -> None:
    """Paged KV from one engine's blocks into another's, beside the raw carrier."""
    from kvferry.cli.bench_p2p import P2pBenchConfig, run_bench_p2p
    from kvferry.cli.machine import resolve_device

    config = P2pBenchConfig.for_device("cpu" if carrier == "host" else resolve_device(device.value), carrier)
    config = dataclasses.replace(
        config,
        sizes_bytes=tuple(sorted(parse_bytes(text) for text in size)) or config.sizes_bytes,
        piece_bytes=tuple(sorted(parse_bytes(text) for text in block)) or config.piece_bytes,
        repeats=repeats,
    )
    with _ended_by_sigterm():
        _report("p2p", config.device, run_bench_p2p(config), as_json=as_json)


@bench.command("server")
def bench_server(
    seconds: Annotated[float, typer.Option(help="Load over which memory is watched; 3600 is an hour.")] = 60.0,
    lookup_seconds: Annotated[float, typer.Option(help="Lookups by each number of clients.")] = 4.0,
    clients: Annotated[list[int], typer.Option(help="Clients at once; may be given again.")] = [],  # noqa: B006  typer copies it
    lookups: Annotated[int, typer.Option(min=2, help="Lookups by one client alone to time.")] = 300,
    as_json: JsonOption = False,
) -> None:
    """Lookups by many clients at once, on the host backend; whether the server's memory stays flat under load."""
    from kvferry.cli.bench_server import ServerBenchConfig, run_bench_server

    config = ServerBenchConfig(seconds, lookup_seconds, tuple(clients) or (1, 8, 64), lookups)
    with _ended_by_sigterm():
        _report("server", "cpu", run_bench_server(config), as_json=as_json)


def _report(name: str, device: str, results: list[Result], *, as_json: bool) -> None:
    from kvferry.cli.bench_report import as_object, show
    from kvferry.cli.machine import describe_machine

    if as_json:
        typer.echo(json.dumps(as_object(name, describe_machine(device), results)))
    else:
        show(Console(), name, results)


def _settings(kind: type[AnyConfig], flags: Mapping[str, Any], file: Path | None, *, print_config: bool) -> AnyConfig:
    """What a server is to run with, whose log begins here; or it is shown, and the command ends."""
    loaded = load_config(kind, flags, file, os.environ)
    if print_config:
        typer.echo(view_config(loaded))
        raise typer.Exit
    set_up_logs(loaded.config.log_format, loaded.config.log_level)
    return loaded.config


@contextlib.contextmanager
def _ended_by_errors() -> Iterator[None]:
    """End with code 2 where a server cannot start or go on, and say why in its log."""
    try:
        yield
    except (KVFerryError, ValueError) as error:
        _LOG.error("ended: %s", error)
        raise typer.Exit(2) from None


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM unwinds the body as Ctrl-C does, so that children and files are cleaned up."""

    def unwind(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def main() -> None:
    """The entry point of `kvferry`: errors that people can act on are shown as one line, not as a trace."""
    try:
        app()
    except (KVFerryError, ChildProcessError, ValueError) as error:
        typer.echo(f"kvferry: {error}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
