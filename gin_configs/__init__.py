"""Gin files; gin finds includes only in packages."""
