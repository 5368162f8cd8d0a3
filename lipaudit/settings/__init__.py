"""Every option of every measure, once: type, default, help, check. It never loads torch."""

from functools import cache

from lipaudit.results import measures
from lipaudit.settings.audit import AuditOptions as AuditOptions
from lipaudit.settings.measure import AttackOptions as AttackOptions
from lipaudit.settings.measure import AttentionOptions as AttentionOptions
from lipaudit.settings.measure import BoundsOptions as BoundsOptions
from lipaudit.settings.measure import CertifyOptions as CertifyOptions
from lipaudit.settings.measure import JacobianOptions as JacobianOptions
from lipaudit.settings.measure import MeasureOptions as MeasureOptions
from lipaudit.settings.measure import ScalingOptions as ScalingOptions
from lipaudit.settings.option import Settings as Settings
from lipaudit.settings.option import option as option
from lipaudit.settings.recipe import Recipe as Recipe
from lipaudit.settings.run import RunOptions as RunOptions


@cache
def option_types() -> dict[str, type[MeasureOptions]]:
    """Return the options of every measure by its name: ours, then those of plug-ins."""
    return {name: record.load(record.options) for name, record in measures().items()}
