"""Hide communication behind computation: a course and the library it uses."""

from overlaplab.streams import device

__all__ = ["device"]
