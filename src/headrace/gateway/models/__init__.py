"""The models behind one gateway: policies that are recorded, and providers that calls are only passed on to."""
