"""Layers with random weights of every kind."""

from tests.theory.conftest import random_layer as random_layer
