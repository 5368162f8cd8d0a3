"""Screenshots of every kind of page, at 1280 and 700 pixels, and in dark mode.

    python -m benchmarks screens FOLDER

It needs Chromium. FOLDER gets a page and three pictures for each kind, to be looked at before a
release. `--pictures` also replaces those of README and docs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURES = {"audit": "demo.png", "compare": "compare.png"}
"""Kinds of pages that README or docs show, and their files in docs/pictures."""
DARK = "@media screen and (prefers-color-scheme: dark)"
HEIGHT = 2600
FIRST = 1120
"""Heights of the part of a page that is looked at, and of the pictures in the docs."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
)  # fmt: skip
BEFORE = "audit/report.json"
AFTER = "robust/report.json"
COMMANDS = {
    "audit": ("audit", "demo", "--run-dir", "audit"),
    "robust": ("audit", "demo:robust", "--run-dir", "robust"),
    "bounds": ("bounds", "demo", "--radius", "0.01,0.1", "-n", "4", "-o", "bounds.html"),
    "certify": ("certify", "demo", "--eps", "0.005", "--order", "1", "-n", "4", "-o",
                "certify.html"),
    "compare": ("compare", BEFORE, AFTER, "-o", "compare.html"),
    "gate": ("gate", AFTER, "--baseline", BEFORE, "-o", "gate.html"),
    "several": ("report", BEFORE, AFTER, "-o", "several.html"),
    "text": ("audit", "./reviews", "--data", "test.jsonl", "-n", "8", "--run-dir", "text"),
    "language": ("audit", "./capitals", "--data", "questions.jsonl", "--score", "sum",
                 "--eps", "0.02,0.05,0.1", "--run-dir", "language"),
}  # fmt: skip
"""The command that makes each kind of page; an audit writes it into its folder."""
SCRIPTS = {"text": "reviews.py", "language": "capitals.py"}
"""Scripts of docs/tutorials that make the models of texts."""


def make_pages(folder: Path) -> Iterator[tuple[str, Path]]:
    """Run the commands in a folder, and yield each kind of page with its file."""
    for kind, words in COMMANDS.items():
        if kind in SCRIPTS:
            script = ROOT / "docs/tutorials" / SCRIPTS[kind]
            subprocess.run([sys.executable, script], cwd=folder, check=True)
        command = [sys.executable, "-m", "lipaudit", *words, "-q"]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path}
        done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)} ended with exit code {done.returncode}")
        page = folder / f"{kind}.html"
        if not page.exists():
            page = folder / kind / "report.html"
        yield kind, page


def take_picture(page: Path, picture: Path, width: int, height: int) -> None:
    """Take a picture of the top of a page, in a window of this size."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit("no Chromium is installed")
    with tempfile.TemporaryDirectory() as profile:
        size = f"--window-size={width},{height}"
        command = [browser, *SWITCHES, f"--user-data-dir={profile}", size]
        command += [f"--screenshot={picture}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=300)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("folder", type=Path, help="gets pages and pictures")
    parser.add_argument("--pictures", action="store_true", help="replace those of the docs")


def run(asked: argparse.Namespace) -> None:
    """Make the pages, and three pictures of each."""
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for kind, page in make_pages(folder):
        dark = folder / f"{kind}-dark.html"
        dark.write_text(page.read_text("utf-8").replace(DARK, "@media screen"), "utf-8")
        take_picture(page, folder / f"{kind}-1280.png", 1280, HEIGHT)
        take_picture(page, folder / f"{kind}-700.png", 700, HEIGHT)
        take_picture(dark, folder / f"{kind}-dark.png", 1280, HEIGHT)
        print(f"{kind}: {page.stat().st_size / 1000:.0f} kB", flush=True)
        if asked.pictures and kind in PICTURES:
            target = ROOT / "docs/pictures" / PICTURES[kind]
            take_picture(page, target, 1280, FIRST)
