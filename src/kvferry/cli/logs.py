"""Log records of a server on stderr, one a line: as text, or as one JSON object."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping

__all__ = ["set_up_logs"]

# What every record has; what is beside it was given as `extra`.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def set_up_logs(log_format: str, log_level: str) -> None:
    """Write this process's records to stderr from now on: KVferry's from `log_level` on, warnings of all others."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("kvferry").setLevel(log_level.upper())
    logging.captureWarnings(True)


class TextFormatter(logging.Formatter):
    """`TIME LEVEL LOGGER: text name=value ...`; what would begin a new line is escaped."""

    def format(self, record: logging.LogRecord) -> str:
        extra = "".join(f" {name}={value!r}" for name, value in _extra(record).items())
        text = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}{extra}"
        return _one_line("\n".join((text, *_traces(self, record))))


class JsonFormatter(logging.Formatter):
    """An object: `time`, `level`, `logger`, `thread`, `message`, the extra fields, and `trace` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "thread": record.threadName,
            "message": record.getMessage(),
        }
        traces = _traces(self, record)
        fields |= {name: value for name, value in _extra(record).items() if name not in fields}
        return json.dumps(fields | ({"trace": "\n".join(traces)} if traces else {}), default=repr)


def _time(record: logging.LogRecord) -> str:
    """In UTC, to the millisecond."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z"


def _extra(record: logging.LogRecord) -> Mapping[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _OWN}


def _traces(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    traces = [] if record.exc_info is None else [formatter.formatException(record.exc_info)]
    return traces + ([] if record.stack_info is None else [formatter.formatStack(record.stack_info)])


def _one_line(text: str) -> str:
    """No more than one line, whatever a peer has put into it."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
