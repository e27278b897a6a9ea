"""Headrace under the module names of other systems."""
