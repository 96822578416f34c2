"""A profile for people: as text, as a page, and as a trace."""
