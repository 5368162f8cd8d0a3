"""Accuracy under common corruptions of images, and typing errors."""

from lipaudit.tables.plugins import Wing
from lipaudit.wings.corruptions.corrupt import CORRUPT

WING = Wing(measures=(CORRUPT,))
