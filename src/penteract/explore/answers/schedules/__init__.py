"""The answers of the Schedules view."""
