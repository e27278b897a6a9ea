"""`headrace check-gateway`: whether what a server samples can be trained on, token for token.

It knows nothing of the server but its answers: ids, log-probs and texts are compared with each other, and none is
trusted.
"""

from headrace.checkup.report import CheckReport, Finding, Verdict
from headrace.checkup.run import checkup
from headrace.checkup.target import OutOfReach

__all__ = ["CheckReport", "Finding", "OutOfReach", "Verdict", "checkup"]
