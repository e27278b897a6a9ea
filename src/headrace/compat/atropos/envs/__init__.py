"""`atroposlib.envs`."""
