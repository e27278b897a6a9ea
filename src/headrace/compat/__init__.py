"""Other systems' words for what Headrace does."""
