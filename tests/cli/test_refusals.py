"""What is typed wrong: an error with its exit code, and the name that was meant."""

import shlex
from pathlib import Path

import pytest
import timm

from lipaudit.models.sources import timm_names
from tests.commands import invoke, refuse

BALL = "--eps 0.1 --attack"
CONVOLUTIONS = "timm:resnet18 --model-kwargs pretrained=false"
COMMANDS = [
    ("bounds", 2, "missing argument"),
    ("bounds no-such-model", 4, "no model"),
    ("bounds demo --samples 0", 2, "--samples"),
    (f"bounds demo --samples {'9' * 30}", 2, "too large a number"),
    ("bounds demo --tol nan", 2, "--tol"),
    ("bounds demo --tol 0", 2, "--tol: 0.0: it must be greater than 0"),
    ("bounds demo --within inf", 2, "--within"),
    (f"bounds demo --seed {2**63}", 2, "--seed"),
    ("bounds demo --layers 9", 2, "no attention layer 9"),
    ("bounds demo --layers a", 2, "--layers"),
    ("bounds demo --layers 2-1", 2, "must be a list of layers"),
    ("bounds demo --layers '1 2'", 2, "must be a list of layers"),
    ("bounds demo --layers 0-999999999999", 2, "must be a list of layers"),
    ("bounds demo --batch-size many", 2, "--batch-size"),
    ("bounds demo --model-kwargs a=1", 2, "demo does not take"),
    ("bounds py:tests.cli.own:image --tower text", 2, "has no towers"),
    ("bounds demo --quantize int3", 2, "Did you mean 'int8' or 'int4'"),
    ("bounds demo --quantize nf4", 2, "it must be int8 or int4, and with groups"),
    ("bounds demo --quantize int4:0", 2, "int4:0"),
    ("bounds demo --quantize int4:7", 2, "groups of 7 do not divide the 48 inputs of blocks.0"),
    ("bounds demo --quantize int8:96", 2, "Use a divisor of 48"),
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
    ("jacobian demo --from layer:x", 2, "'layer:x': it must be pixels, embeddings, layers"),
    ("jacobian demo --from layer:", 2, "one layer: layer:5"),
    ("jacobian demo --from layer:3", 2, "no attention layer 3: the model has 3"),
    (f"jacobian {CONVOLUTIONS} -n 1 --from layers", 4, "no attention was found"),
    *(
        (f"jacobian demo --to {end}", 2, "it must be logits")
        for end in ("logits:", "logits:x", "logits:all", "loss:1", "hidden:--1", ":1")
    ),
    *(
        (f"jacobian demo --to {end} --rivals 3", 2, "--rivals needs --to")
        for end in ("features", "loss", "hidden")
    ),
    ("jacobian demo --norm inf --per-layer", 2, "--per-layer needs --norm 2"),
    ("attack demo", 2, "no attack radius"),
    ("attack demo --eps two", 2, "not a radius"),
    *(
        (f"attack demo --eps {text}", 2, f"--eps: '{text}' is not a range of radii")
        for text in ("1:2", "3:1:4", "0:1:1", "0:1:2000", "0:1/0:3", "1:4words:4", "0:1:x", "::3")
    ),
    ("attack demo --eps 0,0:8/255:9", 2, "0 is named twice"),
    ("attack demo --eps 65 --norm l1 --attack fgsm", 2, "larger than the range of the data"),
    ("certify demo --eps 0:8/255:9", 2, "give a radius above 0"),
    ("attack demo --eps 0.1 --data random", 2, "labelled"),
    (f"attack demo {BALL} fgsm,fgsm", 2, "fgsm is named twice"),
    ("attack demo --eps 1/2,0.5 --attack fgsm", 2, "0.5 is named twice"),
    (f"attack demo {BALL} fgsm --steps 3", 2, "--steps needs an attack that takes it: pgd"),
    (f"attack demo {BALL} fgsm --restarts 3", 2, "--restarts"),
    (f"attack demo {BALL} pgd --queries 9", 2, "--queries needs an attack that takes it: square"),
    (f"attack demo {BALL} fgsm --norm token-l2", 2, "token-l2 is a norm for token embeddings"),
    ("attack demo -n 1 --eps 2words", 2, "counts changes of a text, but the model takes images"),
    ("attack demo --eps 1patch --patch-size 3", 2, "do not divide images of 8x8"),
    ("attack demo --eps 17patches", 2, "16 patches of 2x2 pixels, fewer than 17"),
    ("attack demo --eps 0.5 --attack patch", 2, "not a whole number of patch"),
    (f"attack demo {BALL} pgd --patch-size 2", 2, "--patch-size needs --attack patch"),
    ("attack demo --eps 1patch --attack pgd", 2, "no requested attack changes patch"),
    ("attack demo --eps 1patch --norm patch --attack fgsm", 2, "no requested attack"),
    ("corrupt demo --corruption fig", 2, "there is no corruption 'fig'"),
    ("corrupt demo --corruption s", 2, "there is no corruption 's'"),
    ("corrupt demo --corruption frost", 2, "frost needs photographs of frost"),
    ("corrupt demo --corruption swap", 2, "--corruption swap is not for image models"),
    ("corrupt demo --severity 0", 2, "--severity: '0'"),
    ("corrupt demo --severity 1,6", 2, "--severity: '6': it must be less than or equal to 5"),
    ("corrupt demo --severity mild", 2, "--severity: 'mild'"),
    ("corrupt demo --severity ,", 2, "--severity"),
    ("corrupt demo --data random", 2, "corrupt needs labelled samples"),
    ("certify demo", 2, "no radius was given"),
    ("certify demo --eps 0", 2, "give a radius above 0"),
    ("certify demo --eps -1", 2, "not a radius"),
    ("certify demo --eps 3", 2, "larger than the range of the data"),
    ("certify demo --eps 0.1 --tol 0.2", 2, "--tol needs --radius"),
    ("certify demo --eps 0.1 --order 3", 2, "--order"),
    ("certify demo -n 1 --eps 0.001 --nodes 0", 2, "--nodes"),
    ("certify demo --eps 0.1 --attack words", 2, "certificates hold for balls"),
    ("certify demo --eps 0.1 --attack nothing", 2, "unknown attack"),
    ("certify demo --eps 2words --attack fgsm", 2, "fgsm cannot change words"),
    ("certify demo --eps 1/255 --norm l3", 2, "--norm: 'l3'"),
    ("certify demo --eps 1/255 --layers 0", 2, "no such option"),
    ("certify demo --eps 0.1 --norm l2 --export .", 2, "a ball of the norm l2 is none"),
    ("certify demo --eps 0.1 --export nowhere", 2, "there is no folder nowhere"),
    ("certify", 2, "missing argument 'MODEL'"),
    ("certify demo --instances a.csv", 2, "--instances has models of its own"),
    ("certify --instances a.csv", 4, "a.csv is no list of instances"),
    ("certify --instances a.csv --eps 0.1", 2, "--eps has no meaning with --instances"),
    ("certify --instances a.csv --smooth 0.1", 2, "--smooth has no meaning with --instances"),
    ("certify --instances a.csv --data demo", 2, "--data has no effect with --instances"),
    ("certify --instances a.csv --device-map auto", 2, "--device-map has no effect"),
    ("certify --instances a.csv -o a.json", 2, "-o a.json has no effect with --instances"),
    ("certify --instances a.csv -f html", 2, "-f html has no effect with --instances"),
    ("certify --instances a.csv -o nowhere/a.csv", 2, "there is no folder nowhere"),
    ("certify demo --radius --export .", 2, "--export needs --eps"),
    ("certify demo --smooth 0.1 --eps 0.1 --export .", 2, "--export has no meaning with --smooth"),
    ("certify demo --smooth 0", 2, "--smooth: 0.0"),
    ("certify demo --smooth inf", 2, "--smooth: inf"),
    ("certify demo --smooth 0.25 --norm linf", 2, "--norm has no meaning with --smooth"),
    *(
        (f"certify demo --smooth 0.25 {option}", 2, f"{option.split()[0]} has no meaning with")
        for option in ("--order 2", "--attack fgsm", "--radius")
    ),
    ("certify demo --smooth 0.25 --noise-samples 100", 2, "it must be like 100,1000"),
    ("certify demo --smooth 0.25 --noise-samples 0,100", 2, "--noise-samples"),
    ("certify demo --smooth 0.25 --alpha 0", 2, "--alpha"),
    ("certify demo --smooth 0.25 --alpha 0.5", 2, "--alpha"),
    ("certify demo --smooth 0.25 --data random", 2, "smoothing needs labelled samples"),
    ("certify demo --smooth 0.25 --denoiser a.py:b", 2, "it must be py:FILE:FACTORY"),
    ("certify demo --smooth 0.25 --denoiser py:a.py:b", 4, "a.py cannot be imported"),
    ("certify demo --smooth 0.25 --eps 2words", 2, "certificates hold for balls"),
    ("certify demo --eps 0.1 --alpha 0.01", 2, "--alpha needs --smooth"),
    ("certify demo --eps 1patch --export .", 2, "writes properties of boxes"),
    ("certify demo --smooth 0.25 --eps 1patch", 2, "certificates hold for balls"),
    ("certify demo --eps 1patch --patch-size 3", 2, "divides both: --patch-size 2"),
    ("certify demo --eps 17patches", 2, "16 patches of 2x2 pixels, fewer than 17"),
    ("certify demo --eps 1patch,0.1", 2, "one kind of change, but the units of --eps differ"),
    ("certify demo --eps 1patch --radius", 2, "--radius needs a ball"),
    ("certify demo --eps 1patch --attack pgd", 2, "--attack pgd cannot change patch"),
    ("certify demo --eps 1patch --norm linf", 2, "cannot search linf balls"),
    ("certify demo --norm patch --eps 4/255", 2, "not a whole number of patch"),
    ("certify demo --eps 0.1 --patch-size 4", 2, "--patch-size needs --norm patch"),
    ("certify demo --eps 1character", 2, "not for changed characters"),
    ("certify demo -n 1 --eps 2words", 2, "words cannot attack images"),
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
    (f"scaling demo --lengths 2:{10**400}:log3", 2, "--lengths"),
    ("scaling demo --radius inf", 2, "--radius"),
    *(
        (f"bounds demo --radius {text}", 2, "radius")
        for text in ("0", "0.1,0.10", "2words", "-1", "r")
    ),
    ("bounds demo --radius 0.1 --input module", 2, "--radius needs --input projections"),
    ("weights demo --within -1", 2, "--within"),
    ("weights demo --within 0.5", 2, "--within needs --at-samples"),
    ("weights demo --tol 0.1", 2, "--tol needs --at-samples"),
    (f"weights {CONVOLUTIONS}", 4, "no attention was found"),
    ("weights demo --layers 0", 2, "no such option"),
    ("train demo --data random", 2, "labelled"),
    ("train demo --k 3", 2, "--k needs --penalty jasmin"),
    ("train demo --penalty l2", 2, "--penalty"),
    ("train demo --noise -1", 2, "--noise: -1.0"),
    ("train demo --noise inf", 2, "--noise: inf"),
    ("train demo --noise 0.1 --adversarial pgd", 2, "--noise needs a training without"),
    ("train demo --eps 0.1", 2, "--eps needs --adversarial pgd"),
    ("train demo -o x.html", 2, ".html is not possible here"),
    ("train demo --resume", 2, "no unfinished training to resume"),
    *(
        (f"{command} --time-limit 1h", 2, "--time-limit: only when one MODEL")
        for command in ("train demo", "watch .", "check demo")
    ),
    ("check demo --shard 1/2", 2, "--shard: only when"),
    ("check demo --parts run", 2, "--parts: only when"),
    ("train demo --held-out random", 2, "--held-out"),
    ("train demo --classes 1", 2, "at least 2 classes"),
    ("train demo --classes 3", 2, "demo does not take --classes"),
    ("train no-such-model --data demo", 4, "no model"),
    ("explain sharpp", 2, "Did you mean 'sharp'"),
    ("gate missing.json", 5, "baseline"),
    ("report missing.json", 4, "cannot read"),
    ("baseline check missing.json", 5, "missing.json"),
    ("models no-such-thing", 2, "no model"),
]


@pytest.mark.parametrize(("line", "code", "says"), COMMANDS)
def test_bad_input_is_one_clear_line_and_the_documented_exit_code(line, code, says):
    refuse(code, says, *shlex.split(line))
    assert {path.name for path in Path().iterdir()} <= {"cache"}


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        ("boundz demo", "bounds"),
        ("baseline sav x.json", "save"),
        ("bounds demo --sample 3", "--samples"),
        ("bounds dmeo", "demo"),
        ("bounds demo:jasmine", "jasmin"),
        ("bounds jasmine", "demo:jasmin"),
        ("bounds tim:vit_tiny_patch16_22", "timm:vit_tiny_patch16_224"),
        ("bounds vit_tinny_patch16_224", "timm:vit_tiny_patch16_224"),
        ("bounds timm:vit_tinny_patch16_224", "vit_tiny_patch16_224"),
        ("bounds py:mine.py:modle", "model"),
        ("bounds mine.py:model", "py:mine.py:model"),
        ("bounds mine.pt", "mine.py"),
        ("attack demo --eps 0.1 --attack pdg", "pgd"),
        ("attack demo --eps 0.1 --attack fgsm,sqare", "square"),
        ("attack demo --eps 0.1 --attack custom:apgd-c", "apgd-ce"),
        ("attack demo --eps 0.1 --attack standart", "standard"),
        ("attack demo --eps 0.1 --norm linff", "linf"),
        ("jacobian demo --to logit", "logits"),
        ("jacobian demo --from pixel", "pixels"),
        ("corrupt demo --corruption fog,contast", "contrast"),
        ("scaling demo --mode real,adverserial", "adversarial"),
        ("scaling demo --mask casual", "causal"),
        ("train demo --optimizer sdg", "sgd"),
        ("train demo --penalty jasmine", "jasmin"),
        ("bounds demo --dtype float46", "float64"),
        ("bounds demo --data demo:trian", "demo:train"),
        ("bounds demo --data min.py", "mine.py"),
        ("bounds demo -f jsn", "json"),
        ("bounds demo -o x.jsno", ".json"),
        ("report mine.p", "mine.py"),
        ("models vit_tinny", "vit_tiny_patch16_224"),
        ("bounds demo --config wrong.toml", "'float32'"),
    ],
)
def test_the_name_that_was_meant_is_named(args, meant):
    Path("mine.py").write_text("def model():\n    pass\n")
    Path("wrong.toml").write_text("dtype = 'flaot32'\n")
    done = invoke(*shlex.split(args), code=None)
    assert done.exit_code in (2, 4, 5), done.output
    page = done.stderr
    assert meant in page.replace("Possible options", "Did you mean").partition("Did you mean")[2]


def test_names_of_timm_are_those_that_timm_lists():
    assert list(timm_names()) == sorted(timm.list_models())
