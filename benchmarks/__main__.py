"""All benchmarks, studies and long checks by name; run by hand.

    python -m benchmarks                                # what there is
    python -m benchmarks heads vit_tiny                 # a table of this code
    python -m benchmarks heads --against main~20        # beside that of a commit, in turn

Times are CPU seconds of one thread. Those that can be put beside a commit print Markdown, medians
of --repeats rounds with their ends. Each has options of its own: NAME --help.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
ROOT = HERE.parent


def names() -> dict[str, Path]:
    """Every benchmark: `bench_` is left out of its name."""
    files = sorted(HERE.glob("[!_]*.py"))
    return {file.stem.removeprefix("bench_"): file for file in files}


def listing() -> str:
    """What there is, a line each."""
    lines = [__doc__.strip(), ""]
    for name, file in names().items():
        summary = (ast.get_docstring(ast.parse(file.read_text())) or "").splitlines()[0]
        lines.append(f"{name:14s} {summary}")
    return "\n".join(lines)


def module_of(name: str) -> ModuleType:
    """Import a benchmark, by its name or that of its file."""
    known = names()
    name = name.removeprefix("bench_")
    if name not in known:
        raise SystemExit(f"there is no {name!r}: {', '.join(known)}")
    return importlib.import_module(f"benchmarks.{known[name].stem}")


def options_of(module: ModuleType, name: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Read the options of a benchmark."""
    parser = argparse.ArgumentParser(
        prog=f"benchmarks {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if hasattr(module, "subjects"):
        parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
        parser.add_argument("--against", metavar="COMMIT", help="time its code in turn with ours")
    module.options(parser)
    return parser.parse_args(arguments)


def begin(package: str) -> None:
    """Let `lipaudit` be that of a folder, the benchmarks those beside this file; one thread."""
    sys.path[:1] = [package, str(ROOT)] if package != str(ROOT) else [package]
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def tables(module: ModuleType, asked: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Print the subjects of a benchmark, of this code alone or beside that of a commit."""
    from benchmarks.shared import rounds, sides

    commits = {"now": sides.present()}
    with ExitStack() as stack:
        if asked.against:
            commits = {"before": sides.commit(asked.against), "after": sides.present()}
            packages = {"before": stack.enter_context(sides.package_of(asked.against))}
            results = sides.compared(packages | {"after": ROOT}, arguments, asked.repeats)
        else:
            results = (
                (name, {"now": [sides.attempt(subject) for _ in range(asked.repeats)]})
                for name, subject in module.subjects(asked).items()
            )
        for subject, each in results:
            print("\n".join(rounds.table(subject, each)), end="\n\n", flush=True)
    command = " ".join(["python -m benchmarks", *arguments])
    print(rounds.footer(command, asked.repeats, commits))


def serve(arguments: Sequence[str]) -> None:
    """Be one of two sides, with nothing to give if the benchmark cannot be imported there."""
    from benchmarks.shared import sides

    subjects = {}
    with suppress(ImportError):
        module = module_of(arguments[0])
        subjects = module.subjects(options_of(module, arguments[0], arguments[1:]))
    sides.serve(subjects)


def main(arguments: Sequence[str]) -> None:
    """Run what is asked for."""
    side = arguments[:1] == ["--side"]
    package, arguments = (arguments[1], arguments[2:]) if side else (str(ROOT), arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(listing())
        return
    begin(package)
    if side:
        serve(arguments)
        return
    from lipaudit.errors import LipauditError

    name = arguments[0]
    module = module_of(name)
    asked = options_of(module, name, arguments[1:])
    try:
        if hasattr(module, "subjects") and (asked.against or not hasattr(module, "run")):
            tables(module, asked, arguments)
        else:
            module.run(asked)
    except LipauditError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
