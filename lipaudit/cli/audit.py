"""The command `audit`: every measure on one load of a model, one page for people."""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lipaudit.cli.app import command
from lipaudit.cli.measure import MEASURE
from lipaudit.cli.options import Common, ModelSpec

if TYPE_CHECKING:
    from lipaudit.measures import Options
    from lipaudit.results import Report

RUNS = Path("lipaudit-runs")
QUICK = {"attention": 16, "bounds": 8, "jacobian": 64, "attack": 64}
FULL = {"attention": 128, "bounds": 32, "jacobian": 256, "attack": 512}
DEMO_EPS, EPS = "0.1", "2/255"


@command("audit", panel=MEASURE)
def audit(
    model: ModelSpec,
    common: Common,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer samples, quick attacks.")] = False,
    full: Annotated[bool, typer.Option("--full", help="More samples, all of AutoAttack.")] = False,
    eps: Annotated[
        str | None, typer.Option(help="Radii of the attacks; default 2/255 (demo: 0.1).")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where report.json and report.html go.")
    ] = None,
) -> None:
    """Everything about a checkpoint: attention, bounds, Jacobian, attacks, one report.

    Writes report.json and report.html to a run directory. Quick is the default on the demo.

    [dim]Examples:[/]
      [cyan]lipaudit audit demo[/]
      [cyan]lipaudit audit timm:vit_small_patch16_224 --data val/ --eps 1/255,2/255 --full[/]
    """
    from lipaudit.cli.emit import emit, write
    from lipaudit.cli.run import run
    from lipaudit.errors import UsageError
    from lipaudit.report import RENDERERS

    if quick and full:
        raise UsageError("--quick and --full exclude each other")
    demo = model.partition(":")[0] == "demo"
    small = quick or (demo and not full)
    radii = tuple((eps or (DEMO_EPS if demo else EPS)).split(","))
    measures = _measures(common, radii, "fgsm,pgd,quick" if small else "fgsm,pgd,autoattack")
    counts = QUICK if small else FULL if full else {}
    _announce(model, common, measures, counts)
    report = run(model, common, measures, skip_unlabelled=True, counts=counts)
    folder = run_dir or RUNS / _name(model, report)
    folder.mkdir(parents=True, exist_ok=True)
    if run_dir is None:
        (RUNS / ".gitignore").write_text("*\n")
    for name, format in (("report.json", "json"), ("report.html", "html")):
        write(folder / name, RENDERERS[format](report))
    emit(report, common)
    if not common.quiet:
        _conclude(model, report, folder)


def _measures(common: Common, radii: tuple[str, ...], attack: str) -> dict[str, Options]:
    from lipaudit.measures.attack import AttackOptions, plan
    from lipaudit.measures.attention import AttentionOptions
    from lipaudit.measures.bounds import BoundsOptions
    from lipaudit.measures.jacobian import JacobianOptions

    seed = common.seed or 0
    attacks = AttackOptions(seed=seed, eps=radii, attack=attack)
    plan(attacks)  # refuse bad radii before anything is loaded
    return {
        "attention": AttentionOptions(seed=seed),
        "bounds": BoundsOptions(seed=seed),
        "jacobian": JacobianOptions(seed=seed),
        "attack": attacks,
    }


def _announce(
    model: str, common: Common, measures: dict[str, Options], counts: dict[str, int]
) -> None:
    from lipaudit.measures import MEASURES

    if common.quiet:
        return
    number = {
        name: common.samples or counts.get(name, MEASURES[name].samples) for name in measures
    }
    parts = ", ".join(f"{name} ({count} samples)" for name, count in number.items())
    takes = "about half a minute" if model.startswith("demo") else "minutes to hours"
    typer.echo(f"audit of {model}: {parts}; {takes}", err=True)


def _name(model: str, report: Report) -> str:
    """Name the run directory: time, model, and a hash of the run."""
    when = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-")[:40]
    digest = hashlib.sha256(report.run.model_dump_json().encode()).hexdigest()[:8]
    return f"{when}-{plain}-{digest}"


def _conclude(model: str, report: Report, folder: Path) -> None:
    """Say what was found in three numbers, where it is, and what to type next."""
    lines = [""]
    if bounds := report.section("bounds"):
        top = max(bounds.rows, key=lambda row: row.cells()["exact"] or 0.0).cells()
        lines.append(
            f"{top['exact']:8.3g}  the most amplifying head ({top['layer']}.{top['head']}): how "
            "much it can magnify a small change of its input"
        )
    if jacobian := report.section("jacobian"):
        lines.append(
            f"{jacobian.rows[0].cells()['median']:8.3g}  median Jacobian norm: how much the "
            "model magnifies the worst small change of a sample"
        )
    if attack := report.section("attack"):
        worst = [row.cells() for row in attack.rows if row.cells()["attack"] == "worst"][-1]
        lines.append(
            f"{worst['robust']:8.1%}  of samples stand the attacks at eps {worst['eps_text']} "
            f"({worst['clean']:.1%} are right without)"
        )
    report_json = folder / "report.json"
    lines += ["", f"report: {folder / 'report.html'}", f"data:   {report_json}", "next:"]
    lines += [
        f"  lipaudit baseline save {report_json}",
        f"  lipaudit gate {model} --baseline lipaudit-baseline.json",
    ]
    typer.echo("\n".join(lines), err=True)
