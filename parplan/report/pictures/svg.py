"""SVG drawings as trees of elements, so that all text is escaped, in colours for a light and a dark background.

Every colour is a role: its light value is an attribute, which every program reads, and the dark one a rule of a style
sheet. The colours of strategies and of kinds of work differ in lightness too, for readers who see fewer hues.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from xml.etree import ElementTree

__all__ = [
    "BROAD",
    "COLOURS",
    "MONOSPACE",
    "NARROW",
    "SANS",
    "Colour",
    "Drawing",
    "Element",
    "add",
    "fill",
    "line",
    "theme",
]

Element = ElementTree.Element
BROAD, NARROW = 1000.0, 460.0
"""Widths of drawings: of a page or a file, and of a page on a telephone, where names stand above what they name."""
HEAD, MARGIN = 34.0, 12.0
SANS = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
MONOSPACE = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"


@dataclass(frozen=True)
class Colour:
    """One role's colour on a light and on a dark background, and its word in a legend, if it is a kind of work."""

    light: str
    dark: str
    words: str = ""


COLOURS: Mapping[str, Colour] = {
    "paper": Colour("#ffffff", "#12161c"),
    "ink": Colour("#1b2430", "#e7ebf0"),
    "soft": Colour("#5b6675", "#9aa6b5"),
    "rule": Colour("#d5dbe3", "#303945"),
    "hollow": Colour("#eef1f5", "#1d242d"),
    "limit": Colour("#b3261e", "#ff8a80"),
    # strategies
    "alone": Colour("#6c7785", "#6c7785"),
    "replicas": Colour("#2a6fb5", "#2f78c2"),
    "replicas-2": Colour("#8fbce6", "#9cc6ee"),
    "shards": Colour("#e0912f", "#e79b3c"),
    "shards-2": Colour("#f3cf9b", "#f3cf9b"),
    "both": Colour("#0f7f73", "#148679"),
    "both-2": Colour("#86cdc3", "#8fd4ca"),
    # kinds of work, by the values of Kind, with their words
    "forward": Colour("#a9c3df", "#7fa6cf", "forward"),
    "backward": Colour("#4d79a8", "#41698f", "backward"),
    "transfer": Colour("#e2711d", "#f28b3c", "transfer"),
    "reduction": Colour("#9b4f96", "#c07fbc", "gradient sum"),
    "update": Colour("#3f8f5b", "#5fb47c", "optimizer's update"),
    "overhead": Colour("#8a8f98", "#7d8591", "runtime"),
    # lines of devices
    "device-1": Colour("#2a6fb5", "#6bb0f0"),
    "device-2": Colour("#e0912f", "#f0b35f"),
    "device-3": Colour("#0f7f73", "#3fc0b0"),
    "device-4": Colour("#9b4f96", "#cf8fcb"),
}


def fill(role: str) -> dict[str, str]:
    """Attributes that fill a shape or write a text in a role's colour."""
    return {"class": role, "fill": COLOURS[role].light}


def line(role: str, width: float = 1.0) -> dict[str, str]:
    """Attributes that draw an outline in a role's colour."""
    return {"class": f"line-{role}", "fill": "none", "stroke": COLOURS[role].light, "stroke-width": f"{width:g}"}


def theme() -> str:
    """Rules for a dark screen; print and other programs keep the light colours."""
    rules = [f".{role}{{fill:{colour.dark}}}.line-{role}{{stroke:{colour.dark}}}" for role, colour in COLOURS.items()]
    return f"@media screen and (prefers-color-scheme:dark){{{''.join(rules)}}}"


def add(parent: Element, tag: str, text: str = "", /, **attributes: object) -> Element:
    """A new element in `parent`; `font_size` is font-size, numbers have two decimals at most."""
    named = {
        name.rstrip("_").replace("_", "-"): f"{value:.2f}".rstrip("0").rstrip(".")
        if isinstance(value, float)
        else str(value)
        for name, value in attributes.items()
    }
    own = ElementTree.SubElement(parent, tag, named)
    own.text = text or None
    return own


class Drawing:
    """One SVG picture with its title and description for readers who do not see it.

    Args:
        name: prefix of its ids, unique on a page.
        how: how it is read, in a sentence that stands beside it on a page and below it in a file.
    """

    def __init__(self, name: str, size: tuple[float, float], title: str, description: str, how: str = "") -> None:
        self.width, self.height = size
        self.title, self.how = title, how
        self.root = ElementTree.Element(
            "svg",
            {
                "viewBox": f"0 0 {self.width:g} {self.height:g}",
                "role": "img",
                "aria-labelledby": f"{name}-title {name}-description",
                "id": name,
                "font-family": SANS,
                "font-size": "12",
            },
        )
        add(self.root, "title", title, id=f"{name}-title")
        add(self.root, "desc", description, id=f"{name}-description")

    def inline(self) -> str:
        """The markup inside of a page, which brings the style sheet, a heading and the sentence."""
        return ElementTree.tostring(self.root, encoding="unicode")

    def standalone(self) -> str:
        """The text of a file of its own, on paper of its own, with title and sentence."""
        lines = textwrap.wrap(self.how, int(self.width / 5.6))
        top, height = HEAD, HEAD + self.height + 15.0 * len(lines) + 8
        box = f"{-MARGIN:g} {-top:g} {self.width + 2 * MARGIN:g} {height:g}"
        root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg"})
        root.attrib.update(self.root.attrib)
        root.attrib.update({"viewBox": box, "width": f"{self.width + 2 * MARGIN:g}", "height": f"{height:g}"})
        title, description, *drawn = self.root
        root.extend([title, description])
        add(root, "style", theme())
        add(root, "rect", x=-MARGIN, y=-top, width="100%", height="100%", **fill("paper"))
        add(root, "text", self.title, x=0, y=-top + 22, font_weight=600, font_size=14, **fill("ink"))
        root.extend(drawn)
        words = add(root, "g", font_size=11, **fill("soft"))
        for number, text in enumerate(lines):
            add(words, "text", text, x=0, y=self.height + 12 + 15 * number)
        return f"{ElementTree.tostring(root, encoding='unicode')}\n"
