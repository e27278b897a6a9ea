"""Several tenants behind one gateway: each its own keys, its own trajectories, and bounds that protect the others."""
