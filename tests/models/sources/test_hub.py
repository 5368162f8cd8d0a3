"""Models of the Hub, through its real clients: what is fetched, what is said, what is refused."""

import pytest
from safetensors.torch import save_file

from lipaudit.errors import UsageError
from lipaudit.models.sources.loader import LoadOptions, load_net
from lipaudit.models.sources.weight_files import list_weight_files
from tests.hub import TOKEN, files_of
from tests.hub import hub as hub
from tests.models.sources.cases import bert, refused, save

OFFLINE = LoadOptions(offline=True)
TIMM = "timm/test_vit.r160_in1k"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> dict[str, bytes]:
    """The files of a small text classifier."""
    folder = tmp_path_factory.mktemp("model")
    save(bert(), folder)
    return files_of(folder)


@pytest.fixture(scope="module")
def timm_model(tmp_path_factory) -> dict[str, bytes]:
    """The files of a small image classifier of timm, under one of its registered names."""
    import timm

    folder = tmp_path_factory.mktemp("timm")
    module = timm.create_model("test_vit", pretrained=False)
    save_file(module.state_dict(), folder / "model.safetensors")
    return files_of(folder) | {"pytorch_model.bin": b"never read"}


def codes(net) -> list[tuple[str, str]]:
    return [(note.level, note.code) for note in net.notes]


def test_the_commit_is_known_and_said(hub, model):
    sha = hub.add("org/tiny", model, {"v1": model | {"vocab.txt": b"older"}})
    net = load_net("hf:org/tiny")
    assert (net.commit.sha, net.commit.repository.revision) == (sha, "main")
    assert codes(net) == [("info", "hub-commit")]
    assert f"{sha[:12]} of main" in net.notes[-1].text
    older = load_net("hf-hub:org/tiny@v1").commit  # another spelling of the same
    assert older.sha == hub.repositories["org/tiny"].commit("v1")
    assert older.repository.revision == "v1"
    pinned = load_net(f"hf:org/tiny@{sha}")
    assert pinned.commit.sha == pinned.commit.repository.revision == sha
    assert load_net("demo").commit is None


def test_a_warning_where_the_cache_answers_in_place_of_the_hub(hub, model, monkeypatch):
    sha = hub.add("org/tiny", model)
    load_net("hf:org/tiny")
    hub.log.clear()
    load_net("hf:org/tiny")  # asked for once and not sent again
    assert (hub.downloads(), len(hub.log)) == ([], 1)
    hub.log.clear()
    offline = load_net("hf:org/tiny", OFFLINE)
    assert hub.log == []
    assert (codes(offline), offline.commit.sha) == ([("warning", "hub-cache")], sha)
    assert "--offline" in offline.notes[-1].text
    hub.repositories["org/tiny"].status = 503
    ill = load_net("hf:org/tiny")
    assert (codes(ill), ill.commit.sha) == ([("warning", "hub-cache")], sha)
    assert "503" in ill.notes[-1].text
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    cut_off = load_net("hf:org/tiny")
    assert codes(cut_off) == [("warning", "hub-cache")]
    assert "Connect" in cut_off.notes[-1].text
    # a commit is what it is, whoever is asked
    assert codes(load_net(f"hf:org/tiny@{sha}")) == [("info", "hub-commit")]
    text = refused("hf:org/other")
    assert "cannot be downloaded (Connect" in text
    assert "HF_ENDPOINT (http://127.0.0.1:1)" in text


def test_the_cache_follows_the_branch(hub, model):
    hub.add("org/tiny", model)
    load_net("hf:org/tiny")
    sha = hub.add("org/tiny", model | {"vocab.txt": b"newer"})
    assert load_net("hf:org/tiny").commit.sha == sha
    assert load_net("hf:org/tiny", OFFLINE).commit.sha == sha


def test_gated_repositories_say_where_to_ask(hub, model, monkeypatch):
    hub.add("org/gated", model, gated=True)
    for token in ("", "hf_of_somebody"):
        monkeypatch.setenv("HF_TOKEN", token)
        text = refused("hf:org/gated")
        assert "the model org/gated is gated" in text
        assert f"Request access on {hub.url}/org/gated" in text
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert load_net("hf:org/gated").commit is not None


INVALID = {"X-Error-Message": "Invalid credentials in Authorization header"}


@pytest.mark.parametrize(
    ("spec", "conduct", "said"),
    [
        ("hf:org/x", {"private": True}, ("the model org/x does not exist", "hf auth login")),
        ("hf:org/nothing", {}, ("the model org/nothing does not exist", "hf auth login")),
        ("hf:a b/c", {}, ("'a b/c' is not a valid",)),
        ("hf:org/x@v1", {}, ("org/x has no revision 'v1'", "/org/x/tree/main")),
        ("hf:org/x", {"status": 429}, ("org/x cannot be downloaded", "429", "HF_ENDPOINT")),
        ("hf:org/x", {"status": 503}, ("503",)),
        ("hf:org/x", {"files_status": 503}, ("503",)),
        ("hf:org/x", {"status": 401, "headers": INVALID}, ("401",)),
        ("hf:org/x", {"cut": 100}, ("org/x cannot be downloaded",)),
        ("hf:org/x", {"stall": 60}, ("Timeout",)),
    ],
)
def test_what_the_hub_denies_is_said_with_what_to_do(hub, model, monkeypatch, spec, conduct, said):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    hub.add("org/x", model | {"a.txt": b""}, **conduct)
    text = refused(spec)
    for words in said:
        assert words in text


def test_a_cut_download_goes_on_and_offline_without_a_cache_there_is_none(hub, model):
    hub.add("org/cut", model, cut=1)
    assert load_net("hf:org/cut").classes == 3
    hub.log.clear()
    text = refused("hf:org/tiny@v7", offline=True)
    assert "org/tiny at v7 is not in the local cache, and --offline" in text
    assert "hf download org/tiny" in text
    assert hub.log == []


def test_only_what_is_loaded_is_downloaded(hub, model):
    surplus = (
        "pytorch_model.bin", "model.fp16.safetensors", "consolidated.safetensors", "tf_model.h5",
        "flax_model.msgpack", "onnx/model.onnx", "onnx/config.json", "openvino/model.bin",
        "checkpoint-5/model.safetensors", "checkpoint-5/config.json", "training_args.bin",
        "optimizer.pt", "model.py",
    )  # fmt: skip
    hub.add("org/full", model | dict.fromkeys(surplus, b"{}"))
    net = load_net("hf:org/full")
    assert hub.downloads() == sorted(model)
    assert codes(net) == [("info", "hub-commit")]
    hub.log.clear()
    others = {name: data for name, data in model.items() if name != "model.safetensors"}
    hub.add("org/flax", others | {"flax_model.msgpack": b""})
    load_net("hf:org/flax", LoadOptions(model_kwargs={"pretrained": False}))
    assert hub.downloads() == sorted(others)
    text = refused("hf:org/flax")
    assert "no weights for PyTorch" in text
    assert "flax_model.msgpack" in text


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("names", "loaded"),
    [
        (["model.safetensors", "model.bin", "model.fp16.safetensors"], ["model.safetensors"]),
        (
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX,
             "consolidated.00.pth", "pytorch_model.bin", "original/consolidated.00.pth"],
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX],
        ),
        (["pytorch_model.bin", "rust_model.ot", "training_args.bin"], ["pytorch_model.bin"]),
        (["weights.safetensors", "weights.bin"], ["weights.safetensors"]),
        (["open.pt", "optimizer.pt", "rng_state.pth", "scheduler.pt"], ["open.pt"]),
        (["adapter_model.safetensors", "training_args.bin"], []),
        (["tf_model.h5", "config.json"], []),
    ],
)  # fmt: skip
def test_which_files_hold_the_weights(names, loaded):
    assert list_weight_files(names) == loaded


def test_timm_names_are_of_a_commit_too(hub, timm_model):
    sha = hub.add(TIMM, timm_model)
    net = load_net("timm:test_vit.r160_in1k")
    assert net.commit.sha == sha
    assert codes(net) == [("info", "hub-commit")]
    assert hub.downloads() == ["model.safetensors"]
    offline = load_net("timm:test_vit", OFFLINE)
    assert codes(offline) == [("warning", "hub-cache")]
    assert offline.weights_sha256 == net.weights_sha256
    unknown = {"model_kwargs": {"nonsense": 1}}
    assert "hf_hub_id" not in refused("timm:test_vit", UsageError, **unknown)


@pytest.mark.parametrize(("name", "place"), [("davit_huge", ""), ("gcvit_xxtiny", "https://")])
def test_weights_that_timm_has_not_on_the_hub_are_given_as_a_file(name, place):
    text = refused(f"timm:{name}")
    assert f"the Hub has no weights of timm for {name}" in text
    assert f"--arch timm:{name}" in text
    assert place in text


def test_timm_names_are_refused_with_the_same_words(hub, timm_model):
    hub.add(TIMM, timm_model, status=503)
    text = refused("timm:test_vit")
    assert "503" in text
    assert "--arch timm:test_vit" in text
    assert "pretrained=false" in text
    hub.repositories[TIMM].status, hub.repositories[TIMM].gated = None, True
    assert "is gated" in refused("timm:test_vit")
    assert "not in the local cache" in refused("timm:test_vit", offline=True)
