"""The routes of a gateway: each file reads requests of one kind, asks the gateway, and writes the answers."""
