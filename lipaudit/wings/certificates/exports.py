"""The files that `certify` writes: models and properties for other verifiers, and proofs."""

from __future__ import annotations

import base64
import io
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lipaudit.measures import base
from lipaudit.measures.base import Part
from lipaudit.wings.certificates.options import CertifyOptions

if TYPE_CHECKING:
    from lipaudit.models.net import Net
    from lipaudit.wings.certificates.bracket import Bracket


# Contents of files by name.
Files = dict[str, bytes]


def encode_text(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return files by name as base64 text, because the facts of a `Part` cannot hold bytes."""
    return {name: base64.b64encode(content).decode() for name, content in files.items()}


def export_balls(net: Net, brackets: Sequence[Bracket], options: CertifyOptions) -> Files:
    """Return the model (ONNX) and the balls around correct samples (VNN-LIB) as files by name.

    Args:
        net: the model.
        brackets: the results of the attacks and proofs, one `Bracket` for each sample.
        options: the options of the run; `eps` are the radii of the balls.
    """
    from lipaudit.wings.certificates.onnx_graph import export_onnx

    files: Files = {}
    for bracket in brackets:
        sample = bracket.sample
        # A network of token embeddings has the ids, positions and mask of its text as constants:
        # so each text needs a model file.
        if net.kind == "text":
            files[f"{sample.ids[0]}.onnx"] = export_onnx(net, sample)
        elif sample.start == 0:  # the first sample of the run: all samples share one model file
            files["model.onnx"] = export_onnx(net, sample)
        if bracket.correct:  # otherwise there is no property to prove
            files |= _write_balls(net, bracket, options)
    return files


def _write_balls(net: Net, bracket: Bracket, options: CertifyOptions) -> Files:
    """Return the balls around a sample, one for each radius, as VNN-LIB files by name.

    `bracket` has the sample and the class to prove.
    """
    from lipaudit.wings.certificates.vnnlib import write_property

    files = {}
    sample = bracket.sample
    label = bracket.label_to_prove
    lowest, highest = net.box or (-math.inf, math.inf)
    x = net.point(sample).double()
    free_tokens = net.find_free_tokens(sample)
    # 1 for entries that may change: all entries of an image, or of the free tokens of a text.
    moving = x.new_ones(x.shape) if free_tokens is None else free_tokens[..., None]
    for eps in options.eps:
        radius = float(eps)
        low = (x - radius * moving).clamp(lowest, highest)
        high = (x + radius * moving).clamp(lowest, highest)
        title = f"sample {sample.ids[0]}, class {label}, L-inf radius {eps.text}"
        text = write_property(low, high, net.classes or 0, label, title)
        files[f"{sample.ids[0]}_eps_{radius}.vnnlib"] = text.encode()
    return files


def name_proof(sample: str, radius: float) -> str:
    """Return the name of the proof of a ball in the file of `--proofs`."""
    return f"{sample}@{radius}"


def encode_proofs(brackets: Sequence[Bracket]) -> Files:
    """Return the proofs of certified balls that were split, as .npz files by name.

    A proof has the parts of the ball (the leaves of a tree of splits): for each part the signs of
    ReLUs, and the multipliers that prove a bound on it. A ball that was not split needs no file: a
    pass through the model proves the ball again.

    `brackets` are the results of the attacks and proofs, one `Bracket` for each sample.
    """
    import numpy as np

    files = {}
    for bracket in brackets:
        for radius, certificate in bracket.certificates.items():
            if not certificate.certified or certificate.leaves is None:
                continue
            leaves = vars(certificate.leaves)
            file = io.BytesIO()
            np.savez(file, **{name: tensor.cpu().numpy() for name, tensor in leaves.items()})
            files[name_proof(bracket.sample.ids[0], radius)] = file.getvalue()
    return files


def _decode_files(parts: Sequence[Part], fact: str) -> Files:
    """Return the files by name that the results of batches hold as base64 text."""
    texts = base.join_facts(parts, fact).items()
    return {name: base64.b64decode(text) for name, text in texts}


def encode_files(parts: Sequence[Part], options: CertifyOptions) -> dict[Path, bytes]:
    """Return the files of `--export` (models, properties, a list of instances) and `--proofs`."""
    from lipaudit.wings.certificates.vnnlib import TIMEOUT

    files: dict[Path, bytes] = {}
    if options.export is not None:
        # Models and properties, and instances.csv with a line MODEL,PROPERTY,SECONDS for each.
        exported = _decode_files(parts, "exported")
        files = {options.export / name: content for name, content in exported.items()}
        lines = []
        for name in exported:
            if not name.endswith(".vnnlib"):
                continue
            # The property 7_eps_0.01.vnnlib is of sample 7. Each text has a model file, 7.onnx,
            # and all other samples share one.
            model = f"{name.partition('_')[0]}.onnx"
            if model not in exported:
                model = "model.onnx"
            lines.append(f"{model},{name},{options.seconds or TIMEOUT:g}\n")
        files[options.export / "instances.csv"] = "".join(lines).encode()
    if options.proofs is not None:
        # An archive with one .npz file for each ball that was split.
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as file:
            for name, content in _decode_files(parts, "proofs").items():
                # ZipInfo has a fixed date: equal proofs make equal files.
                file.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
        files[options.proofs] = archive.getvalue()
    return files
