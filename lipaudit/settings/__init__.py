"""Every measure, declared once: its options and its columns; and the options of every run.

Nothing loads torch: what computes a measure is in `lipaudit.measures`, apart from its declaration,
so that commands that only read reports start at once.
"""

from lipaudit.settings.attack import ATTACK_TABLE as ATTACK_TABLE
from lipaudit.settings.attack import AttackOptions as AttackOptions
from lipaudit.settings.attention import ATTENTION_TABLE as ATTENTION_TABLE
from lipaudit.settings.attention import AttentionOptions as AttentionOptions
from lipaudit.settings.audit import AuditOptions as AuditOptions
from lipaudit.settings.bounds import BALLS_TABLE as BALLS_TABLE
from lipaudit.settings.bounds import BOUNDS_TABLE as BOUNDS_TABLE
from lipaudit.settings.bounds import LAYERS_TABLE as LAYERS_TABLE
from lipaudit.settings.bounds import BoundsOptions as BoundsOptions
from lipaudit.settings.certify import CERTIFY_TABLE as CERTIFY_TABLE
from lipaudit.settings.certify import RADII_TABLE as RADII_TABLE
from lipaudit.settings.certify import CertifyOptions as CertifyOptions
from lipaudit.settings.jacobian import JACOBIAN_TABLE as JACOBIAN_TABLE
from lipaudit.settings.jacobian import JacobianOptions as JacobianOptions
from lipaudit.settings.measure import MeasureOptions as MeasureOptions
from lipaudit.settings.measure import MeasureRecord as MeasureRecord
from lipaudit.settings.option import Settings as Settings
from lipaudit.settings.option import option as option
from lipaudit.settings.recipe import Recipe as Recipe
from lipaudit.settings.registry import layouts as layouts
from lipaudit.settings.registry import measures as measures
from lipaudit.settings.registry import option_types as option_types
from lipaudit.settings.run import RunOptions as RunOptions
from lipaudit.settings.scaling import FITS_TABLE as FITS_TABLE
from lipaudit.settings.scaling import SCALING_TABLE as SCALING_TABLE
from lipaudit.settings.scaling import ScalingOptions as ScalingOptions
