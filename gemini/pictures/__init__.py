"""Pictures of a step from its :class:`~gemini.planning.timeline.Timeline`: memory per tier and tracks, or a trace."""

from gemini.pictures.board import draw as draw
from gemini.pictures.board import perfetto as perfetto

__all__ = ["draw", "perfetto"]
