"""Every option of every measure, once: type, default, help, check. It never loads torch."""

from lipaudit.results import (
    AttackRow,
    AttentionRow,
    BoundsRow,
    JacobianRow,
    LayerRow,
    ScalingFitRow,
    ScalingRow,
    ScalingSplitRow,
)
from lipaudit.settings.attack import AttackOptions as AttackOptions
from lipaudit.settings.attention import AttentionOptions as AttentionOptions
from lipaudit.settings.bounds import BoundsOptions as BoundsOptions
from lipaudit.settings.jacobian import JacobianOptions as JacobianOptions
from lipaudit.settings.measure import MeasureOptions as MeasureOptions
from lipaudit.settings.measure import MeasureRecord as MeasureRecord
from lipaudit.settings.option import Settings as Settings
from lipaudit.settings.option import option as option
from lipaudit.settings.recipe import Recipe as Recipe
from lipaudit.settings.run import RunOptions as RunOptions
from lipaudit.settings.scaling import ScalingOptions as ScalingOptions

RECORDS: dict[str, MeasureRecord] = {
    record.name: record
    for record in (
        MeasureRecord(
            BoundsOptions, (BoundsRow, LayerRow), "lipaudit.measures.bounds:BOUNDS_MEASURE"
        ),
        MeasureRecord(AttentionOptions, (AttentionRow,), "lipaudit.measures.attention:ATTENTION"),
        MeasureRecord(JacobianOptions, (JacobianRow,), "lipaudit.measures.jacobian:JACOBIAN"),
        MeasureRecord(AttackOptions, (AttackRow,), "lipaudit.measures.attack:ATTACK"),
        MeasureRecord(
            ScalingOptions,
            (ScalingRow, ScalingFitRow, ScalingSplitRow),
            "lipaudit.measures.scaling:SCALING",
        ),
    )
}
"""Every measure, by the name of its command and section."""
