"""Files are written whole, and links stay links."""

from pathlib import Path

import pytest

from lipaudit.engine.files import require_writable, write
from lipaudit.errors import UsageError


def test_a_link_stays_and_its_file_is_written(tmp_path):
    file = tmp_path / "folder" / "report.json"
    file.parent.mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(file)
    require_writable(link)
    write(link, b"one")
    write(link, b"two")
    assert link.is_symlink()
    assert file.read_bytes() == b"two"
    assert list(file.parent.iterdir()) == [file]


def test_links_in_a_circle_make_way_for_the_file(tmp_path):
    """`Path.resolve` raises a RuntimeError on them before Python 3.13."""
    circle = tmp_path / "circle.json"
    circle.symlink_to(circle)
    require_writable(circle)
    write(circle, b"one")
    assert circle.read_bytes() == b"one"


def test_a_link_into_no_folder_is_refused(tmp_path):
    link = tmp_path / "link.json"
    link.symlink_to(Path("missing") / "report.json")
    with pytest.raises(UsageError, match="there is no folder"):
        require_writable(link)
