"""Fixtures: the zoo of small models."""

from tests.models.conftest import zoo as zoo
