"""How numbers read, and whether colours can be seen."""

from __future__ import annotations

import pytest

from outlast.report import palette, text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0123, "12.3 ms"),
        (59.94, "59.9 s"),
        (59.97, "1 min 00 s"),
        (3599.7, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (86_399, "1 d 00 h"),
        (200_000, "2 d 08 h"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert text.duration(seconds) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1.43214, "1.432"),
        (11_080.4, "11,080"),
        (0, "0"),
        (0.000123456, "0.0001235"),
        (1.5e-7, "1.500e-07"),
        (float("nan"), "nan"),
    ],
)
def test_numbers(value: float, words: str) -> None:
    assert text.number(value) == words


def test_counts() -> None:
    assert text.count(9_999_999) == "9,999,999"
    assert text.count(124_439_808) == "124.4 million"
    assert text.count(7_000_000_000) == "7.000 billion"


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two ``#rrggbb`` colours, 1 to 21 (WCAG 2.1, relative luminance)."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [0, 1])
@pytest.mark.parametrize("name", ["text", "muted", "accent", "good", "caution", "bad"])
def test_words_contrast_with_their_ground(name: str, theme: int) -> None:
    """WCAG 2.1 AA asks for 4.5."""
    for ground in ("panel", "ground", "sunken"):
        ratio = contrast(palette.COLOURS[name][theme], palette.COLOURS[ground][theme])
        assert ratio >= 4.5


@pytest.mark.parametrize("theme", [0, 1])
@pytest.mark.parametrize("name", ["series-1", "series-2", "series-3"])
def test_the_first_curves_contrast_with_their_panel(name: str, theme: int) -> None:
    """WCAG 2.1 AA asks for 3 in graphics."""
    panel = palette.COLOURS["panel"][theme]
    assert contrast(palette.COLOURS[name][theme], panel) >= 3
