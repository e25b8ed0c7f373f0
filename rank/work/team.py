"""All ranks as the lead's step loop sees them: a plan goes out to the others and begins here."""

from __future__ import annotations

from ...comm.control import Control
from .. import step
from .runner import Result, Runner


class Team:
    def __init__(self, control: Control, runner: Runner):
        self.control = control
        self.runner = runner

    def start(self, plan: step.Plan) -> Result:
        self.control.publish(step.encode_plan(plan))
        if plan.stop < 0:
            return self.runner.start(plan)
        while self.control.progress():
            pass
        self.runner.finish()
        return Result()

    def progress(self) -> bool:
        return self.control.progress()
