"""The output contract: what a report holds, one layout per section, and how each column reads.

Everything a renderer or the gate must know about a column (label, unit, format, which way is
better, the domain on which the figure holds and how far it is proven) stands beside it here.
"""

from lipaudit.results.columns import Array as Array
from lipaudit.results.columns import Column as Column
from lipaudit.results.columns import Layout as Layout
from lipaudit.results.columns import Row as Row
from lipaudit.results.columns import Status as Status
from lipaudit.results.measures import MeasureRecord as MeasureRecord
from lipaudit.results.measures import layouts as layouts
from lipaudit.results.measures import measures as measures
from lipaudit.results.report import Data as Data
from lipaudit.results.report import Model as Model
from lipaudit.results.report import Note as Note
from lipaudit.results.report import Report as Report
from lipaudit.results.report import Run as Run
from lipaudit.results.report import Section as Section
from lipaudit.results.report import model_labels as model_labels
from lipaudit.results.rows import ATTACK_TABLE as ATTACK_TABLE
from lipaudit.results.rows import ATTENTION_TABLE as ATTENTION_TABLE
from lipaudit.results.rows import BALLS_TABLE as BALLS_TABLE
from lipaudit.results.rows import BOUNDS_TABLE as BOUNDS_TABLE
from lipaudit.results.rows import CERTIFY_TABLE as CERTIFY_TABLE
from lipaudit.results.rows import FITS_TABLE as FITS_TABLE
from lipaudit.results.rows import JACOBIAN_TABLE as JACOBIAN_TABLE
from lipaudit.results.rows import LAYERS_TABLE as LAYERS_TABLE
from lipaudit.results.rows import RADII_TABLE as RADII_TABLE
from lipaudit.results.rows import SCALING_TABLE as SCALING_TABLE
from lipaudit.results.rows import SPLITS_TABLE as SPLITS_TABLE
