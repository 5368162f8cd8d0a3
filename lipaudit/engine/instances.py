"""Instances of the verification competition VNN-COMP: properties of networks in ONNX."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from lipaudit.data.batch import Batch
from lipaudit.data.vnnlib import read_property
from lipaudit.errors import explain_failure
from lipaudit.measures.certify import check, make_proof
from lipaudit.measures.claims import CertifyOptions
from lipaudit.models.certificate import Bracket
from lipaudit.models.net import LoadOptions, ModelSpec
from lipaudit.models.onnx_graph import Graph, Query
from lipaudit.models.precision import eager, exact_arithmetic
from lipaudit.models.sources.loader import assemble
from lipaudit.settings import RunOptions
from lipaudit.tables.trials import parse_radius


def decide_instances(
    path: Path, options: CertifyOptions, run: RunOptions
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Prove or break the instances of a list, one after the other.

    Args:
        path: a CSV file with model, property and seconds in each line; paths are relative to it.
        options: how to prove; its `seconds` count in place of those of the list.
        run: the seed.

    Yields:
        A line of the competition's results (name of the folder, model, property, seconds to load,
        unsat (proven), sat (broken), timeout or unknown, seconds to decide); a counterexample.

    Raises:
        InputError: a file is missing, or has something that is not read.
    """
    options = options.model_copy(update={"eps": (parse_radius("1"),)}).adapt("tokens")
    advice = "Give lines MODEL.onnx,PROPERTY.vnnlib,SECONDS in a .csv file."
    with explain_failure(f"{path} is no list of instances", advice, OSError, ValueError):
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [(model, asked, float(limit)) for model, asked, limit in csv.reader(lines)]
    for model, asked, limit in rows:
        began = time.monotonic()
        graph, wanted = Graph(path.parent / model), read_property(path.parent / asked)
        with explain_failure(f"{asked} does not fit {model}", advice):
            query = Query(graph, wanted)
            query(torch.zeros_like(query.centre)[None])
        spec = ModelSpec(query, tuple(query.centre.shape), kind="tokens", architecture=model)
        how = LoadOptions(device="cpu", dtype=query.dtype)
        with eager(), exact_arithmetic(torch.device("cpu")):
            net = assemble(spec, how, name=asked, source="file")
            x = torch.zeros(1, *spec.input_shape, dtype=net.dtype)
            sample = Batch(x, torch.tensor([0]), ("0",))
            check(net, sample, options)
            loaded = time.monotonic()
            proof = make_proof(net, sample, options, options.seconds or limit)
            bracket = Bracket(net, sample, proof=proof, trials=options.trials, seed=run.seed)
            [*_] = bracket.settle(options.eps)
            found = bracket.nearest <= 1 or not bracket.correct
            example = query.find_example(bracket.example) if found else None
        late = any(tried.why == "seconds" for tried in bracket.tried.values())
        proven = "unsat" if bracket.certified >= 1 else "timeout" if late else "unknown"
        named = zip("XY", example or (), strict=False)
        numbers = "\n".join(f"({c}_{i} {v!r})" for c, t in named for i, v in enumerate(t.tolist()))
        seconds = f"{loaded - began:.3f}", f"{time.monotonic() - loaded:.3f}"
        result = "sat" if example else proven
        row = path.resolve().parent.name, model, asked, seconds[0], result, seconds[1]
        yield row, numbers and f"({numbers})\n"
