"""Log records as lines."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from kvferry.cli.logs import JsonFormatter, TextFormatter, set_up_logs


def record_of(text: str, *args: object, error: bool = False, **extra: Any) -> logging.LogRecord:
    found = None
    if error:
        try:
            raise ValueError("first\nsecond")
        except ValueError:
            found = sys.exc_info()
    record = logging.LogRecord("kvferry.part", logging.WARNING, __file__, 1, text, args, found)
    record.created, record.msecs = 1_796_012_345.678, 678.0
    vars(record).update(extra)
    return record


def test_text_has_time_level_logger_message_and_extra_fields() -> None:
    line = TextFormatter().format(record_of("disk %s", "full", path="/a b", free=0))
    assert line == "2026-11-30T04:19:05.678Z WARNING kvferry.part: disk full path='/a b' free=0"


def test_json_has_them_as_fields() -> None:
    fields = json.loads(JsonFormatter().format(record_of("disk %s", "full", path="/a", level="mine", odd=object)))
    assert fields.pop("thread")
    assert fields == {
        "time": "2026-11-30T04:19:05.678Z",
        "level": "warning",
        "logger": "kvferry.part",
        "message": "disk full",
        "path": "/a",
        "odd": repr(object),
    }


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_record_is_one_line_whatever_is_in_it(formatter: logging.Formatter) -> None:
    line = formatter.format(record_of("peer said %s", "a\nERROR forged\r\x1b[31m\u2028\udc80", error=True))
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    assert "ValueError" in line
    line.encode()


@pytest.mark.parametrize(("log_format", "begins"), [("text", "2"), ("json", "{")])
def test_kvferrys_records_from_a_level_on_and_others_warnings_go_to_stderr(
    log_format: str, begins: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, ours = logging.getLogger(), logging.getLogger("kvferry")
    levels, handlers = (root.level, ours.level), list(root.handlers)
    try:
        set_up_logs(log_format, "info")
        for name in ("kvferry.part", "other"):
            logging.getLogger(name).debug("debug of %s", name)
            logging.getLogger(name).info("info of %s", name)
            logging.getLogger(name).warning("warning of %s", name)
    finally:
        root.handlers[:] = handlers
        root.setLevel(levels[0])
        ours.setLevel(levels[1])
        logging.captureWarnings(False)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert [line[0] for line in lines] == [begins] * 3
    assert [
        next(text for text in ("info of kvferry.part", "warning of kvferry.part", "warning of other") if text in line)
        for line in lines
    ] == ["info of kvferry.part", "warning of kvferry.part", "warning of other"]
