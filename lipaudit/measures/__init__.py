"""The measures, one file each: options, tables, computation and summary; and their list.

No file of a measure loads torch before it measures: commands that read reports start at once.
"""

from lipaudit.measures.attack import ATTACK_TABLE as ATTACK_TABLE
from lipaudit.measures.attack import AttackOptions as AttackOptions
from lipaudit.measures.attention import ATTENTION_TABLE as ATTENTION_TABLE
from lipaudit.measures.attention import AttentionOptions as AttentionOptions
from lipaudit.measures.audit import AuditOptions as AuditOptions
from lipaudit.measures.balls import BALLS_TABLE as BALLS_TABLE
from lipaudit.measures.bounds import BOUNDS_TABLE as BOUNDS_TABLE
from lipaudit.measures.bounds import LAYERS_TABLE as LAYERS_TABLE
from lipaudit.measures.bounds import BoundsOptions as BoundsOptions
from lipaudit.measures.certify import CERTIFY_TABLE as CERTIFY_TABLE
from lipaudit.measures.certify import RADII_TABLE as RADII_TABLE
from lipaudit.measures.certify import CertifyOptions as CertifyOptions
from lipaudit.measures.jacobian import JACOBIAN_TABLE as JACOBIAN_TABLE
from lipaudit.measures.jacobian import JacobianOptions as JacobianOptions
from lipaudit.measures.measure import Measure as Measure
from lipaudit.measures.measure import MeasureOptions as MeasureOptions
from lipaudit.measures.measure import Part as Part
from lipaudit.measures.registry import layouts as layouts
from lipaudit.measures.registry import load_measures as load_measures
from lipaudit.measures.registry import option_types as option_types
from lipaudit.measures.scaling import FITS_TABLE as FITS_TABLE
from lipaudit.measures.scaling import SCALING_TABLE as SCALING_TABLE
from lipaudit.measures.scaling import ScalingOptions as ScalingOptions
