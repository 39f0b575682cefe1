"""Bridges from Gemini to frameworks, imported as ``gemini.integrations`` only: two names make two of every class."""

if __name__ != "gemini.integrations":
    raise ImportError(f"import this folder as 'gemini.integrations', not as {__name__!r}: two names make two copies")
