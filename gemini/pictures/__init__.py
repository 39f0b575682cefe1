"""Pictures of a step from its :class:`~gemini.planning.timeline.Timeline`: memory per tier, lanes, a page, a trace."""

from gemini.pictures.board import lanes_picture as lanes_picture
from gemini.pictures.board import memory_picture as memory_picture
from gemini.pictures.files import draw as draw
from gemini.pictures.page import page as page
from gemini.pictures.perfetto import perfetto as perfetto

__all__ = ["draw", "lanes_picture", "memory_picture", "page", "perfetto"]
