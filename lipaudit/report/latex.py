"""The tables of a page in LaTeX, with booktabs, for a paper."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator

from lipaudit.errors import visible
from lipaudit.report import blocks
from lipaudit.report.blocks import Card, Heatmap, Paragraph, Points, Table

PROSE = r"p{0.5\textwidth}"
"""Column of a scorecard's sentences: half of a line, so that it fits a page of one column."""
WRITTEN = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "{}$&#%_"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    **{character: f"{{{character}}}" for character in "[*-"},  # \\ reads [ and *, -- is a dash
    "–": "--",
    "—": "---",
    "…": r"\ldots{}",
    "‖": r"$\Vert$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "±": r"$\pm$",
    "→": r"$\rightarrow$",
    "∘": r"$\circ$",
    "•": r"$\bullet$",
    "∞": r"$\infty$",
    "\N{MINUS SIGN}": "$-$",
    "✓": r"$\surd$",
    "✗": r"$\times$",
}


def render(page: blocks.Document) -> bytes:
    """Write the scorecard and the tables of a page, without folded tables and pictures."""
    lines = [r"% needs \usepackage{booktabs}", f"% {escape(page.title)}"]
    for chapter in page.chapters:
        lines += ["", f"% {escape(chapter.title)}"] if chapter.title else []
        for block in chapter.blocks:
            lines += _write_block(block)
    return ("\n".join(lines) + "\n").encode()


def escape(text: str) -> str:
    """Escape text for LaTeX."""
    return "".join(map(_write_character, visible(text)))


def _write_character(character: str) -> str:
    """Write a character; characters without a LaTeX font become their number."""
    if character in WRITTEN:
        return WRITTEN[character]
    if ord(character) < 0x180:  # ASCII and Latin letters with accents, which LaTeX reads as UTF-8
        return character
    kind, *parts = unicodedata.decomposition(character).split() or [""]
    if kind == "<super>":
        codes = [chr(int(part, 16)) for part in parts]
        return rf"\textsuperscript{{{''.join(map(_write_character, codes))}}}"
    return f"U+{ord(character):04X}"


def _write_block(block: blocks.Block) -> Iterator[str]:
    match block:
        case Card(note=""):  # facts
            yield from (f"% {escape(': '.join(row))}" for row in block.rows)
        case Table(folded=False) | Heatmap(square=False) | Card():
            yield from _write_table(blocks.lay_out(block))
        case Paragraph(tone=tone) if tone:
            yield from _remarks([block.text])
        case Points():
            yield from _remarks(f"{mark}: {text}" for mark, text, _ in block.points if mark)


def _remarks(texts: Iterable[str]) -> Iterator[str]:
    yield from (rf"{{\footnotesize {escape(text)}\par}}" for text in texts)


def _write_table(grid: blocks.Grid) -> Iterator[str]:
    yield from ("", r"\begin{table}", r"\centering")
    yield from [rf"\caption{{{escape(grid.title)}}}"] if grid.title else []
    yield from (rf"\begin{{tabular}}{{{grid.align.replace('p', PROSE)}}}", r"\toprule")
    yield from [_line(map(escape, grid.heads)), r"\midrule"] if grid.heads else []
    for index, row in enumerate(grid.rows):
        strong = r"\textbf{%s}" if index in grid.strong else "%s"
        yield _line(strong % escape(text) for text in row)
    yield from (r"\bottomrule", r"\end{tabular}")
    yield from ["", *_remarks(["; ".join(grid.notes)])] if any(grid.notes) else []
    yield r"\end{table}"


def _line(texts: Iterable[str]) -> str:
    return rf"{' & '.join(texts)} \\"
