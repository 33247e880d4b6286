"""From a question about DP parameters to a recommended setting."""

from .question import Question
from .recommendation import advise

__all__ = ["Question", "advise"]
