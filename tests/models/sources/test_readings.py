"""Which reading of arrays a module takes that does not say it."""

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from lipaudit.cli.commands import build
from lipaudit.data.arrays import list_forms
from lipaudit.errors import ExitCode, InputError
from lipaudit.models.sources.own import describe
from lipaudit.models.sources.spec import LoadOptions

MODEL = """
from torch import nn

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(160, 3))
"""


def options(*shape: int) -> LoadOptions:
    return LoadOptions(forms=lambda: list_forms(torch.rand(5, *shape)))


@pytest.mark.parametrize("size", ["8,5,4", "4,8,5"])
def test_the_option_that_a_refusal_names_settles_the_shape(size, tmp_path):
    (tmp_path / "m.py").write_text(MODEL)
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).random((5, 8, 5, 4), np.float32))
    args = ["jacobian", "-n", "1", f"py:{tmp_path}/m.py:build", "--data", f"{tmp_path}/x.npz"]
    refused = CliRunner().invoke(build(), args)
    assert refused.exit_code == ExitCode.USAGE
    assert size in refused.output
    settled = CliRunner().invoke(build(), [*args, "--input-size", size])
    assert settled.exit_code == ExitCode.OK, settled.output


def test_a_side_alone_keeps_the_channels_of_the_reading_of_that_size():
    spec = describe(
        nn.Conv2d(3, 4, 1), LoadOptions(input_size=(32,), forms=options(32, 32, 3).forms)
    )
    assert spec.input_shape == (3, 32, 32)


def test_the_trial_leaves_the_module_as_it_was():
    module = nn.Sequential(nn.Conv2d(8, 2, (5, 4)), nn.BatchNorm2d(2), nn.Flatten()).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert describe(module, options(8, 5, 4)).input_shape == (8, 5, 4)
    assert all(part.training for part in module.modules())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_module_that_runs_on_no_reading_is_told_why():
    with pytest.raises(InputError, match="however they are read.*8 x 5 x 4.*4 x 8 x 5"):
        describe(nn.Conv2d(7, 2, 1), options(8, 5, 4))
