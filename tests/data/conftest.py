"""Models as far as data see them: what they take, and no model behind it."""

from dataclasses import dataclass, field

import pytest
from PIL import Image

from lipaudit.data.image_files import Resizing
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import InputError, LipauditError


@dataclass(frozen=True)
class Taker:
    """The part of a `Net` that data are read by, of plain values."""

    kind: str
    input_shape: tuple[int, ...]
    classes: int | None = None
    labels: tuple[str, ...] | None = None
    source: str = "py"
    box: tuple[float, float] | None = None
    vocabulary: int | None = None
    tokenize: object = None
    tokenize_pair: object = None
    pad_id: int | None = None
    end_id: int | None = None
    unknown_id: int | None = None
    prepare: object = None
    aliases: dict[str, int] = field(default_factory=dict)


def words(text, most):
    """One token a word, between a 1 and a 2, cut to `most` tokens with them."""
    ids = [3 + sum(map(ord, word)) % 97 for word in text.split()]
    return [1, *ids[: most - 2], 2][:most] if ids else []


def picture(path, colour=(10, 20, 30), size=(8, 8), mode="RGB"):
    """Write a picture of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


@pytest.fixture
def animals(tmp_path):
    """Two classes, three pictures each, told apart by their first pixel."""
    for shade, name in ((50, "cat"), (200, "dog")):
        for i in range(3):
            picture(tmp_path / name / f"{i}.png", (shade + i, 0, 0))
    return tmp_path


@pytest.fixture
def image_taker():
    """Build a model of images."""

    def make(shape=(3, 8, 8), classes=None, labels=None, **more):
        return Taker(
            "image", shape, classes, labels, box=(0.0, 1.0),
            prepare=Resizing(shape), **more,
        )  # fmt: skip

    return make


@pytest.fixture
def text_taker():
    """Build a model of text."""

    def make(most=128, classes=None, labels=None, tokenize=words):
        return Taker("text", (most,), classes, labels, vocabulary=100, tokenize=tokenize)

    return make


@pytest.fixture
def read(tmp_path, text_taker):
    """Write a file, and load it as a model of text takes it."""

    def load(name, content, net=None, **options):
        (tmp_path / name).write_text(content)
        return load_data(str(tmp_path / name), net or text_taker(), DataOptions(**options))

    return load


@pytest.fixture
def token_taker():
    """Build a model of float sequences."""
    return lambda shape=(5, 4): Taker("tokens", shape)


@pytest.fixture
def refused():
    """Load data that must be refused, and return what the error says."""

    def check(spec, net, kind=InputError, **options):
        with pytest.raises(LipauditError) as caught:
            load_data(None if spec is None else str(spec), net, DataOptions(**options))
        assert isinstance(caught.value, kind)
        assert caught.value.advice
        return f"{caught.value.message} | {caught.value.advice}"

    return check
