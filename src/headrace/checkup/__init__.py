"""Can what a server samples be trained on, token for token? Conversations with it, and what they showed.

It knows nothing of the server but its answers: ids, log-probs and texts are held against each other, never trusted.
"""

from headrace.checkup.finding import Finding, Report, Verdict
from headrace.checkup.http import OutOfReach
from headrace.checkup.run import checkup

__all__ = ["Finding", "OutOfReach", "Report", "Verdict", "checkup"]
