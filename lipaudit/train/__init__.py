"""Fine-tuning with a penalty on attention, or against attacks."""

from lipaudit.train.loop import Epoch as Epoch
from lipaudit.train.loop import train as train
