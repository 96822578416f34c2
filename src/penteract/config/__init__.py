"""Models, layouts, hardware, precision and runs as values: read from files, checked, completed and written back."""
