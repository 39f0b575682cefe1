"""The version of Gemini: here, so that every floor can name it."""

__version__ = "0.1.0"
