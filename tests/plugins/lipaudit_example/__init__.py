"""A package outside lipaudit that adds to it: a file for each kind of thing, and one record."""

from lipaudit.tables.plugins import Wing
from lipaudit_example.attacks import MI_FGSM
from lipaudit_example.bounds import FROBENIUS
from lipaudit_example.measures import CONFIDENCE

WING = Wing(
    measures=(CONFIDENCE,),
    bounds=(FROBENIUS,),
    attacks={"mi-fgsm": MI_FGSM},
    commands={"unsure": ("Learn", "lipaudit_example.commands:unsure")},
    topics={"Words of pages": {"temperature": "What a model's logits are divided by."}},
    drawings={"confidences": "lipaudit_example.drawings:draw_confidences"},
    public={"mi_fgsm": "lipaudit_example.momentum:mi_fgsm"},
)
