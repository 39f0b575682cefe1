"""Pure planning: integers in, frozen values out. Nothing here imports torch or moves a byte."""
