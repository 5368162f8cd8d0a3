"""An SVG file as an element of a page: small, in the page's font and colours."""

from __future__ import annotations

import html
import re

from lipaudit.report.cells import plain
from lipaudit.report.draw.colours import CATEGORIES

INK = "#010203"
"""Stands for the page's own colour of text, which the browser fills in: light or dark."""
NUMBER = re.compile(r"-?\d+\.\d+")
PLACED = re.compile(r' (d|x|y|transform)="([^"]*)"')
ALIKE = re.compile(r'(<g clip-path="[^"]*")>(<use [^>]* style="([^"]*)"/>(?:<use [^>]*/>)*)</g>')


def element(file: str, alt: str, marks: str) -> str:
    """Cut an SVG file down to an element with an alternative text, and add its marks.

    No prolog, no metadata, no name spaces, no own ink and fonts.
    """
    text = file[file.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r' (xmlns(:\w+)?|version)="[^"]*"', "", text)
    used = set(re.findall(r"#(\w+)", text))
    text = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in used else "", text)
    text = text.replace("xlink:href", "href").replace("</svg>", f"{marks}</svg>")
    text = _headed(_compressed(text), alt)
    for index, colour in enumerate(CATEGORIES):
        text = text.replace(colour, f"var(--c{index}, {colour})")
    return text.replace(INK, "currentColor").strip()


def _headed(text: str, alt: str) -> str:
    """Give the element its role and its text, and its width to the page's style."""
    size = re.search(r'<svg[^>]* width="([\d.]+)pt"', text)
    width = f"{float(size[1]) * 4 / 3:.0f}" if size else "600"
    head = f'<svg role="img" aria-label="{html.escape(plain(alt))}" style="--width:{width}px"'
    text = re.sub(r'^<svg(?: (?:height|width)="[^"]*")*', lambda _: head, text)
    return re.sub(r' (height|width)="[\d.]+pt"', "", text, count=2)


def _compressed(text: str) -> str:
    """Leave out what a browser does not need: blanks, empty groups, digits, what is said twice."""
    text = re.sub(r">\s+<", "><", text)
    text = re.sub(r' transform="rotate\(-0 [^"]*"|font-family: [^;"]*;? ?', "", text)
    text = PLACED.sub(lambda m: f' {m[1]}="{_rounded(m[2])}"', text)
    text = re.sub(r"<g/>|<defs></defs>", "", text)
    return ALIKE.sub(_alike, text)


def _rounded(place: str) -> str:
    """Round coordinates to hundredths of a point, which no eye tells apart."""
    place = NUMBER.sub(lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), place)
    return " ".join(place.split())


def _alike(found: re.Match[str]) -> str:
    """Say the style of marks that all look alike once."""
    style = f' style="{found[3]}"'
    if found[2].count(style) < found[2].count("<use "):
        return found[0]
    return f"{found[1]}{style}>{found[2].replace(style, '')}</g>"
