"""The attention of any model: `survey.survey` names its layers, `capture.capture` reads them."""
