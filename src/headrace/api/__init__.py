"""The Trajectory API: Atropos' wire on Headrace's pool."""
