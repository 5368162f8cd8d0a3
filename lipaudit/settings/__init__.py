"""Options, declared once each: their machinery, and the options of every run and of training."""

from lipaudit.settings.option import Settings as Settings
from lipaudit.settings.option import option as option
from lipaudit.settings.recipe import Recipe as Recipe
from lipaudit.settings.run import RunOptions as RunOptions
