"""A report as a model card of the Hugging Face Hub: metadata in YAML, then Markdown."""

from __future__ import annotations

from lipaudit.report.blocks import Card
from lipaudit.report.form import Format
from lipaudit.report.formats import markdown


def render(card: Card) -> bytes:
    """Write the metadata between lines of three hyphens, and the section under them."""
    import yaml

    front = yaml.safe_dump(card.front, sort_keys=False, allow_unicode=True, width=1000)
    return f"---\n{front}---\n\n".encode() + markdown.render(card.page, level=2)


FORMAT = Format(
    "model-card",
    takes="card",
    render=render,
    suffixes=(".md",),
    asked=True,
    refusal=("a model card is of one report", "lipaudit report A.json -f model-card writes it."),
)
