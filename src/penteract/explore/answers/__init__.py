"""Answers to the page: objects of `page_schema`, computed by the planner. Standard library only: they run in a browser
too."""
