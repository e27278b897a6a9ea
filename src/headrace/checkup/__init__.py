"""Can what a server samples be trained on, token for token? Conversations with it, and what they showed.

It knows nothing of the server but its answers: ids, log-probs and texts are held against each other, never trusted.
"""

from headrace.checkup.report import CheckReport, Finding, Verdict
from headrace.checkup.run import checkup
from headrace.checkup.target import OutOfReach

__all__ = ["CheckReport", "Finding", "OutOfReach", "Verdict", "checkup"]
