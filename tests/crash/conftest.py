"""What the crash tests share."""

from chance import choice

__all__ = ["choice"]
