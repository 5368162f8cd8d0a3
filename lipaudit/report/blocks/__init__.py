"""What a page is made of: pure data, drawn alike by every renderer.

A view turns a section into blocks and knows no format; a renderer draws blocks and knows no
measure.
"""

from __future__ import annotations

from lipaudit.report.blocks.pages import Brief as Brief
from lipaudit.report.blocks.pages import Chapter as Chapter
from lipaudit.report.blocks.pages import Document as Document
from lipaudit.report.blocks.pages import Frame as Frame
from lipaudit.report.blocks.pages import Outcome as Outcome
from lipaudit.report.blocks.parts import Block as Block
from lipaudit.report.blocks.parts import Gallery as Gallery
from lipaudit.report.blocks.parts import Item as Item
from lipaudit.report.blocks.parts import Line as Line
from lipaudit.report.blocks.parts import Notes as Notes
from lipaudit.report.blocks.parts import Paragraph as Paragraph
from lipaudit.report.blocks.parts import Passage as Passage
from lipaudit.report.blocks.parts import Scorecard as Scorecard
from lipaudit.report.blocks.parts import Table as Table
from lipaudit.report.blocks.pictures import Curve as Curve
from lipaudit.report.blocks.pictures import Density as Density
from lipaudit.report.blocks.pictures import Forest as Forest
from lipaudit.report.blocks.pictures import Heatmap as Heatmap
from lipaudit.report.blocks.pictures import Histogram as Histogram
from lipaudit.report.blocks.pictures import Interval as Interval
from lipaudit.report.blocks.pictures import Intervals as Intervals
from lipaudit.report.blocks.pictures import Matrix as Matrix
from lipaudit.report.blocks.pictures import Picture as Picture
from lipaudit.report.blocks.pictures import Scatter as Scatter
from lipaudit.report.blocks.pictures import Series as Series
from lipaudit.report.blocks.pictures import Shares as Shares
from lipaudit.report.blocks.pictures import State as State
