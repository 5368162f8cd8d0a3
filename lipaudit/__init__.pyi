from lipaudit import tensors
from lipaudit.api import audit as audit
from lipaudit.api import measure as measure
from lipaudit.engine.execute import Observer as Observer
from lipaudit.engine.shards import merge as merge
from lipaudit.errors import LipauditError as LipauditError
from lipaudit.gate import rank as rank
from lipaudit.models.net import ModelSpec as ModelSpec
from lipaudit.report import render as render
from lipaudit.report import summarize as summarize
from lipaudit.schema import load as load
from lipaudit.tables import Report as Report
from lipaudit.wings.training import monitor as monitor
from lipaudit.wings.training.penalty import attention_penalty as attention_penalty
from lipaudit.wings.training.watching import watch as watch

__version__: str
bounds = tensors
PUBLIC: dict[str, str]

def list_public() -> dict[str, str]: ...
