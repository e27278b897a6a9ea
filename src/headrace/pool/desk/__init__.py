"""The pool's desk for scored groups: environments post them whole, a trainer takes them in batches of exact size."""
