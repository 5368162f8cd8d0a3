"""An attack, as a table row. Nothing here needs torch: its function is imported when it runs."""

from lipaudit.attacks.kinds import AttackKind

MI_FGSM = AttackKind("lipaudit_example.momentum:mi_fgsm", norms=("linf",), steps=10)
