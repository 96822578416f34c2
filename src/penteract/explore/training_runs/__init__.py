"""Runs of a folder, read for the page. It reads regular files below that folder alone, and follows no link."""
