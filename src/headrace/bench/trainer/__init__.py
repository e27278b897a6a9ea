"""`headrace bench trainer`: the demo timed, beside a plain loop of the same recipe, and packing beside padding."""
