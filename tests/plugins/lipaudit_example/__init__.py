"""A package outside lipaudit that adds to it: one file per kind of addition, and one record."""

from lipaudit.tables.plugins import Wing
from lipaudit_example.attacks import MI_FGSM
from lipaudit_example.bounds import FROBENIUS
from lipaudit_example.measures import CONFIDENCE

WING = Wing(
    measures=(CONFIDENCE,),
    bounds=(FROBENIUS,),
    attacks={"mi-fgsm": MI_FGSM},
)
