"""A live service that changes one URL: root `/v1`, where conversations are found rather than named."""
