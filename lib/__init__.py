"""Machinery that the stages share and a reader may take on trust; nothing here knows of a stage."""
