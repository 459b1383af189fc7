"""Meshes, and which logical axis of an array lies on which mesh axis."""
