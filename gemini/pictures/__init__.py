"""Pictures of a step from its :class:`~gemini.planning.timeline.Timeline`: memory per tier, tracks, a page, a trace."""

from gemini.pictures.board import memory_picture as memory_picture
from gemini.pictures.board import tracks_picture as tracks_picture
from gemini.pictures.files import draw as draw
from gemini.pictures.files import page as page
from gemini.pictures.files import perfetto as perfetto

__all__ = ["draw", "tracks_picture", "memory_picture", "page", "perfetto"]
