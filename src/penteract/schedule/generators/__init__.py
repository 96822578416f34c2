"""A file for each pipeline schedule: the order in which a rank computes."""
