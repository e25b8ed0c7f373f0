"""Step 3.7 Flash (StepFun 2026), of which the text model, Step 3.5's shape, is served."""

from __future__ import annotations

from .. import base
from . import step3p5

CONFIG = {"text_type": "step3p5"}

Args = step3p5.Args


class Model(base.TextOfMultimodal, step3p5.Model):
    LEFT_OUT = "vision_model.", "vit_large_projector.", "model.vision_model.", "model.multi_modal_projector."
