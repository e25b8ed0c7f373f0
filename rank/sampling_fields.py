"""Sampling parameters of requests and of the options that set their defaults: limits and meanings."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_COUNT = 1 << 31
MAX_SEED = (1 << 64) - 1  # of requests, which may be negative, too, and of options, which begin at 0

Temperature = Annotated[float, Meta(ge=0, le=100, description="0 is greedy")]
TopK = Annotated[int, Meta(ge=-1, le=MAX_COUNT, description="0 or -1 keeps all tokens")]
TopP = Annotated[float, Meta(ge=0, le=1, description="nucleus; 0 is greedy, 1 keeps all")]
MinP = Annotated[float, Meta(ge=0, le=1, description="relative to the likeliest token")]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100, description="1 is none; prompt and output count")]
Penalty = Annotated[float, Meta(ge=-2, le=2, description="0 is none; output counts")]
