"""Plug-ins for other frameworks."""
