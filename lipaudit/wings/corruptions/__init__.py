"""Accuracy under common corruptions of images, and typing errors."""

from lipaudit.tables.plugins import Wing
from lipaudit.wings.corruptions.measure import CORRUPT

WORDS = {"accuracy under corruptions": "Mean share of the corrupted copies that are right."}
WING = Wing(measures=(CORRUPT,), topics={"Words of pages": WORDS})
