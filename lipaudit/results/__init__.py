"""The output contract: what a report holds, one row type per section, and how each column reads.

Everything a renderer or the gate must know about a column (label, unit, format, which way is
better, the domain on which the figure holds and how far it is proven) stands beside it here.
"""

from lipaudit.results.columns import Array as Array
from lipaudit.results.columns import Column as Column
from lipaudit.results.columns import Row as Row
from lipaudit.results.columns import Status as Status
from lipaudit.results.measures import MeasureRecord as MeasureRecord
from lipaudit.results.measures import measures as measures
from lipaudit.results.measures import row_types as row_types
from lipaudit.results.measures import sample_columns as sample_columns
from lipaudit.results.report import Data as Data
from lipaudit.results.report import Model as Model
from lipaudit.results.report import Note as Note
from lipaudit.results.report import Report as Report
from lipaudit.results.report import Run as Run
from lipaudit.results.report import Section as Section
from lipaudit.results.report import model_labels as model_labels
from lipaudit.results.rows import AttackRow as AttackRow
from lipaudit.results.rows import AttentionRow as AttentionRow
from lipaudit.results.rows import BallRow as BallRow
from lipaudit.results.rows import BoundsRow as BoundsRow
from lipaudit.results.rows import CertifyRadiusRow as CertifyRadiusRow
from lipaudit.results.rows import CertifyRow as CertifyRow
from lipaudit.results.rows import JacobianRow as JacobianRow
from lipaudit.results.rows import LayerRow as LayerRow
from lipaudit.results.rows import ScalingFitRow as ScalingFitRow
from lipaudit.results.rows import ScalingRow as ScalingRow
from lipaudit.results.rows import ScalingSplitRow as ScalingSplitRow
