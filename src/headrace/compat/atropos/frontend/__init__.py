"""`atroposlib.frontend`."""
