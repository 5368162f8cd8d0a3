"""What `certify` does in place of measuring a MODEL: `--instances` and `--verify`."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import typer

from lipaudit import schema
from lipaudit.cli.app import Output
from lipaudit.engine import files
from lipaudit.errors import ExitCode, LipauditError, UsageError
from lipaudit.settings import RunOptions
from lipaudit.settings.option import flag
from lipaudit.wings.certificates.exchange import decide_instances, verify_proofs


def print_results(options: Any, run: RunOptions, output: Output) -> None:
    """Print a line of results for every instance of --instances.

    With -o FILE.csv the lines are also written to the file. Counterexamples become files in the
    same folder.

    Raises:
        UsageError: an option without an effect, or a file that cannot be written.
        InputError: the list, a network or a property cannot be read.
    """
    _require_csv(run, output)
    text = ""
    for row, example in decide_instances(options.instances, options, run):
        line = ",".join(row) + "\n"
        text += line
        typer.echo(line, nl=False)
        _, model, name, *_ = row  # folder, model, property, and the results
        example_name = f"{Path(model).stem}_{Path(name).stem}.counterexample.gz"
        for path in output.output:
            # The file is written again after every line: if a later instance fails, the earlier
            # results are not lost.
            files.write(path, text.encode())
            if example:
                files.write(path.parent / example_name, gzip.compress(example.encode()))


def _require_csv(run: RunOptions, output: Output) -> None:
    """Refuse options that have no effect with --instances, and files that cannot be written."""
    # Of the options given on the command line, not in a configuration file, only the seed matters.
    without_effect = [flag(name) for name in run.model_fields_set - run._configured - {"seed"}]
    without_effect += [f"-o {path}" for path in output.output if path.suffix != ".csv"]
    if output.format not in (None, "csv"):
        without_effect.append(f"-f {output.format}")
    if without_effect:
        raise UsageError(
            f"{without_effect[0]} has no effect with --instances",
            "Results are CSV: -o FILE.csv.",
        )
    for path in output.output:
        files.require_writable(path)


def verify_report(options: Any, run: RunOptions, output: Output) -> None:
    """Print a line for every certified sample of a report: whether its proof holds again.

    Raises:
        LipauditError: a proof does not hold, or the report or the proofs cannot be read.
    """
    # Refuse options of the run or of the output on the command line; those of a configuration
    # file (`_configured`) have no effect.
    set_options = run.model_fields_set - run._configured or output.model_fields_set
    if set_options:
        raise UsageError(
            f"{flag(min(set_options))} has no effect with --verify",
            "Leave it out: the report has the run.",
        )
    failed = 0
    for sample, radius, is_proven in verify_proofs(schema.load(options.verify), options.proofs):
        verdict = "proven"
        if not is_proven:
            verdict = "NOT PROVEN"
            failed += 1
        typer.echo(f"{sample} {radius} {verdict}")
    if failed:
        raise LipauditError(
            f"{failed} certificates of the report are not proven again",
            "Give the file of --proofs. Without it, only balls that were not split are proven.",
            ExitCode.NOT_PROVEN,
        )
