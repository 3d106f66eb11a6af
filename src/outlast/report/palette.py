"""The report's colours, once for light and once for dark pages.

Series and purposes use the Okabe-Ito palette (Okabe and Ito, "Color Universal Design", 2008), which
stays distinguishable with every common colour-vision deficiency; some tones are lightened on dark
ground. Figures and style sheet name colours as ``var(--name)``; the page's script resolves them, so
one definition serves both.
"""

from __future__ import annotations

COLOURS: dict[str, tuple[str, str]] = {
    "ground": ("#f5f6f8", "#0e1116"),
    "panel": ("#ffffff", "#161a20"),
    "sunken": ("#f0f2f5", "#1d222a"),
    "text": ("#1a1e24", "#e5e9ee"),
    "muted": ("#57606b", "#9ba6b2"),
    "line": ("#d7dce2", "#2d343e"),
    "grid": ("#e9ecf0", "#262c35"),
    "accent": ("#005f9e", "#6fb7f2"),
    "good": ("#00664a", "#43cfa2"),
    "caution": ("#7d4e00", "#f0b53c"),
    "bad": ("#a63c00", "#ff9460"),
    "series-1": ("#0072b2", "#3d9fdd"),
    "series-2": ("#d55e00", "#ee7a2a"),
    "series-3": ("#009e73", "#19b98c"),
    "series-4": ("#cc79a7", "#d98cb7"),
    "series-5": ("#e69f00", "#e69f00"),
    "series-6": ("#56b4e9", "#7cc7f0"),
    "compute": ("#0072b2", "#3d9fdd"),
    "data": ("#56b4e9", "#8fd0f5"),
    "communication": ("#e3d41f", "#f0e442"),
    "checkpoint": ("#e69f00", "#e69f00"),
    "guard": ("#332288", "#9d8df1"),
    "evaluation": ("#009e73", "#19b98c"),
    "startup": ("#cc79a7", "#d98cb7"),
    "restart": ("#7a3f63", "#a8658c"),
    "redone": ("#d55e00", "#ee7a2a"),
    "lost": ("#d55e00", "#ee7a2a"),
    "other": ("#8a929c", "#8a929c"),
    "unrecorded": ("#c9ced5", "#454d58"),
}
"""Name to (light, dark) colour."""

SERIES = 6


def series_colour(index: int) -> str:
    """The colour of the run at `index` (from 0); colours repeat after `SERIES` runs."""
    return f"var(--series-{index % SERIES + 1})"


def series_dash(index: int) -> str:
    """The line style that tells runs of the same colour apart."""
    return ("solid", "dash", "dot", "dashdot")[index // SERIES % 4]


def purpose_colour(purpose: str) -> str:
    """The colour of a purpose of time; grey for one that this version does not know."""
    return f"var(--{purpose if purpose in COLOURS else 'other'})"


def style_sheet() -> str:
    """CSS that defines every colour for light, dark, forced light or dark, and printed pages."""
    light, dark = (
        " ".join(f"--{name}: {pair[index]};" for name, pair in COLOURS.items()) for index in (0, 1)
    )
    return (
        f":root {{ color-scheme: light; {light} }}\n"
        "@media screen and (prefers-color-scheme: dark) {\n"
        f'  :root:not([data-theme="light"]) {{ color-scheme: dark; {dark} }}\n'
        "}\n"
        f'@media screen {{ :root[data-theme="dark"] {{ color-scheme: dark; {dark} }} }}\n'
    )
