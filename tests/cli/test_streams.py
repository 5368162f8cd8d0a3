"""What stands for the characters that a terminal does not have."""

import pytest

from lipaudit.cli.streams import make_printable


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("exactᵃ", b"exact^a"),
        ("10⁻⁵", b"10^-5"),
        ("‖X‖_F² ≤ 3", b"||X||_F^2 <= 3"),
        ("ᵃ exact at X", b"^a exact at X"),
    ],
)
def test_superscripts_do_not_run_into_what_they_stand_behind(text, plain):
    make_printable()
    assert text.encode("ascii", errors="lipaudit.plain") == plain
