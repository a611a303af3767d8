"""What a user sets for P2pNcclConnector: the keys of the connector that vLLM had, and a few more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvferry.connectors.vllm.settings import check_names, read_secret
from kvferry.p2p import P2pConfig
from kvferry.settings import LOOPBACK, is_loopback, join_host_port, split_host_port

_CONNECTOR = "P2pNcclConnector"
# Keys that some releases of vLLM have beside kv_connector_extra_config; there they count where it has none.
_TOP_LEVEL = ("kv_ip", "kv_port", "kv_buffer_size")
_ANYWHERE = ("0.0.0.0", "::", "*")
_Port = Annotated[int, Meta(ge=0, le=65_535)]


class P2pSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of the connector. Numbers may be given as strings, as they used to be.

    Parameters
    ----------
    kv_ip
        The address of this host at which other engines reach this one. Without it loopback, or, where `proxy_ip` is
        another host's, the address that vLLM finds for this host.
    kv_port
        Rank 0 listens there, the others at the ports after it; 0 for any free ones.
    kv_buffer_size, mem_pool_size_gb
        Bytes, and GiB of host memory behind them, for KV that comes before its request has blocks. On a GPU such KV
        stays with its sender, and nothing is allocated.
    send_type
        `PUT_ASYNC`: the prefill engine sends in the background. `PUT`: its steps wait for that, for a moment. `GET`: it
        keeps the KV until it is asked.
    nccl_num_channels
        Multiprocessors that NCCL may take for one peer; the same in all engines.
    proxy_ip, proxy_port, http_port
        Where the router hears of engines, and the port of this engine's own HTTP server.
    kv_rank, kv_parallel_size
        Known, and of no meaning: engines come and go.
    carrier
        What moves the bytes: `auto`, `ipc`, `nccl` or `host`.
    lease_s
        How long a decode engine waits for KV, and a prefill engine keeps it.
    token_file
        File with a secret that all engines share; needed, or one of the next two, beyond loopback.
    curve_key_file
        File with the secret CURVE key that all engines share.
    insecure
        Let anybody in who reaches the port.
    model_id
        Names the weights: engines with different names exchange nothing.
    """

    kv_ip: str = ""
    kv_port: _Port = 14_579
    kv_buffer_size: Annotated[float, Meta(ge=0, lt=1 << 50)] = 1e9
    mem_pool_size_gb: Annotated[float, Meta(ge=0, lt=1 << 20)] = 0.0
    send_type: Literal["PUT_ASYNC", "PUT", "GET"] = "PUT_ASYNC"
    nccl_num_channels: Annotated[int, Meta(ge=1, le=64)] = 8
    proxy_ip: str = ""
    proxy_port: _Port = 0
    http_port: _Port = 0
    kv_rank: int | None = None
    kv_parallel_size: int | None = None
    carrier: Literal["auto", "ipc", "nccl", "host"] = "auto"
    lease_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0
    token_file: str = ""
    curve_key_file: str = ""
    insecure: bool = False
    model_id: Annotated[str, Meta(max_length=200)] = ""

    def __post_init__(self) -> None:
        if self.kv_ip in _ANYWHERE:
            raise ValueError(f"kv_ip is {self.kv_ip!r}; give the address at which other engines reach this one")
        missing = [name for name in ("proxy_ip", "proxy_port", "http_port") if not getattr(self, name)]
        if missing and (self.proxy_ip or self.proxy_port):
            raise ValueError(
                f"{' and '.join(missing)} of P2pNcclConnector is not set: the router needs proxy_ip, proxy_port and "
                "http_port"
            )
        if self.proxy:
            split_host_port(self.proxy)

    @property
    def proxy(self) -> str | None:
        """Where to tell of this engine; None where nobody is to be told."""
        return join_host_port(self.proxy_ip, self.proxy_port) if self.proxy_ip else None

    def host(self, own_ip: Callable[[], str]) -> str:
        """Where this engine is reached; `own_ip` gives what vLLM takes for this host's address."""
        if self.kv_ip:
            return self.kv_ip
        return LOOPBACK if not self.proxy_ip or is_loopback(self.proxy_ip) else own_ip()

    @property
    def secret(self) -> bytes | None:
        """What tells the router that a heartbeat comes from one of the engines. Raises ValueError for no such file."""
        found = self._token or self._curve_key
        return None if found is None else found.encode()

    @property
    def _token(self) -> str | None:
        return read_secret("token_file", self.token_file, _CONNECTOR)

    @property
    def _curve_key(self) -> str | None:
        return read_secret("curve_key_file", self.curve_key_file, _CONNECTOR)

    def p2p_config(self, host: str, *, rank: int, size: int, data_rank: int, keeps: bool) -> P2pConfig:
        """How tensor-parallel rank `rank` of `size` takes part.

        It has room where it `keeps` what comes before its request. Raises ValueError for what is wrong, or lets
        strangers in.
        """
        port = self.kv_port + data_rank * size + rank if self.kv_port else 0
        if port > 65_535:
            raise ValueError(f"kv_port {self.kv_port} leaves no port for rank {rank} of data-parallel rank {data_rank}")
        try:
            return P2pConfig(
                address=join_host_port(host, port),
                send_type=self.send_type,
                carrier=self.carrier,
                kv_buffer_size=int(self.kv_buffer_size) if keeps else 0,
                mem_pool_size_gb=self.mem_pool_size_gb if keeps else 0.0,
                lease_s=self.lease_s,
                nccl_num_channels=self.nccl_num_channels,
                tp_rank=rank,
                tp_size=size,
                token=self._token,
                curve_secret_key=self._curve_key,
                insecure=self.insecure,
            )
        except ValueError as error:
            raise ValueError(
                f"P2pNcclConnector: {error} (set token_file, curve_key_file or insecure in kv_connector_extra_config)"
            ) from None

    @classmethod
    def of(cls, transfer: Any) -> P2pSettings:
        """Settings out of vLLM's KVTransferConfig. Raises ValueError for what is unknown or of the wrong type."""
        found = {name: getattr(transfer, name) for name in _TOP_LEVEL if getattr(transfer, name, None) is not None}
        if found.get("kv_ip") == LOOPBACK:
            del found["kv_ip"]  # vLLM's default, which nobody has set
        found |= {key: value for key, value in transfer.kv_connector_extra_config.items() if value != ""}
        check_names(found, cls.__struct_fields__, _CONNECTOR)
        try:
            return msgspec.convert(found, cls, strict=False)
        except (msgspec.ValidationError, ValueError) as error:
            raise ValueError(f"kv_connector_extra_config of P2pNcclConnector: {error}") from None
