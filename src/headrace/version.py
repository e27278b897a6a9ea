"""The release, where any module can import it from."""

__version__ = "0.1.0"
