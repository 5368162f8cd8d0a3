"""The gate: rules, paired statistics, verdicts, baselines. Nothing here loads torch."""

from lipaudit.gate.comparison import compare as compare
from lipaudit.gate.judging import judge as judge
from lipaudit.gate.ranking import rank as rank
