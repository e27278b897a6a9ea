"""Policies: pure choices over a channel's state. Each answers one question and changes nothing."""
