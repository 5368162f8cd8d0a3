"""The gate: rules, paired statistics, verdicts, baselines. Nothing here loads torch."""

from lipaudit.gate.baseline import find_problems as find_problems
from lipaudit.gate.baseline import load_baseline as load_baseline
from lipaudit.gate.baseline import promote as promote
from lipaudit.gate.baseline import require_samples as require_samples
from lipaudit.gate.changes import Comparison as Comparison
from lipaudit.gate.changes import compare as compare
from lipaudit.gate.judging import judge as judge
from lipaudit.gate.rules import DEFAULT_RULES as DEFAULT_RULES
from lipaudit.gate.rules import Rule as Rule
from lipaudit.gate.rules import configure as configure
from lipaudit.gate.rules import parse_rule as parse_rule
from lipaudit.gate.standings import Ranking as Ranking
from lipaudit.gate.standings import rank as rank
from lipaudit.gate.verdicts import Judgement as Judgement
from lipaudit.gate.verdicts import Verdict as Verdict
