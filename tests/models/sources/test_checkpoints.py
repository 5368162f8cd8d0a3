"""Files of weights as training code of others writes them."""

import tarfile
import zipfile

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lipaudit.errors import InputError
from lipaudit.models.net import ModelSpec
from lipaudit.models.sources.loader import LoadOptions, load_net
from lipaudit.models.sources.weight_files import guess_arguments

SMALL = {"img_size": 16, "patch_size": 4, "depth": 2, "embed_dim": 32, "num_heads": 2}
ARCH = "timm:vit_tiny_patch16_224"


def vit(**how):
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **SMALL | {"num_classes": 3} | how).eval()


class Training(nn.Module):
    """A module of Lightning: the model beside its loss."""

    def __init__(self):
        super().__init__()
        self.model = vit()
        self.criterion = nn.CrossEntropyLoss(weight=torch.ones(3))
        self.proxies = nn.Linear(3, 7)


def averaged():
    average = AveragedModel(vit())
    average.update_parameters(vit())
    return average


WRITERS = {
    "model.pth.tar": lambda path: torch.save({"state_dict": vit().state_dict()}, path),
    "model.pth.tar, old format": lambda path: torch.save(
        {"epoch": 3, "state_dict": vit().state_dict(), "best_acc1": 0.5},
        path,
        _use_new_zipfile_serialization=False,
    ),
    "checkpoint": lambda path: torch.save(vit().state_dict(), path),
    "swa.pt": lambda path: torch.save(averaged().state_dict(), path),
    "swa.safetensors": lambda path: save_file(
        {k: v.clone() for k, v in averaged().state_dict().items()}, path
    ),
    "last.ckpt": lambda path: torch.save(
        {"state_dict": Training().state_dict(), "epoch": 1, "optimizer_states": []}, path
    ),
    "parallel.pt": lambda path: torch.save(nn.DataParallel(vit()).state_dict(), path),
}


@pytest.mark.parametrize("arch", ["timm", "py"])
@pytest.mark.parametrize("name", WRITERS)
def test_weights_are_found_in_checkpoints_of_others(name, arch, tmp_path):
    path = tmp_path / name.partition(",")[0]
    WRITERS[name](path)
    own = {"arch": "py:tests.models.sources.test_checkpoints:vit"}
    options = {"arch": ARCH, "model_kwargs": SMALL} if arch == "timm" else own
    net = load_net(str(path), LoadOptions(device="cpu", **options))
    x = torch.rand(2, 3, 16, 16)
    mean, std = (torch.tensor(net.preprocess[key])[:, None, None] for key in ("mean", "std"))
    torch.testing.assert_close(net.read(net.call(x, None)), vit()((x - mean) / std))
    said = {note.code: note.text for note in net.notes}
    assert ("averaged-weights" in said) == name.startswith("swa")
    assert ("weights-beside" in said) == name.startswith("last")


def tied():
    module = nn.Sequential(nn.Flatten(), nn.Linear(48, 48), nn.Linear(48, 48))
    module[2].weight = module[1].weight
    return ModelSpec(module, (3, 4, 4))


def test_one_weight_with_two_values_in_a_file_is_refused(tmp_path):
    """torch would load the last of the two."""
    state = dict(tied().module.state_dict())
    options = LoadOptions(arch="py:tests.models.sources.test_checkpoints:tied")
    path = tmp_path / "a.pt"
    torch.save(state, path)
    torch.testing.assert_close(load_net(str(path), options).module[1].weight, state["1.weight"])
    torch.save(state | {"2.weight": state["2.weight"] + 1}, path)
    with pytest.raises(InputError, match="1.weight and 2.weight are one weight of the module"):
        load_net(str(path), options)
    # In float32, the two would be equal.
    precise = state["1.weight"].double()
    torch.save(state | {"1.weight": precise, "2.weight": precise * (1 + 1e-12)}, path)
    with pytest.raises(InputError, match="1.weight and 2.weight are one weight of the module"):
        load_net(str(path), options)
    # Equal weights that are not finite are refused for that, not as different.
    broken = torch.full_like(state["1.weight"], torch.nan)
    torch.save(state | {"1.weight": broken, "2.weight": broken.clone()}, path)
    with pytest.raises(InputError, match="finite|NaN"):
        load_net(str(path), options)


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin", "model.pt", "model.pth.tar"])
def test_a_pointer_of_git_lfs_is_named(name, tmp_path):
    path = tmp_path / name
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 17034\n"
    path.write_text(pointer)
    with pytest.raises(InputError, match="is a pointer of git-lfs") as refused:
        load_net(str(path), LoadOptions(arch=ARCH))
    assert "git lfs pull" in refused.value.advice
    if name in ("model.safetensors", "model.bin"):
        folder = tmp_path / "bert"
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "bert", "num_hidden_layers": 1}')
        usual = "pytorch_model.bin" if name == "model.bin" else name
        (folder / usual).write_text(pointer)
        with pytest.raises(InputError, match="is a pointer of git-lfs"):
            load_net(str(folder))


@pytest.mark.parametrize(
    ("change", "implied"),
    [
        ({"num_classes": 10}, ["num_classes=10"]),
        ({"embed_dim": 48}, ["embed_dim=48"]),
        ({"depth": 3}, ["depth=3"]),
        ({"num_classes": 10, "embed_dim": 96, "depth": 1},
         ["num_classes=10", "embed_dim=96", "depth=1"]),
        ({}, []),
    ],
)  # fmt: skip
def test_shapes_say_which_arguments_they_imply(change, implied, tmp_path):
    stored = vit(**change)
    assert guess_arguments(vit(), stored.state_dict()) == implied
    torch.save(stored.state_dict(), tmp_path / "a.pt")
    if not implied:
        return
    options = LoadOptions(arch="py:tests.models.sources.test_checkpoints:vit")
    with pytest.raises(InputError) as refused:
        load_net(str(tmp_path / "a.pt"), options)
    assert f"The shapes imply --model-kwargs {' '.join(implied)}." in refused.value.advice
    # The advice works.
    arguments = {key: int(value) for key, value in (each.split("=") for each in implied)}
    options = LoadOptions(arch=options.arch, model_kwargs=arguments, device="cpu")
    assert load_net(str(tmp_path / "a.pt"), options).parameters == sum(
        p.numel() for p in stored.parameters()
    )


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("m.pt.gz", "unpack it first"),
        ("m.tar", "unpack it first"),
        ("m.npz", "py:FILE.py:FUNCTION"),
        ("m.pt2", "exported programs have no gradients"),
        ("m.py", "m.py:FUNCTION"),
    ],
)
def test_a_file_that_holds_no_weights_gets_the_advice_of_its_kind(name, advice, tmp_path):
    (tmp_path / name).write_bytes(b"something else")
    if name == "m.tar":
        torch.save(vit().state_dict(), tmp_path / "m.pt")
        with tarfile.open(tmp_path / name, "w") as archive:
            archive.add(tmp_path / "m.pt")
    with pytest.raises(InputError, match="is not a file of weights") as refused:
        load_net(str(tmp_path / name), LoadOptions(arch=ARCH))
    assert advice in refused.value.advice
    assert f"{name}:FUNCTION" not in refused.value.advice or name.endswith(".py")


def test_a_damaged_archive_holds_no_weights(tmp_path):
    file = tmp_path / "m.npz"
    np.savez(file, x=np.zeros(3))
    damaged = file.read_bytes().replace(b"PK\x01\x02", b"PK\x00\x02")  # the list of its files
    file.write_bytes(damaged)
    assert zipfile.is_zipfile(file)
    with pytest.raises(InputError, match="is not a file of weights"):
        load_net(str(file), LoadOptions(arch=ARCH))
