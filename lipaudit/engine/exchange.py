"""Proofs that others can check: instances of the competition VNN-COMP, and proofs repeated."""

from __future__ import annotations

import csv
import io
import math
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lipaudit.certify.branch import Nodes
from lipaudit.data.batch import Batch
from lipaudit.data.vnnlib import read_property
from lipaudit.engine.prepare import Request, prepare
from lipaudit.errors import InputError, explain_failure
from lipaudit.measures.certify import check, make_proof, name_proof
from lipaudit.measures.claims import CertifyOptions
from lipaudit.models.certificate import Bracket, certificate
from lipaudit.models.net import LoadOptions, ModelSpec
from lipaudit.models.onnx_graph import Graph, Query
from lipaudit.models.precision import exact_arithmetic
from lipaudit.models.sources.loader import assemble
from lipaudit.settings import RunOptions
from lipaudit.tables import Report
from lipaudit.tables.trials import is_repeat, parse_radius

# A zip file without entries.
EMPTY = b"PK\x05\x06" + bytes(18)


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
        with exact_arithmetic(torch.device("cpu")):
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


# The proofs of a report, repeated: every pass again, and no search.


def verify_proofs(report: Report, proofs: Path | None) -> Iterator[tuple[str, str, bool]]:
    """Repeat the proofs of the certified balls of a report.

    A ball is proven by the pass alone, or at the stored multipliers of its parts.

    Args:
        report: the report.
        proofs: the file of `--proofs`; without one, only passes prove.

    Yields:
        The id of a sample, its largest certified radius, and whether its ball is proven again.

    Raises:
        InputError: there are no certificates, the model or the samples are others, or the file is
            damaged.
    """
    section, before = report.section("certify"), report.run
    if section is None or not section.ids or not section.rows:
        raise InputError("the report has no certificates", "Write one: certify -o report.json.")
    run = {"data": before.data.spec, "seed": before.seed, "dtype": before.dtype} | before.options
    options, ids = CertifyOptions.parse(section.settings), section.ids
    if options.counted:
        raise InputError(f"certificates of {options.counted} are not repeated", "Only balls are.")
    told: Mapping[str, Any] = section.samples
    count = {"certify": len(ids)}
    job = prepare(Request(before.model.spec, {"certify": options}, RunOptions.parse(run), count))
    once = [i for i, name in enumerate(ids) if not is_repeat(name)]
    batch, norm = job.samples.batch, options.norm or "linf"
    labels = [-1] * len(batch) if batch.y is None else batch.y.tolist()
    wanted = dict(zip(batch.ids, labels, strict=True))
    stored = {n: -1 if y is None else y for n, y in zip(ids, told["label"], strict=True)}
    claimed = [(row.norm, row.eps_text, row.eps) for row in section.rows]
    same = job.net.weights_sha256 == before.model.weights_sha256 and wanted == stored
    same = same and claimed == [(norm, r.text, float(r)) for r in options.eps]
    flags = [told[row.trial.column("certified")] for row in section.rows] if same else []
    shares = [sum(each[i] for i in once) / len(once) for each in flags]
    same = same and shares == [row.certified for row in section.rows]
    if not same:
        raise InputError(
            "the report does not fit its model, its samples or its own verdicts",
            "Verify the report as it was written, where its model and data are.",
        )
    other = proofs is not None and not zipfile.is_zipfile(proofs)
    if other:
        raise InputError(
            f"{proofs} is no file of --proofs", "Write one: certify --proofs FILE.npz."
        )
    for batch in job.batches("certify")[1]:
        for sample in batch.to(job.net.device, job.net.dtype).split(1):
            name = sample.ids[0]
            at = ids.index(name)
            proven = [r for r, flag in zip(options.eps, flags, strict=True) if flag[at]]
            if not proven:
                continue
            radius = max(proven, key=float)
            label = told["predicted"][at] if wanted[name] < 0 else wanted[name]
            leaves = _read_leaves(proofs, name_proof(name, float(radius)), job.net.device)
            with exact_arithmetic(job.net.device):
                proof = replace(make_proof(job.net, sample, options, math.inf), leaves=leaves)
                result = certificate(job.net, sample, label, float(radius), proof)
            yield name, radius.text, result.certified


def _read_leaves(proofs: Path | None, name: str, device: torch.device) -> Nodes:
    """Return the parts of a ball; none where nothing is stored."""
    damaged = explain_failure(f"{proofs} is damaged", "Copy the file again.", Exception)
    with damaged, zipfile.ZipFile(proofs or io.BytesIO(EMPTY)) as archive:
        content = archive.read(name) if name in archive.namelist() else b""
        if not content:
            none = torch.zeros(0, 0, dtype=torch.long)
            return Nodes(none.flatten(), none, none[None].float())
        arrays = np.load(io.BytesIO(content))
        which, state, y = (torch.tensor(arrays[n], device=device) for n in ("which", "state", "y"))
        if y.shape != (2, *state.shape) or which.shape != state.shape[:1]:
            raise ValueError("other shapes")
        return Nodes(which.long(), state.long(), y.double())
