"""`headrace bench trainer`: the demo timed against a plain loop of the same recipe, and packing against padding."""
