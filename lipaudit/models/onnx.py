"""ONNX: the function that certificates are about, for other verifiers."""

from __future__ import annotations

import io
import warnings
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lipaudit.data.batch import Batch
from lipaudit.errors import explain_failure
from lipaudit.models.net import Net

# What most verifiers read.
OPSET = 17
# The first version with GELU as one operator. Before, it is spelled with erf and a rounded root of
# two, or with tanh: another function, with looser bounds.
GELU_OPSET, SPELLINGS = 20, {"Erf", "Tanh"}


def export_onnx(net: Net, sample: Batch) -> bytes:
    """Return the function from the attacked space to the logits (`Net.forward`) as ONNX.

    Of a text, ids, positions and mask are constants: the file belongs to this sample.

    Args:
        net: a model.
        sample: one sample, the shape of the input.

    Raises:
        InputError: `onnx` is not installed, or torch cannot express an operation in ONNX.
    """
    advice = "pip install 'lipaudit[onnx]'"
    with explain_failure("ONNX needs the library `onnx`", advice, ImportError):
        import onnx

    class Forward(nn.Module):
        """`Net.forward` with the parameters of the model."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = net.module

        def forward(self, z: Tensor) -> Tensor:
            """Return logits."""
            return net.forward(z, sample)

    text, advice = f"{net.architecture} cannot be written as ONNX", "Leave --export out."
    for version in (OPSET, GELU_OPSET):
        file: Any = io.BytesIO()
        # Where it fails, it prints the graph.
        quiet = patch.object(torch._C, "_jit_onnx_log", create=True)
        with explain_failure(text, advice), warnings.catch_warnings(action="ignore"), quiet:
            # The exporter by tracing: the newer one takes 25 times as long and rewrites the graph.
            torch.onnx.export(
                Forward(),
                (net.point(sample),),
                file,
                dynamo=False,
                opset_version=version,
                input_names=["X"],
                output_names=["Y"],
                # In eval mode it would merge normalisations into weights, and round them.
                training=torch.onnx.TrainingMode.PRESERVE,
            )
        nodes = onnx.load_from_string(file.getvalue()).graph.node
        if SPELLINGS.isdisjoint(node.op_type for node in nodes):
            break
    return file.getvalue()
