"""A page in markup: as one HTML file, as GitHub-flavoured Markdown, and its tables as LaTeX.

The HTML file loads nothing, prints, fits a phone, and works without scripts. Its own script is a
file beside the style; the page permits only the script with this hash.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from lipaudit.errors import visible
from lipaudit.report import blocks, cells
from lipaudit.report.blocks import (
    ALL_COLUMNS,
    Block,
    Card,
    Chapter,
    Curve,
    Document,
    Forest,
    Gallery,
    Grid,
    Heatmap,
    Paragraph,
    Passage,
    Points,
    Table,
    explain_shades,
    lay_out,
    shade_tokens,
)
from lipaudit.report.charts import draw_svg

HTML = "html"


def render_html(page: Document) -> bytes:
    """Write a page as HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("lipaudit.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "plain": visible,
        "drawn": lambda block: Markup(draw_svg(block)),  # drawn here, with escaped texts
        "laid": lay_out,
        "numbers": list_sort_keys,
        "places": place_columns,
        "pads": align_numbers,
        "passport": find_passport,
        "complete": has_all_columns,
        "tokens": shade_tokens,
        "legend": explain_shades,
    }
    # The page permits only the script with this hash, so a name cannot smuggle in another.
    script = environment.get_template("page.js").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = environment.get_template("report.html").render(page=page, script=script, digest=digest)
    return visible(text, keep="\n\t").encode()


# Widths of a table at which a column appears, in pixels, by the column's class in the style sheet;
# half of a window of 1280 pixels has 594. The class f0 appears where all columns are asked for.
APPEARS = {"": 300, "f1": 440, "f2": 590, "f3": 890, "f4": 1190}
HALF = APPEARS["f2"]
# Pixels of a letter, a digit and a bold letter in a wide font.
LETTER = 6.6
DIGIT = 8.2
BOLD = 8.8
# Pixels of the padding beside a column.
PADDING = 18
# Longer texts of a table are broken into lines.
LONGEST = 32


class Places(NamedTuple):
    """How a table fits a page.

    Attributes:
        width: `half` if it fits beside a picture, else `wide`.
        classes: classes of the cells of each column: `t` for text, and one of `APPEARS`.
        whole: the class of `APPEARS`, or `f0`, from which all columns appear; empty if all
            always do.
    """

    width: str
    classes: list[str]
    whole: str


def place_columns(block: Table, grid: Grid, *, may_hide: bool) -> Places:
    """Return the style classes by which a page shows a table in windows of different widths.

    The classes say whether the table takes half of the page (beside a picture) or the whole width,
    and from which width of the page each column appears. The width of a column is estimated from
    the lengths of its texts.

    Args:
        block: the table.
        grid: the table with all cells as texts.
        may_hide: whether a table that is wider than half of the page takes only half of it, and
            hides the rest of its columns. It may if another table of the chapter has all columns.
    """
    classes = []
    # The right edge of each column in pixels from the left edge of the table.
    ends = []
    end = 0.0
    for index, column in enumerate(block.columns):
        is_text = column.format == "s"
        classes.append("t" if is_text else "")
        texts = [row[index] for row in grid.rows]
        end += _measure_column(grid.heads[index], texts, is_text=is_text) + PADDING
        ends.append(end)
    if end <= HALF:  # the whole table fits half of the page
        return Places(width="half", classes=classes, whole="")
    if block.folded:  # a folded table never hides a column
        return Places(width="wide", classes=classes, whole="")
    place = ""
    for index in range(block.keys, len(ends)):  # the first columns name the row: always visible
        place = _find_place(ends[index])
        classes[index] = f"{classes[index]} {place}".strip()
    # The last column needs the widest page: from its class on, all columns are visible.
    return Places(width="half" if may_hide else "wide", classes=classes, whole=place)


def _measure_column(head: str, texts: Sequence[str], *, is_text: bool) -> float:
    """Return the estimated width of a column in pixels: of its longest text, or of its heading.

    A heading above numbers may be broken into lines, so only its longest word counts.
    """
    words = [head] if is_text else head.split()
    # The widths of a letter, of a digit and of a bold letter in pixels: LETTER, DIGIT and BOLD.
    character = LETTER if is_text else DIGIT
    widest_word = max(map(len, words), default=0)
    longest_text = max(map(len, texts), default=0)
    return max(BOLD * widest_word, character * min(longest_text, LONGEST))


def _find_place(end: float) -> str:
    """Return the style class of a column whose right edge is at this pixel.

    `APPEARS` maps each class to the page width from which its columns are visible. A column gets
    the class of the smallest width that contains the column. A column that fits no width gets
    `f0`: a reader has to ask for all columns to see it.
    """
    for name, width in APPEARS.items():
        if width >= end:
            return name
    return "f0"


# The integer part of a number, and the unit behind it.
WHOLE = re.compile(r"[-+]?\d+")
UNIT = re.compile(r"[^\d.)]*$")


def align_numbers(grid: Grid) -> list[tuple[str, ...]]:
    """Return the padding of each cell that aligns the decimal points of every column.

    The page aligns numbers on the right and prints these characters invisibly behind the number.

    Args:
        grid: the table; its texts are not padded.

    Returns:
        For each row and column the characters to write; empty if a cell needs no padding.
    """
    columns = []
    # `zip(*rows)` turns rows into columns, and columns into rows. Without rows it is empty.
    for side, texts in zip(grid.align, zip(*grid.rows, strict=True), strict=False):
        pads = [""] * len(texts)
        if side == "r":  # a column of numbers
            pads = _align_column(texts)
        columns.append(pads)
    return list(zip(*columns, strict=True))


def _align_column(texts: Sequence[str]) -> list[str]:
    """Return for each cell of a column the padding that aligns the decimal points.

    The cells are aligned on the right, and the page writes the padding invisibly behind them. In a
    column with 3, 0.5 and 1.25, the number 3 gets ".25" and 0.5 gets "5": each number then has as
    many characters behind its integer part. Cells without a number get no padding.
    """
    # By row: the characters of a number behind its integer part, without the unit.
    fractions = {}
    for i, text in enumerate(texts):
        whole = WHOLE.match(text)
        if whole is not None:  # the text begins with a number
            fractions[i] = UNIT.sub("", text[whole.end() :])
    longest = max(fractions.values(), key=len, default="")
    pads = [""] * len(texts)
    for i, fraction in fractions.items():
        pads[i] = longest[len(fraction) :]
        # In a column of intervals, "0.5 (0.25 to 0.75)", only digits are missing. The end of the
        # longest text may contain spaces, which are narrower than digits.
        if " " in longest:
            pads[i] = "0" * len(pads[i])
    return pads


def has_all_columns(chapter: Chapter) -> bool:
    """Say whether a chapter has a folded table of all columns."""
    titles = [block.title for block in chapter.blocks if isinstance(block, Table)]
    return ALL_COLUMNS in titles


def find_passport(opening: Chapter | None) -> Card | None:
    """Return the card of facts (model, data, run) in the opening of a page, if it has one."""
    if opening is None:
        return None
    for block in opening.blocks:
        if isinstance(block, Card) and not block.note:  # a card with a note has figures
            return block
    return None


def list_sort_keys(block: Table, grid: Grid) -> list[tuple[str, ...]]:
    """Return for each cell the number by which the page's script sorts a column.

    A cell whose text is a number that occurs once in the column needs no such number: the script
    reads the text. Equal texts may be rounded from different values, so these cells need the exact
    values. Cells without a number get an empty text.

    Args:
        block: the table with its values.
        grid: the same table with all cells as texts.

    Returns:
        For each row and column the number as a text; empty for a cell that needs none.
    """
    columns = []
    # `zip(*rows)` turns rows into columns: the values and the texts of each column.
    pairs = zip(zip(*block.rows, strict=True), zip(*grid.rows, strict=True), strict=True)
    for values, texts in pairs:
        counts = Counter(texts)
        keys = []  # of one column, from top to bottom
        for value, text in zip(values, texts, strict=True):
            is_enough = NUMBER.match(text) and counts[text] == 1
            keys.append("" if is_enough else _write_number(value))
        columns.append(keys)
    return list(zip(*columns, strict=True))


NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?(?![\de])")
"""A number at the beginning of a text, as scripts read it."""


def _write_number(value: Any) -> str:
    """Return the number to sort a cell by; empty for texts, truth values, None and NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return ""
    return f"{value:.6g}".replace("inf", "Infinity")  # JavaScript's spelling


# Markdown


MARKDOWN = "markdown"
# GitHub reads $...$ as mathematics and # and | within tables.
SPECIAL = re.compile(r"([\\`*_\[\]|#~$])")


def render_markdown(page: Document) -> bytes:
    """Write a page as Markdown."""
    lines = [f"# {escape_markdown(page.title)}", ""]
    for chapter in page.chapters:
        if chapter.title:
            lines += [f"## {escape_markdown(chapter.title)}", ""]
        for block in chapter.blocks:
            lines += [*_write_markdown(block), ""]
    return ("\n".join(lines).rstrip("\n") + "\n").encode()


def escape_markdown(text: str) -> str:
    """Escape text for Markdown and HTML."""
    plain = html.escape(visible(text), quote=False)
    return SPECIAL.sub(r"\\\1", plain)


def _write_markdown(block: Block) -> Iterator[str]:
    """Yield the Markdown lines of a block. A picture becomes a sentence that describes it."""
    match block:
        case Table() | Card() | Heatmap(is_attention=False) | Curve(table=Table()):
            yield from _write_markdown_table(block)
        case Paragraph():
            text = escape_markdown(block.text)
            yield f"**{text}**" if block.tone else text  # a tone: an answer, or what is missing
        case Points():
            yield from _write_points(block)
        case Gallery():
            for item in block.items:
                yield f"- {escape_markdown(item.title)}: {escape_markdown('; '.join(item.lines))}"
            yield from ["", escape_markdown(block.text)]
        case Passage():
            yield from _write_passage(block)
        case Forest():  # the table below it has the same figures
            pass
        case _:
            yield _small(f"Chart, in the {HTML} format: {blocks.describe(block)}")


def _write_points(block: Points) -> Iterator[str]:
    """Yield a Markdown line for each point: a mark in bold, a sentence, a command as code."""
    for mark, text, command in block.points:
        line = escape_markdown(text)
        if mark:
            line = f"**{mark}**: {line}"
        if command:
            line += f" <code>{escape_markdown(command)}</code>"
        yield f"- {line}"


def _write_passage(block: Passage) -> Iterator[str]:
    """Yield the Markdown lines of a text: its title, its tokens, and the largest shares in words.

    Tokens with the largest shares are bold.
    """
    words = []
    for token in shade_tokens(block):
        text = escape_markdown(token.text)
        words.append(f"**{text}**" if token.top else text)
    yield from [f"**{escape_markdown(block.title)}**", "", " ".join(words), ""]
    yield _small(explain_shades(block))


def _small(text: str) -> str:
    """Return a remark in small letters."""
    return f"<sub>{escape_markdown(text)}</sub>"


def _write_markdown_table(block: Table | Heatmap | Card | Curve) -> Iterator[str]:
    """Yield the Markdown lines of a table. A folded table opens by a click on its title."""
    grid = lay_out(block)
    folded = isinstance(block, Table) and block.folded
    title = escape_markdown(grid.title)
    if folded:
        yield f"<details><summary>{title}</summary>"
        yield ""
    elif title:
        yield f"**{title}**"
        yield ""
    heads = grid.heads or [""] * len(grid.align)  # Markdown has no tables without headings
    yield _join_cells(map(escape_markdown, heads))
    yield _join_cells("--:" if side == "r" else ":--" for side in grid.align)
    for index, row in enumerate(grid.rows):
        texts = list(map(escape_markdown, row))
        if index in grid.strong:
            texts = [f"**{text}**" for text in texts]
        yield _join_cells(texts)
    if any(grid.notes):
        yield ""
        yield _small("; ".join(grid.notes))
    if folded:
        yield ""
        yield "</details>"


def _join_cells(texts: Iterable[str]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(texts)} |"


# LaTeX, with booktabs, for a paper


PROSE = r"p{0.5\textwidth}"
"""Column of a scorecard's sentences: half of a line, so that it fits a page of one column."""
WRITTEN = {
    **{character: f"\\{character}" for character in "{}$&#%_"},
    **{character: f"{{{character}}}" for character in "[*-"},  # \\ reads [ and *, -- is a dash
    **cells.read_words()["latex"],
}


def render_latex(page: Document) -> bytes:
    """Write the scorecard and the tables of a page, without folded tables and pictures."""
    lines = [r"% needs \usepackage{booktabs}", f"% {escape_latex(page.title)}"]
    for chapter in page.chapters:
        if chapter.title:
            lines += ["", f"% {escape_latex(chapter.title)}"]
        for block in chapter.blocks:
            lines += _write_latex(block)
    return ("\n".join(lines) + "\n").encode()


def escape_latex(text: str) -> str:
    """Escape text for LaTeX."""
    return "".join(map(_write_character, visible(text)))


def _write_character(character: str) -> str:
    """Write a character for LaTeX; a character that LaTeX fonts lack becomes its code: U+2713."""
    if character in WRITTEN:
        return WRITTEN[character]
    if ord(character) < 0x180:  # ASCII and Latin letters with accents, which LaTeX reads as UTF-8
        return character
    # Unicode describes a raised digit such as U+2074 as `<super> 0034`, where 0034 is the digit 4.
    kind, *codes = unicodedata.decomposition(character).split() or [""]
    if kind == "<super>":
        raised = "".join(chr(int(code, 16)) for code in codes)
        return rf"\textsuperscript{{{escape_latex(raised)}}}"
    return f"U+{ord(character):04X}"


def _write_latex(block: Block) -> Iterator[str]:
    """Yield the LaTeX lines of a block; pictures, plain prose and folded tables have no lines."""
    match block:
        case Card(note=""):  # facts on model, data and run become comments
            for row in block.rows:
                yield f"% {escape_latex(': '.join(row))}"
        case Table(folded=False) | Heatmap(is_attention=False) | Card() | Curve(table=Table()):
            yield from _write_latex_table(lay_out(block))
        case Paragraph(tone=tone) if tone:  # the answer of the page, or what is missing
            yield _write_remark(block.text)
        case Points():
            for mark, text, _ in block.points:
                if mark:  # a warning or note; next steps have no mark
                    yield _write_remark(f"{mark}: {text}")


def _write_remark(text: str) -> str:
    """Return a paragraph in small letters."""
    return rf"{{\footnotesize {escape_latex(text)}\par}}"


def _write_latex_table(grid: Grid) -> Iterator[str]:
    """Yield the lines of a floating table: its title, its rows and its notes."""
    yield ""
    yield r"\begin{table}"
    yield r"\centering"
    if grid.title:
        yield rf"\caption{{{escape_latex(grid.title)}}}"
    align = grid.align.replace("p", PROSE)
    yield rf"\begin{{tabular}}{{{align}}}"
    yield r"\toprule"
    if grid.heads:
        yield _write_latex_row(grid.heads)
        yield r"\midrule"
    for index, row in enumerate(grid.rows):
        yield _write_latex_row(row, strong=index in grid.strong)
    yield r"\bottomrule"
    yield r"\end{tabular}"
    if any(grid.notes):
        yield ""
        yield _write_remark("; ".join(grid.notes))
    yield r"\end{table}"


def _write_latex_row(texts: Iterable[str], *, strong: bool = False) -> str:
    """Return a row of a table, in bold letters if it is strong."""
    cells = [escape_latex(text) for text in texts]
    if strong:
        cells = [rf"\textbf{{{cell}}}" for cell in cells]
    row = " & ".join(cells)
    return rf"{row} \\"
