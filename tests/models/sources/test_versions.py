"""Packages and files of other versions: named, never an ImportError, never read in silence."""

import importlib.metadata

import pytest

from lipaudit.errors import ExitCode, InputError, explain_error, find_unmet_requirement
from lipaudit.models.sources.loader import load_net
from tests.commands import invoke
from tests.models.sources.cases import bert, configure, refused, save, vit


@pytest.fixture
def install(monkeypatch):
    """Pretend that a package has another version, or None, for the time of a test."""
    known = importlib.metadata.version

    def pretend(name, version):
        def found(package):
            if package == name and version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version if package == name else known(package)

        monkeypatch.setattr(importlib.metadata, "version", found)
        find_unmet_requirement.cache_clear()

    yield pretend
    find_unmet_requirement.cache_clear()


@pytest.mark.parametrize(
    ("name", "version", "says"),
    [
        ("transformers", "4.57.1", "transformers 4.57.1 is installed, and lipaudit needs"),
        ("torch", "2.5.1+cpu", "torch 2.5.1+cpu is installed, and lipaudit needs torch>="),
        ("torchvision", None, "torchvision is not installed, and lipaudit needs torchvision>="),
        ("timm", "1.0.99+local", ""),
    ],
)
def test_a_package_that_is_missing_or_too_old_is_named(install, name, version, says):
    install(name, version)
    done = invoke("attention", "demo", "-n", "1", code=ExitCode.INPUT if says else ExitCode.OK)
    assert says in " ".join(done.stderr.split())
    if says:  # whatever an old package made fail first
        fault = explain_error(ImportError("cannot import name 'x'"))
        assert isinstance(fault, InputError)
        assert fault.advice.startswith(f"pip install '{name}>=")


def test_a_torchvision_of_another_torch_is_named():
    # As transformers has it: the cause is behind an error of its own.
    try:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as cause:
            raise ModuleNotFoundError("Could not import module 'ViTModel'") from cause
    except ModuleNotFoundError as error:
        fault = explain_error(error)
    assert fault.exit_code == ExitCode.INPUT
    assert "torchvision does not fit the installed torch" in fault.message
    assert "the index that torch was installed from" in fault.advice


@pytest.mark.parametrize(
    ("version", "fields", "warned"),
    [
        ("99.0.0", {"rope_of_tomorrow": {"theta": 1}}, True),
        ("99.0.0", {}, False),
        ("4.57.0", {"rope_of_tomorrow": {"theta": 1}}, False),
        (None, {"rope_of_tomorrow": {"theta": 1}}, False),
    ],
)
def test_fields_of_a_newer_transformers_are_named(tmp_path, version, fields, warned):
    save(bert(), tmp_path)
    configure(tmp_path, transformers_version=version, **fields)
    notes = load_net(str(tmp_path)).notes
    assert [(n.level, n.code) for n in notes] == [("warning", "newer-transformers")] * warned
    assert all("rope_of_tomorrow" in note.text for note in notes)


def test_a_class_that_is_not_there_says_what_to_do(tmp_path):
    save(bert(), tmp_path / "text")
    (tmp_path / "text" / "tokenizer.json").unlink()
    configure(tmp_path / "text", "tokenizer_config.json", tokenizer_class="TokenizerOfTomorrow")
    text = refused(tmp_path / "text")
    assert "the tokenizer in" in text
    assert "pip install sentencepiece" in text
    save(vit(), tmp_path / "image", tokenizer=False)
    kind = {"image_processor_type": "ProcessorOfTomorrow"}
    configure(tmp_path / "image", "preprocessor_config.json", **kind)
    text = refused(tmp_path / "image")
    assert "the image processor in" in text
    assert "--mean and --std" in text
