"""Which code a stage consists of."""

import shutil

import pytest

from components.io import code


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """The project's source in another place, where a test may edit it."""
    for package in code.PACKAGES:
        shutil.copytree(code.ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(code, "ROOT", tmp_path)
    return tmp_path


def digest(module: str | None = None) -> str:
    return code.code_digest.__wrapped__(module)


@pytest.mark.parametrize(
    ("edited", "cleaning", "everything"),
    [
        ("components/data/cleaning/pictures.py", True, True),  # imported inside a function
        ("components/data/__init__.py", True, True),
        ("components/data/deduplicate.py", False, True),
        ("models/albef/text.py", False, True),
    ],
)
def test_an_edit_counts_for_the_stages_that_use_the_module(copy, edited, cleaning, everything):
    before = digest("components.data.clean"), digest()
    path = copy / edited
    path.write_text(path.read_text() + "\n# changed\n")
    assert (digest("components.data.clean") != before[0]) is cleaning
    assert (digest() != before[1]) is everything


def test_a_module_from_elsewhere_counts_as_all_of_the_code():
    assert digest("a.test") == digest()
    assert digest("components.data.clean") != digest("components.data.shard")
