"""Amounts of memory in words."""

from __future__ import annotations

import pytest

from kvferry.cli.sizes import exact_bytes, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GiB", 4 << 30),
        ("512 MiB", 512 << 20),
        ("1.5gib", 3 << 29),
        ("2e9", 2_000_000_000),
        ("7", 7),
        ("3GB", 3_000_000_000),
        ("10k", 10_000),
        ("9007199254740993", 9_007_199_254_740_993),
    ],
)
def test_amounts_are_read(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-4GiB", "4 gallons", "1.2.3MiB", "iB", "1 2"])
def test_other_words_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="for example 4GiB"):
        parse_bytes(text)


def test_amounts_are_written_as_they_are_read() -> None:
    assert format_bytes(64 << 20) == "64 MiB"
    assert format_bytes(5 << 40) == "5120 GiB"
    assert format_bytes(100) == "100 B"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (5, "5"), (1 << 40, "1TiB"), (64 << 20, "64MiB"), (50 * 10**9, "50GB"), (4097, "4097")],
)
def test_exact_amounts_are_short_and_mean_the_same(count: int, text: str) -> None:
    assert exact_bytes(count) == text
    assert parse_bytes(text) == count


def test_more_than_any_number_can_say_is_refused() -> None:
    with pytest.raises(ValueError, match="more memory"):
        parse_bytes("1e999")
