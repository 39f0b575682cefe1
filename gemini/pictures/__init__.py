"""Pictures of a step from its :class:`~gemini.planning.timeline.Timeline`: memory per tier, tracks, a page, a trace."""

from gemini.pictures.board import draw as draw
from gemini.pictures.board import memory_picture as memory_picture
from gemini.pictures.board import page as page
from gemini.pictures.board import perfetto as perfetto
from gemini.pictures.board import tracks_picture as tracks_picture

__all__ = ["draw", "tracks_picture", "memory_picture", "page", "perfetto"]
