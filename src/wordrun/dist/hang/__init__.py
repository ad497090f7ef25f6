"""Noticing and reporting ranks that wait for ever."""
