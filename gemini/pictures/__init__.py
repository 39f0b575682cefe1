"""Pictures of a step from its :class:`~gemini.planning.timeline.Timeline`: memory per tier and tracks."""

from gemini.pictures.board import draw as draw
