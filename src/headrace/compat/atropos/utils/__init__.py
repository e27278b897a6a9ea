"""`atroposlib.utils`."""
