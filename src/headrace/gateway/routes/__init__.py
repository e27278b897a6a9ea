"""The routes of a gateway, one kind a file."""
