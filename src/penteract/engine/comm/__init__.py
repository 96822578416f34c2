"""The only place that talks to other ranks."""
