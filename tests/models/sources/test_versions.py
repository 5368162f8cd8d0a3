"""Packages and files of other versions: named, never an ImportError, never read in silence."""

import json

import pytest

from lipaudit.models.sources.loading import load_net
from tests.models.sources.cases import bert, refused, save, vit


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
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"transformers_version": version} | fields)
    )
    notes = load_net(str(tmp_path)).notes
    assert [(n.level, n.code) for n in notes] == [("warning", "newer-transformers")] * warned
    assert all("rope_of_tomorrow" in note.text for note in notes)


def test_a_tokenizer_whose_class_is_not_there_says_what_to_install(tmp_path):
    save(bert(), tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizerOfTomorrow"}')
    text = refused(tmp_path)
    assert "the tokenizer in" in text
    assert "pip install sentencepiece" in text


def test_an_image_processor_whose_class_is_not_there_says_what_to_do(tmp_path):
    save(vit(), tmp_path, tokenizer=False)
    settings = '{"image_processor_type": "ProcessorOfTomorrow"}'
    (tmp_path / "preprocessor_config.json").write_text(settings)
    text = refused(tmp_path)
    assert "the image processor in" in text
    assert "--mean and --std" in text
