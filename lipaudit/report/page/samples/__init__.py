"""The samples of a report: which are the worst, and all that is known of one."""

from lipaudit.report.page.samples.choice import chosen as chosen
from lipaudit.report.page.samples.choice import ranked as ranked
from lipaudit.report.page.samples.pages import inspected as inspected
from lipaudit.report.page.samples.pages import overview as overview
from lipaudit.report.page.samples.pages import record as record
from lipaudit.report.page.samples.pages import shown as shown
from lipaudit.report.page.samples.pages import worst_table as worst_table
from lipaudit.report.page.samples.pictures import portrait as portrait
