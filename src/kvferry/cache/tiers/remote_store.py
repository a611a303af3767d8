"""What of obstore the remote tier needs: opening a store by URL, and errors without what nobody may read in a log."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry.errors import TierError, TierFullError, TierUnavailableError
from kvferry.settings import split_remote_url

if TYPE_CHECKING:
    from obstore.store import LocalStore, S3Store

# Settings of the HTTP client, which obstore wants apart from those of the store (and panics over, among them).
_CLIENT_OPTIONS = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "default_content_type",
        "http1_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "http2_max_frame_size",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "randomize_addresses",
        "root_certificate",
        "user_agent",
    }
)
_OWN_OPTIONS = frozenset({"bucket", "bucket_name", "connect_timeout", "read_timeout", "timeout"})
_ENDPOINTS = frozenset({"endpoint", "endpoint_url", "endpoint_url_s3"})

_STATUS = re.compile(r"status code: ([1-5][0-9]{2}(?: [A-Z][A-Za-z ]{1,40})?)")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,60})</Code>")
_KEY = re.compile(r"Configuration key: '([a-z0-9_]{1,60})'")
_ERRNO = re.compile(r"\(os error ([0-9]{1,4})\)")
_CAUSES = (
    (re.compile(r"/latest/(api/token|meta-data)"), "no credentials: give access_key_id and secret_access_key"),
    (re.compile(r"kind: Timeout"), "no answer in time"),
    (re.compile(r"kind: ConnectionRefused"), "connection refused"),
    (re.compile(r"dns error"), "the host's name is not known"),
    (re.compile(r"kind: Connect,"), "no connection"),
    (re.compile(r"Missing(AccessKeyId|SecretAccessKey)"), "access_key_id and secret_access_key belong together"),
    (re.compile(r"failed to parse"), "a value is not of its kind"),
    (re.compile(r"builder error"), "an endpoint of http:// has to be a remote option, or needs allow_http=true"),
    (re.compile(r"error sending request"), "the connection broke, or what answered is no store"),
    (re.compile(r"request or response body error|NoContentRange"), "the answer broke off"),
)
_NUM_RETRIES = 2
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class RemoteUrl(NamedTuple):
    """Where the objects are: a bucket and a prefix in it, or a folder."""

    scheme: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}{'/' if self.prefix else ''}{self.prefix}"

    @classmethod
    def parse(cls, url: str) -> RemoteUrl:
        """Raises TierError, whose text holds nothing of the URL beyond its scheme, bucket and path."""
        try:
            return cls(*split_remote_url(url))
        except ValueError as error:
            raise TierError(str(error)) from None


class Opened(NamedTuple):
    """A store, and the class of what its calls raise."""

    store: S3Store | LocalStore
    error: type[Exception]


def open_store(url: RemoteUrl, options: Mapping[str, str], timeout_s: float) -> Opened:
    """The store at `url`; asks nobody yet. Raises TierError."""
    try:
        from obstore import store
        from obstore.exceptions import BaseError
    except ImportError:
        raise TierError(f"{url} needs the package obstore: pip install 'kvferry[remote]'") from None
    try:
        if url.scheme == "file":
            if options:
                raise TierError(f"{url} takes no remote options; it got {', '.join(sorted(options))}")
            return Opened(store.LocalStore(f"/{url.prefix}", mkdir=True), BaseError)
        arguments = _arguments(options, timeout_s)
        return Opened(store.S3Store(url.bucket, prefix=url.prefix or None, **arguments), BaseError)
    except (BaseError, OSError, ValueError) as error:
        names = f" with the options {', '.join(sorted(options))}" if options else ""
        raise TierError(f"{url} cannot be opened{names}: {cause_of(error, url)}") from None


def unavailable(error: Exception, url: RemoteUrl, what: str) -> TierError:
    """What a failed call of a store becomes: no room, or not to be reached; the text is safe to be logged."""
    number, status = _errno_of(error, url), _STATUS.search(str(error))
    full = number in _FULL or (status is not None and status[1].startswith("507"))
    return (TierFullError if full else TierUnavailableError)(f"{what} at {url} failed: {cause_of(error, url)}")


def cause_of(error: Exception, url: RemoteUrl) -> str:
    """What can be said of an error of obstore's: codes that are in its text, and nothing else of it.

    The text may hold a request's headers, a server's whole answer, and what that repeats of the request.
    """
    text = str(error)
    parts = [f"status {match[1].strip()}" for match in [_STATUS.search(text)] if match]
    parts += [match[1] for match in [_CODE.search(text)] if match]
    parts += [f"there is no {match[1]}" for match in [_KEY.search(text)] if match]
    parts += [os.strerror(number) for number in [_errno_of(error, url)] if number]
    parts += [cause for pattern, cause in _CAUSES if pattern.search(text)][:1]
    return ", ".join(parts) or f"{type(error).__name__}, what came or was asked for cannot be used"


def _errno_of(error: Exception, url: RemoteUrl) -> int | None:
    """The operating system's number for an error of a folder. What a server wrote may only look like one."""
    match = _ERRNO.search(str(error)) if url.scheme == "file" else None
    return int(match[1]) if match else None


def _arguments(options: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
    """S3Store's keyword arguments, such that a call ends within about `timeout_s`, retries included.

    An attempt may last half of it, and after that half none begins.
    """
    config: dict[str, str] = {}
    client: dict[str, Any] = {}
    for option, value in options.items():
        name = option.lower().removeprefix("aws_")
        if name in _OWN_OPTIONS:
            raise TierError(
                f"the remote option {option} is not for setting: the URL names the bucket, KVferry the times"
            )
        if name in _CLIENT_OPTIONS:
            client[name] = value
        else:
            config[option.lower()] = value  # for a few of these the prefix is part of the name
        if name in _ENDPOINTS and value.startswith("http://"):
            client.setdefault("allow_http", True)
    half = timedelta(seconds=timeout_s / 2)
    client |= {"timeout": half, "connect_timeout": half / 2}
    backoff = {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(milliseconds=500), "base": 2}
    return {
        "config": config,
        "client_options": client,
        "retry_config": {"max_retries": _NUM_RETRIES, "retry_timeout": half, "backoff": backoff},
    }
